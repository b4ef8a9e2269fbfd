"""A request's way to a replica, whatever its protocol: a slot, at once or after a wait; a connection; the hand-over;
and another replica when this one provably did not get the request. ``Exchange`` and ``RpcStream`` are placements.

They are one object with it, by inheritance: an object more per request would cost what some requests cost in all.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from gateway.routing.pool import Hold, Pool, RequestHead, Reservation
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
        "_began",
        "_deadline",
        "_deadline_timer",
        "_ended",
        "_head",
        "_held_seconds",
        "_hold",
        "_loop",
        "_pool",
        "_resent",
        "_reservation",
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
        self._hold: Hold | None = None
        self._reservation: Reservation | None = None
        self._held_seconds = 0.0
        self._resent = 0
        self._ended = False

    # -- what a protocol adds -----------------------------------------------------------------------------

    def _send_on(self, connection: C) -> None:
        """There is a slot and a connection: send the request."""
        raise NotImplementedError

    def fail(self, error: TidegateError) -> None:
        """Give up with ``error``. Harmless when it is over already."""
        raise NotImplementedError

    def _end(self, status: int, own_error: ErrorKind | None) -> None:
        """It is over: give everything back and count it."""
        raise NotImplementedError

    # -- the way ------------------------------------------------------------------------------------------

    def _find_slot(self, *, since: float | None = None) -> None:
        """``since``: when it arrived, for one that had a slot before."""
        if self._deadline is not None and self._expired():
            return
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
        self._find_slot(since=self._arrived)

    def cancel(self) -> None:
        """The caller is gone: nothing is to be answered, and the replica need not go on."""
        if not self._ended:
            reservation, self._reservation = self._reservation, None
            self._end(self.CALLER_LEFT, None)
            if reservation is not None:
                reservation.release_abandoned()

    def _give_back(self) -> None:
        """Whatever it has or waits for."""
        self._ended = True
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        if self._hold is not None:
            self._hold.cancel()
        if self._reservation is not None:
            self._reservation.release()

    # -- the deadline -------------------------------------------------------------------------------------

    def _watch_deadline(self) -> None:
        if self._deadline is not None and self._deadline_timer is None:
            self._deadline_timer = self._loop.call_at(self._deadline, self._on_deadline)

    def _expired(self) -> bool:
        """Whether the deadline has passed; then it has failed with that. Expired work reaches no replica."""
        if self._deadline is None or self._loop.time() < self._deadline:
            return False
        self.fail(TidegateError(ErrorKind.DEADLINE, "the deadline passed before the request was sent to a replica"))
        return True

    def _on_deadline(self) -> None:
        # One that is held is ended by the pool, at the same time and in words of its own.
        if self._hold is None or self._hold.future.done():
            self.fail(TidegateError(ErrorKind.DEADLINE, "the deadline passed before the replica had answered"))
