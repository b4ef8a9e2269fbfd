"""A request's way to a replica, whatever its protocol: a slot, at once or after a wait; a connection; the hand-over;
and another replica when this one provably did not get the request. ``Exchange`` and ``RpcStream`` are placements.

They are one object with it, by inheritance: an object more per request would cost what some requests cost in all.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from gateway.routing.pool import Hold, Pool, RequestHead, Reservation
from gateway.routing.sequences import Sequence, SequencePart
from wire.errors import ErrorKind, TidegateError
from wire.membership import ReplicaLease

#: How often a request is sent again because what it was sent to provably did not run it.
RESEND_LIMIT = 3

C = TypeVar("C")


class Connections(Protocol[C]):
    """The connections of one door to all replicas."""

    def take(self, lease: ReplicaLease) -> C | None:
        """An open connection that takes a request now; None when there is none."""

    def connect(self, lease: ReplicaLease, then: Callable[[C | None], None]) -> None:
        """Open a connection and call ``then`` with it, or with None when the replica cannot be reached."""

    def put_back(self, connection: C) -> None:
        """A connection that nobody needs after all."""


class Placement(Generic[C]):
    """See the module. Begun with :meth:`_find_slot`; ends in :meth:`_send_on` or :meth:`fail`, or by :meth:`cancel`.

    A subclass sets ``_pool`` and ``_head`` before that, gives ``_send_on``, ``_end`` and ``fail``, and calls
    ``_give_back`` once, when it is over.
    """

    __slots__ = (
        "_arrived",
        "_asking",
        "_began",
        "_deadline",
        "_deadline_timer",
        "_ended",
        "_fault_timer",
        "_head",
        "_held_seconds",
        "_hold",
        "_loop",
        "_part",
        "_pool",
        "_queue_timer",
        "_resent",
        "_reservation",
        "_sequence",
        "_upstreams",
    )

    #: Status under which a request counts whose caller left before it was answered.
    CALLER_LEFT: int

    _pool: Pool
    _head: RequestHead

    def __init__(self, upstreams: Connections[C], loop: asyncio.AbstractEventLoop) -> None:
        self._upstreams = upstreams
        self._loop = loop
        self._arrived = loop.time()
        self._began = (
            time.perf_counter()
        )  # loop time moves in whole milliseconds under uvloop: too coarse to measure with
        self._deadline: float | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._queue_timer: asyncio.TimerHandle | None = None
        self._hold: Hold | None = None
        self._reservation: Reservation | None = None
        self._held_seconds = 0.0
        self._fault_timer: asyncio.TimerHandle | None = None  # see recovery.py
        self._part: SequencePart | None = None
        self._sequence: Sequence | None = None
        self._asking: asyncio.Task[None] | None = None
        self._resent = 0
        self._ended = False

    # -- what a protocol adds -----------------------------------------------------------------------------

    def _send_on(self, connection: C) -> None:
        """There is a slot and a connection: send the request."""
        raise NotImplementedError

    def fail(self, error: TidegateError) -> None:
        """Give up with ``error``. Harmless when it is over already."""
        raise NotImplementedError

    def _own_timeout(self) -> int | None:
        """Microseconds after its arrival for which the request wants to wait: its ``timeout`` parameter, as far as what
        has come of it tells. Asked only of requests that have to be held."""
        return None

    def _end(self, status: int, own_error: ErrorKind | None) -> None:
        """It is over: give everything back and count it."""
        raise NotImplementedError

    # -- the way ------------------------------------------------------------------------------------------

    def _find_slot(self, *, since: float | None = None) -> None:
        """``since``: when it arrived, for one that had a slot before."""
        if self._deadline is not None and self._expired():
            return
        faults = self._pool.faults
        if faults.repeatable and since is None and self._head.model in faults.repeatable:
            faults.budget.on_request()
        reservation = self._pool.try_reserve(self._head, since=since)
        if reservation is not None:
            self._on_slot(reservation)
            return
        try:
            self._hold = self._pool.hold(self._head, since=since)
        except TidegateError as error:
            self.fail(error)
        else:
            self._hold.future.add_done_callback(self._on_hold_end)
            self._bound_wait()

    def _on_hold_end(self, future: "asyncio.Future[Reservation]") -> None:
        if self._ended or future.cancelled():
            return
        self._hold = None
        error = future.exception()
        if error is None:
            self._on_slot(future.result())
        elif isinstance(error, TidegateError):
            self._held_seconds = self._loop.time() - self._arrived
            self.fail(error)

    def _on_slot(self, reservation: Reservation) -> None:
        self._reservation = reservation
        self._held_seconds = reservation.held_seconds
        if self._part is not None and self._sequence is None:
            # It began to wait when no replica was ready: where it got its slot its sequence is from now on.
            self._sequence = self._pool.sequences.join(self._part, reservation.replica.id, self)
            self._pool.sequences.write(self._sequence)
        if self._deadline is not None:
            self._watch_deadline()
        connection = self._upstreams.take(reservation.replica)
        if connection is not None:
            self._send_on(connection)
        else:
            self._upstreams.connect(reservation.replica, self._on_connected)

    def _on_connected(self, connection: C | None) -> None:
        if self._ended:
            if connection is not None:
                self._upstreams.put_back(connection)
        elif connection is None:
            # Refused or silent: it never got the request, so another replica may.
            self._elsewhere(unreached=True)
        elif self._deadline is not None and self._expired():
            self._upstreams.put_back(connection)
        else:
            self._send_on(connection)

    def _elsewhere(self, *, unreached: bool) -> None:
        """Give the slot back and look for another; ``unreached``: because the replica could not be reached."""
        reservation = self._reservation
        assert reservation is not None
        self._reservation = None
        if unreached:
            reservation.release_unreached()
        else:
            reservation.release()
        if self._part is None:
            self._find_slot(since=self._arrived)
        else:
            # A sequence that starts may start elsewhere; one that is under way is where it is.
            unfit = reservation.replica.id if unreached and self._part.start else None
            self._follow_sequence(self._part, but=unfit, since=self._arrived)

    def cancel(self) -> None:
        """The caller is gone: nothing is to be answered, and the replica need not go on."""
        if not self._ended:
            reservation, self._reservation = self._reservation, None
            self._end(self.CALLER_LEFT, None)
            if reservation is not None:
                reservation.release_abandoned()

    def _give_back(self, *, well: bool = False) -> None:
        """Whatever it has or waits for; ``well``: the model has done what was asked."""
        self._ended = True
        if self._queue_timer is not None:
            self._queue_timer.cancel()
        if self._fault_timer is not None:
            self._fault_timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        if self._sequence is not None and self._part is not None:
            self._pool.sequences.leave(self._sequence, self, ended=well and self._part.end)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        if self._hold is not None:
            self._hold.cancel()
        if self._reservation is not None:
            self._reservation.release()

    # -- its sequence -------------------------------------------------------------------------------------

    def _follow_sequence(self, part: SequencePart, *, but: str | None = None, since: float | None = None) -> None:
        """Look for a slot on the replica that holds, or shall hold, the request's sequence; see Sequences.place."""
        self._part = part
        try:
            replica = None if but is not None else self._pool.sequences.known_place(part)
        except TidegateError as error:
            self.fail(error)
            return
        if replica is not None:
            self._pin(part, replica, since)
        else:
            self._asking = self._loop.create_task(self._ask_for_place(part, but, since))

    async def _ask_for_place(self, part: SequencePart, but: str | None, since: float | None) -> None:
        try:
            replica = await self._pool.sequences.place(part, but=but)
        except TidegateError as error:
            self._asking = None
            self.fail(error)
        else:
            self._asking = None
            self._pin(part, replica, since)

    def _pin(self, part: SequencePart, replica: str | None, since: float | None) -> None:
        if replica is not None:
            self._head = replace(self._head, replica=replica)
            self._sequence = self._pool.sequences.join(part, replica, self)
        self._find_slot(since=since)

    def on_sequence_replica(self, lost: TidegateError | None) -> None:
        """See gateway.routing.sequences.Follower. One that has a slot already goes on as far as it can."""
        if self._part is None or self._reservation is not None or self._asking is not None:
            return
        if self._hold is not None:
            if self._hold.future.done():
                return
            if self._part.start:
                self._hold.cancel()
                self._hold = None
        if self._part.start:
            self._follow_sequence(self._part, since=self._arrived)
        elif lost is not None:
            self.fail(lost)

    # -- the deadline -------------------------------------------------------------------------------------

    def _watch_deadline(self) -> None:
        if self._deadline is not None and self._deadline_timer is None:
            self._deadline_timer = self._loop.call_at(self._deadline, self._on_deadline)

    def _bound_wait(self) -> None:
        """A held request waits no longer than it wants to itself: this is its queue before that of Triton."""
        timeout = self._own_timeout()
        if timeout:
            if self._queue_timer is not None:
                self._queue_timer.cancel()
            self._queue_timer = self._loop.call_at(self._arrived + timeout / 1e6, self._on_own_timeout, timeout)

    def _on_own_timeout(self, timeout: int) -> None:
        if self._hold is not None and not self._hold.future.done():
            self._held_seconds = self._loop.time() - self._arrived
            message = f"the request's timeout of {timeout} us passed while it was held for pool '{self._pool.name}'"
            retry_after = self._pool.retry_after(batch=self._head.batch)
            self.fail(TidegateError(ErrorKind.QUEUE_TIMEOUT, message, retry_after_seconds=retry_after))

    def _expired(self) -> bool:
        """Whether the deadline has passed; then it has failed with that. Expired work reaches no replica."""
        if self._deadline is None or self._loop.time() < self._deadline:
            return False
        self.fail(TidegateError(ErrorKind.DEADLINE, "the deadline passed before the request was sent to a replica"))
        return True

    def _on_deadline(self) -> None:
        # One that is held is ended by the pool, at the same time and in words of its own.
        if self._hold is None or self._hold.future.done():
            if self._reservation is not None:
                self._reservation.release_overdue()
            self.fail(TidegateError(ErrorKind.DEADLINE, "the deadline passed before the replica had answered"))
