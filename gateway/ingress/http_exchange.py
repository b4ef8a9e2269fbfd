"""One HTTP request on its way: the bytes there and back, and what happens when a connection fails between them.

How it gets a slot and a connection: placement.py. Every way out of an exchange goes through ``_end``, once.
"""

import asyncio
from typing import Protocol

from gateway.ingress.http_body import CHUNKED, UNTIL_CLOSE
from gateway.ingress.http_wire import AnswerHead, Request, with_retry_after
from gateway.ingress.json_part import PART_LIMIT, JsonPart, may_name, sequence_of, timeout_of
from gateway.ingress.placement import RESEND_LIMIT
from gateway.ingress.recovery import Recovery
from gateway.ingress.shape_guard import check_shapes, may_be_deadly
from gateway.ingress.upstream import UpstreamConnection, Upstreams
from gateway.routing.faults import sent_away
from gateway.routing.pool import Pool, RequestHead
from wire.errors import ErrorKind, TidegateError

#: While a request has no connection yet, this much of its body is taken in; then its caller is not read. Bytes.
_WAITING_BODY_LIMIT = 65536
#: Up to this size, what was sent is kept until there is an answer, to send it again should that be allowed. Bytes.
_REPLAY_LIMIT = 65536


class Caller(Protocol):
    """The caller's side of an exchange: its connection."""

    @property
    def write_paused(self) -> bool:
        """True while the caller does not take what it was sent."""

    @property
    def may_stay(self) -> bool:
        """False when the connection shall end after this answer, for a reason other than the request's."""

    def write(self, data: bytes) -> None: ...

    def update_reading(self) -> None:
        """Something changed that decides whether the caller is read."""

    def exchange_ended(self, *, keep_alive: bool) -> None:
        """The answer is complete."""

    def exchange_failed(self, error: TidegateError) -> None:
        """Nothing of an answer was sent: answer with ``error``."""

    def exchange_broken(self) -> None:
        """The answer cannot be completed: break the connection so that nobody takes it for whole."""


class Ledger(Protocol):
    """Where an exchange is counted when it is over."""

    def count(
        self, pool: str | None, status: int, own_error: ErrorKind | None, *, held_seconds: float, since: float
    ) -> None: ...


class Exchange(Recovery[UpstreamConnection]):
    """See the module. Started by :meth:`start`; ended by itself or by :meth:`cancel` or :meth:`fail`."""

    __slots__ = (
        "_answer_started",
        "_body_complete",
        "_caller",
        "_connection",
        "_gathering",
        "_invited",
        "_json",
        "_keep_alive",
        "_ledger",
        "_replay",
        "_replay_bytes",
        "_request",
        "_status",
        "_waiting",
        "_waiting_bytes",
        "upstream_writable",
        "wants_content",
    )

    CALLER_LEFT = 499
    _upstreams: Upstreams

    def __init__(
        self,
        request: Request,
        head: RequestHead,
        pool: Pool,
        *,
        caller: Caller,
        upstreams: Upstreams,
        ledger: Ledger,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(upstreams, loop)
        self._request = request
        self._head = head
        self._deadline = head.deadline
        self._pool = pool
        self._caller = caller
        self._ledger = ledger
        self._connection: UpstreamConnection | None = None
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._replay: list[bytes] | None = []
        self._replay_bytes = 0
        self._body_complete = False
        self._gathering = False
        self._json: JsonPart | None = None
        self._invited = False
        self._answer_started = False
        self._keep_alive = request.keep_alive
        self._status = self.CALLER_LEFT
        self.upstream_writable = True
        self.wants_content = request.http_1_0

    # -- from the caller ----------------------------------------------------------------------------------

    def start(self, body: bytes, *, complete: bool) -> None:
        """Look for a slot. ``body`` is what has come of the request's body, ``complete`` when that is all."""
        self._body_complete = complete
        if body:
            self._waiting.append(body)
            self._waiting_bytes = len(body)
        # A small body is waited for first: a slot is too dear for a caller who sends byte by byte.
        # One who expects a 100 sends nothing before he gets it.
        request = self._request
        small = 0 < request.body_bytes <= _WAITING_BODY_LIMIT
        self._gathering = small and not complete and not request.expectation
        if self._gathering:
            self._watch_deadline()
        models = self._pool.sequences.models
        if models and self._head.model in models and request.method == b"POST":
            self._json = JsonPart(request)
            self._gathering = True
            self._invite()
            self._look_into(self._json, body)
        elif not self._gathering:
            self._find_slot()

    def _invite(self) -> None:
        """Ask for the body, where the caller waits to be asked."""
        if self._request.expectation and not self._body_complete and not self._invited:
            self._invited = True
            self._caller.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _look_into(self, part: JsonPart, body: bytes) -> None:
        """Once its JSON part is there: a request of a sequence goes where that is."""
        part.feed(body)
        small = self._request.body_bytes <= _WAITING_BODY_LIMIT
        if not self._body_complete and (not part.complete or (small and self._request.body_bytes > 0)):
            return
        self._gathering = False
        if part.cut:
            message = f"the JSON part of a request to a sequence model is limited to {PART_LIMIT} bytes"
            self.fail(TidegateError(ErrorKind.TOO_LARGE, message))
            return
        sequence = sequence_of(part.text, self._head.model or "")
        if sequence is None:
            self._find_slot()
        else:
            self._follow_sequence(sequence)

    def _own_timeout(self) -> int | None:
        if self._request.method != b"POST" or not self._waiting:
            return None
        part = self._json
        if part is None:
            body = self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting)
            if self._body_complete and not may_name(b"timeout", self._request, body):
                return None
            part = self._json = JsonPart(self._request)
            part.feed(body)
        return timeout_of(part.text)

    @property
    def awaits_body(self) -> bool:
        """True while nothing but more of the request's body is wanted: it is read, and not for want of a slot."""
        return not self._body_complete and (self._gathering or self._connection is not None)

    @property
    def wants_body(self) -> bool:
        """False while the caller must not be read: no connection yet, or the replica takes no more just now."""
        if self._connection is None:
            looking = self._gathering and self._json is not None
            return self._waiting_bytes < (PART_LIMIT if looking else _WAITING_BODY_LIMIT)
        return self.upstream_writable

    def send_body(self, data: bytes, *, complete: bool) -> None:
        """The next part of the request's body; ``complete`` when it is the last."""
        self._body_complete = complete
        if self._connection is None:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._gathering and self._json is not None:
                self._look_into(self._json, data)
            elif complete and self._gathering:
                self._gathering = False
                self._find_slot()
            elif self._json is not None and self._hold is not None and not self._json.complete:
                self._json.feed(data)
                self._bound_wait()
            return
        self._connection.write(data)
        self._remember(data)
        if complete and self._pool.faults.first_byte_limit_seconds:
            self._await_first_byte()

    def fail(self, error: TidegateError) -> None:
        """Give up with ``error``, or by breaking the transfer when the answer has begun."""
        if self._ended:
            return
        started = self._answer_started
        self._end(error.row.http, error.kind)
        if started:
            self._caller.exchange_broken()
        else:
            self._caller.exchange_failed(error)

    def break_off(self) -> None:
        """The caller does not take his answer: give up, and break the connection."""
        if not self._ended:
            self._end(self.CALLER_LEFT, None)
            self._caller.exchange_broken()

    # -- to the replica -----------------------------------------------------------------------------------

    def _send_on(self, connection: UpstreamConnection) -> None:
        request = self._request
        body = b""
        if self._waiting:
            body = self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting)
            if may_be_deadly(request, body) and not self._is_harmless(body):
                self._upstreams.put_back(connection)
                return
            self._waiting = []
            self._waiting_bytes = 0
        self._connection = connection
        if self._caller.write_paused:
            connection.set_reading(wanted=False)
        connection.send(self, request.upstream_head + body)
        if body:
            self._remember(body)
        self._invite()
        if self._body_complete and self._pool.faults.first_byte_limit_seconds:
            self._await_first_byte()
        self._caller.update_reading()

    def _is_harmless(self, body: bytes) -> bool:
        """Whether its replica survives it, as far as that is known; otherwise it has failed."""
        try:
            if self._head.slotted:
                check_shapes(self._request, body)
        except TidegateError as error:
            self.fail(error)
            return False
        return True

    # -- from the replica ---------------------------------------------------------------------------------

    def on_answer(self, head: AnswerHead, body: bytes, *, done: bool) -> None:
        if self._fault_timer is not None:
            self._on_first_byte()
        if done and (head.status == 503 or head.status == 404):
            why = sent_away(unavailable=head.status == 503, message=body)
            if why is not None and self._move():
                return
        limit = self._upstreams.answer_limit_bytes
        if head.body_bytes > limit:
            message = f"the answer of {head.body_bytes} bytes is larger than body_limit_bytes ({limit})"
            self.fail(TidegateError(ErrorKind.TOO_LARGE, message))
            return
        self._answer_started = True
        self._replay = None
        self._status = head.status
        raw = self._head_for_caller(head)
        if head.status == 503:
            raw = with_retry_after(raw, self._pool.retry_after_full(batch=self._head.batch))
        self._caller.write(raw + body if body else raw)
        if done:
            self._complete()

    def _head_for_caller(self, head: AnswerHead) -> bytes:
        """The replica's bytes as they are, where the caller's connection lives on as HTTP/1.1 expects."""
        request = self._request
        ends_with_connection = head.body_bytes == UNTIL_CLOSE or (request.http_1_0 and head.body_bytes == CHUNKED)
        self._keep_alive = request.keep_alive and head.keep_alive and self._caller.may_stay and not ends_with_connection
        if self._keep_alive and not request.http_1_0:
            return head.raw
        return head.for_caller(http_1_0=request.http_1_0, keep_alive=self._keep_alive)

    def on_answer_body(self, body: bytes, *, done: bool) -> None:
        if body:
            self._caller.write(body)
        if done:
            self._complete()

    def _complete(self) -> None:
        if self._reservation is not None:
            self._reservation.release_answered()
        self._end(self._status, None, finished=True)
        self._caller.exchange_ended(keep_alive=self._keep_alive)

    def on_upstream_lost(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if self._ended or connection is None:
            return
        # A model runs when it has its whole input, and reading metadata twice is harmless.
        unreached = not self._body_complete or self._request.method == b"GET"
        if self._answer_started or not unreached:
            if self._reservation is not None:
                self._reservation.release_lost()
            message = f"the replica was lost before it had answered; the request may have run ({reason})"
            error = TidegateError(ErrorKind.REPLICA_LOST, message)
            if self._answer_started:
                self.fail(error)
            else:
                self._repeat_unless_died(error)
        elif self._resent == RESEND_LIMIT or not self._take_back():
            message = "the replica was lost before it had the whole request; it did not run"
            self.fail(TidegateError(ErrorKind.REPLICA_UNREACHABLE, message))
        else:
            self._resent += 1
            if connection.reused:
                # It was stale, which says little about the replica and much about its other old connections.
                self._upstreams.forget_idle_of(connection.replica_id)
            self._elsewhere(unreached=not connection.reused)
            self._caller.update_reading()

    def _take_back(self) -> bool:
        replay = self._replay
        if replay is None or self._answer_started:
            return False
        self._waiting, self._waiting_bytes = replay, self._replay_bytes
        self._replay, self._replay_bytes = [], 0
        self.upstream_writable = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.finish(reusable=self._body_complete)
        self._on_first_byte()
        return True

    def on_upstream_writable(self, *, writable: bool) -> None:
        self.upstream_writable = writable
        self._caller.update_reading()

    def on_caller_writable(self, *, writable: bool) -> None:
        """Back-pressure: whether the caller takes more of the answer now."""
        if self._connection is not None:
            self._connection.set_reading(wanted=writable)

    # -- the end ------------------------------------------------------------------------------------------

    def _remember(self, data: bytes) -> None:
        """Keep what was sent while it may have to be sent again."""
        if self._replay is None:
            return
        self._replay_bytes += len(data)
        if self._replay_bytes > _REPLAY_LIMIT:
            self._replay = None
        else:
            self._replay.append(data)

    def _end(self, status: int, own_error: ErrorKind | None, *, finished: bool = False) -> None:
        """Give everything back. ``finished``: the answer came whole, so that the connection may be used again."""
        self._give_back(well=finished and status == 200)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.finish(reusable=finished and self._body_complete)
        self._ledger.count(self._pool.name, status, own_error, held_seconds=self._held_seconds, since=self._began)
