"""One caller's connection: its requests one after another, each answered here or sent on its way as an exchange.

A caller may send the next request before it has its answer; it is read no further than a limit, and served in turn.
"""

import asyncio
import math
import socket
import struct
import time
from typing import Protocol, cast

from gateway.ingress.callers import Callers
from gateway.ingress.http_body import MalformedError, RequestBody
from gateway.ingress.http_exchange import Exchange
from gateway.ingress.http_operation import HttpOperation
from gateway.ingress.http_wire import (
    Request,
    RequestParser,
    error_body,
    read_request,
    render_answer,
)
from gateway.ingress.pace import LEAST_BYTES_PER_SECOND, Pace
from gateway.ingress.upstream import watch_peer
from wire.errors import ERROR_KIND_HEADER, ErrorKind, TidegateError

#: What a caller may send ahead of its turn. Bytes.
_AHEAD_LIMIT = 65536
#: A refused request's body up to this size is read and dropped, so that its connection stays. Bytes.
_DISCARD_LIMIT = 1048576
#: How long a connection that ends with an error is still read: closed at once, the error might not arrive. Seconds.
_LINGER_SECONDS = 2.0
#: While the instance leaves, an idle caller can still begin a request for this long. Seconds.
_LAST_REQUEST_SECONDS = 1.0
#: Value of SO_LINGER that makes closing a socket reset its connection.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

#: Status, headers and body of an answer that is made here.
OwnAnswer = tuple[int, list[tuple[bytes, bytes]], bytes]


class Service(Protocol):
    """What a connection needs of its door."""

    header_limit_bytes: int
    body_limit_bytes: int
    callers: "Callers[ClientConnection]"

    def begin(self, request: Request, caller: "ClientConnection") -> Exchange | HttpOperation | OwnAnswer:
        """Decide on a request: an exchange that is not started yet, or the answer. Raises TidegateError."""

    def count(
        self, pool: str | None, status: int, own_error: ErrorKind | None, *, held_seconds: float, since: float
    ) -> None:
        """A request is over; ``since`` is the ``time.perf_counter()`` at which it came."""


class ClientConnection(asyncio.Protocol):
    """See the module."""

    __slots__ = (
        "_body",
        "_closing",
        "_exchange",
        "_linger_until",
        "_loop",
        "_pace",
        "_parser",
        "_reading_paused",
        "_request",
        "_rest",
        "_service",
        "_since",
        "_taken_bytes",
        "_transport",
        "_watch",
        "_working",
        "_written_bytes",
        "write_paused",
    )

    _transport: asyncio.Transport

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._exchange: Exchange | HttpOperation | None = None
        self._parser: RequestParser | None = None
        self._body: RequestBody | None = None  # while it is still coming
        self._rest = b""
        self._pace = Pace()
        self._taken_bytes = 0  # of bodies
        self._written_bytes = 0
        self._request: Request | None = None
        self._working = False
        self._closing = False
        self._linger_until: float | None = None
        self._reading_paused = False
        self._since = self._loop.time()
        self.write_paused = False

    # -- what the event loop calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport by class, only by what they do.
        self._transport = cast("asyncio.Transport", transport)
        self._watch = watch_peer(transport, for_data=False)
        self._service.callers.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._body is not None:
            self._taken_bytes += len(data)
            data = self._take_body(data)
        if data and not self._closing:
            if self._exchange is None and self._body is None:
                self._serve(data)
            else:
                self._rest += data
        self.update_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._service.callers.closed(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._exchange is not None:
            self._exchange.on_caller_writable(writable=False)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._exchange is not None:
            self._exchange.on_caller_writable(writable=True)

    # -- requests -----------------------------------------------------------------------------------------

    def _serve(self, data: bytes) -> None:
        """Serve the requests in ``data`` until one is under way or incomplete."""
        self._working = True
        while data and self._exchange is None and self._body is None and not self._closing:
            try:
                found = self._read_head(data)
            except MalformedError as error:
                self._refuse_malformed(str(error))
                break
            data = b"" if found is None else self._begin(*found)
        self._rest = data
        self._working = False

    def _read_head(self, data: bytes) -> tuple[Request, bytes] | None:
        """The next request and what comes after its head, or None while that is incomplete. Raises MalformedError."""
        if self._parser is None:
            found = read_request(data, self._service.header_limit_bytes)
            if found is not None:
                return found
            self._parser = RequestParser(self._service.header_limit_bytes)
            self._since = self._loop.time()
        found = self._parser.feed(data)
        if found is not None:
            self._parser = None
        return found

    def _begin(self, request: Request, data: bytes) -> bytes:
        """Answer a request or send it on its way; returns what of ``data`` comes after it."""
        self._request = request
        self._body = RequestBody(request.body_bytes, self._service.body_limit_bytes) if request.body_bytes else None
        try:
            decided = self._service.begin(request, self)
            if not isinstance(decided, tuple):
                self._exchange = decided
                body, rest = self._split(data) if self._body is not None else (b"", data)
                decided.start(body, complete=self._body is None)
                return rest
        except TidegateError as error:
            if self._exchange is not None:
                self._exchange.fail(error)
            else:
                self._refuse(error)
                self._count(error.row.http, error.kind)
        else:
            self._answer(decided, keep_alive=self._may_keep(request))
            self._count(decided[0], None)
        return self._take_body(data) if self._body is not None and not self._closing else data

    def _split(self, data: bytes) -> tuple[bytes, bytes]:
        """See RequestBody.split."""
        assert self._body is not None
        parts = self._body.split(data)
        if self._body.complete:
            self._body = None
        return parts

    def _take_body(self, data: bytes) -> bytes:
        """Pass the next part of a body on, or drop it if nobody wants it; returns what comes after the body."""
        try:
            body, rest = self._split(data)
        except TidegateError as error:
            if self._exchange is not None:
                self._exchange.fail(error)
            if not self._closing:
                self._close(linger=True)
            return b""
        if self._exchange is not None:
            self._exchange.send_body(body, complete=self._body is None)
        return rest

    # -- what an exchange asks (see Caller) ---------------------------------------------------------------

    @property
    def may_stay(self) -> bool:
        return not self._service.callers.draining

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self._transport.write(data)

    def update_reading(self) -> None:
        """Read the caller, or not: a body only as fast as it is passed on, a next request only up to a limit."""
        wanted = len(self._rest) <= _AHEAD_LIMIT
        if self._exchange is not None and self._body is not None:
            wanted = self._exchange.wants_body
        wanted = wanted or self._closing
        if wanted == self._reading_paused and not self._transport.is_closing():
            self._reading_paused = not wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def exchange_ended(self, *, keep_alive: bool) -> None:
        self._exchange = None
        if keep_alive and self.may_stay:
            self._go_on()
        else:
            self._close(linger=self._body is not None)

    def exchange_failed(self, error: TidegateError) -> None:
        self._exchange = None
        self._refuse(error)
        if not self._closing:
            self._go_on()

    def exchange_broken(self) -> None:
        self._exchange = None
        self._closing = True
        # A reset, not an end of file: without a length in the answer, an end of file would make it look whole.
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    def _go_on(self) -> None:
        """The next request, if it is here already."""
        self._since = self._loop.time()
        if self._working:
            return
        if self._rest and self._body is None:
            data, self._rest = self._rest, b""
            self._serve(data)
        self.update_reading()

    # -- answers of our own -------------------------------------------------------------------------------

    def _refuse(self, error: TidegateError) -> None:
        headers = [(b"Content-Type", b"application/json"), (ERROR_KIND_HEADER.encode(), error.kind.value.encode())]
        if error.retry_after_seconds is not None:
            headers.append((b"Retry-After", b"%d" % math.ceil(error.retry_after_seconds)))
        request = self._request
        self._answer(
            (error.row.http, headers, error_body(error.message)),
            keep_alive=request is not None and error.kind is not ErrorKind.SLOW_CALLER and self._may_keep(request),
        )

    def _may_keep(self, request: Request) -> bool:
        """Whether the connection can go on after an answer that does not wait for the request's body."""
        # One who expects a 100 may send the body or the next request now: nobody can tell which.
        left = 0 if self._body is None else self._body.left
        body_ends = left == 0 or (left is not None and left <= _DISCARD_LIMIT and not request.expectation)
        return request.keep_alive and self.may_stay and body_ends

    def _answer(self, answer: OwnAnswer, *, keep_alive: bool) -> None:
        status, headers, body = answer
        self._transport.write(render_answer(status, headers, body, self._request, keep_alive=keep_alive))
        if not keep_alive:
            self._close(linger=True)

    def _refuse_malformed(self, message: str) -> None:
        self._request = None
        self._refuse(TidegateError(ErrorKind.BAD_REQUEST, message))
        self._count(400, ErrorKind.BAD_REQUEST)

    def _count(self, status: int, own_error: ErrorKind | None) -> None:
        self._service.count(None, status, own_error, held_seconds=0.0, since=time.perf_counter())

    # -- the end ------------------------------------------------------------------------------------------

    def _close(self, *, linger: bool) -> None:
        """Close after what was written; ``linger``: read on for a moment, as closing with unread bytes in the
        socket resets the connection and can take the last answer with it."""
        self._closing = True
        self._rest = b""
        self._since = self._loop.time()
        if linger and self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
            self._linger_until = self._since + _LINGER_SECONDS
            self.update_reading()
        else:
            self._transport.close()

    def sweep(self, now: float, idle_seconds: float, stall_seconds: float) -> None:
        """Called now and then (``now``: loop time): end what has been idle, closing, or stalled for too long."""
        if self._exchange is None or self._transport.is_closing():
            self._pace.restart()
        else:
            self._look_at_pace(self._exchange, now, stall_seconds)
        if self._exchange is not None:
            # A connection that is not read does not tell that its peer is gone.
            if self._reading_paused and not self._transport.is_closing() and self._watch.poll(0):
                self._transport.abort()
        elif self._linger_until is not None and now > self._linger_until:
            self._transport.abort()
        elif now - self._since > idle_seconds:
            if self._closing:
                self._transport.abort()
            else:
                self._close(linger=False)

    def _look_at_pace(self, exchange: Exchange | HttpOperation, now: float, stall_seconds: float) -> None:
        """A caller who hardly sends his body, or hardly reads his answer, must not keep a slot from others."""
        if self.write_paused:
            read_bytes = self._written_bytes - self._transport.get_write_buffer_size()
            if self._pace.has_stalled((exchange, "answer"), now, read_bytes, stall_seconds, 1):
                exchange.break_off()
        elif exchange.awaits_body and not self._reading_paused:
            least = LEAST_BYTES_PER_SECOND * stall_seconds
            if self._pace.has_stalled((exchange, "body"), now, self._taken_bytes, stall_seconds, least):
                message = f"the request's body came at less than 1 KiB/s for {stall_seconds:g} s (body_stall_seconds)"
                exchange.fail(TidegateError(ErrorKind.SLOW_CALLER, message))
        else:
            self._pace.restart()

    def leave(self) -> None:
        """Close after the next answer. One that is idle gets a moment, for its next request may be on the wire already
        and could not be answered any more."""
        if self._exchange is None and not self._closing:
            self._loop.call_later(_LAST_REQUEST_SECONDS, self._leave_if_idle)

    def _leave_if_idle(self) -> None:
        if self._exchange is None and not self._closing:
            self._close(linger=self._body is not None)

    def cut(self, error: TidegateError) -> None:
        """Give up the request under way, if any, and close."""
        if self._exchange is not None:
            self._exchange.fail(error)
        if not self._closing:
            self._close(linger=False)

    def abort(self) -> None:
        self._transport.abort()
