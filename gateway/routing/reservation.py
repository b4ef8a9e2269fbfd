"""What a request has of a pool: a slot on a replica, or a place in the queue for one."""

import asyncio
from typing import Protocol

from gateway.routing.health import Health
from gateway.routing.queue import RequestHead
from gateway.routing.slots import ModelSlots
from wire.errors import ErrorKind, TidegateError
from wire.membership import ReplicaLease


class Owner(Protocol):
    """The pool, as its reservations and holds see it."""

    def on_release(self, place: ModelSlots, head: RequestHead) -> None:
        """A request is done with its slot."""

    def on_abandon(self, place: ModelSlots, head: RequestHead) -> None:
        """A request gave its slot back because its caller left."""

    def on_answered(self, place: ModelSlots, head: RequestHead) -> None:
        """A request is done with its slot, for it was answered."""

    @property
    def health(self) -> Health:
        """Who is told what became of requests."""

    def on_hold_end(self, hold: "Hold") -> None:
        """A held request leaves the queue without a slot."""

    def late_error(self, head: RequestHead, kind: ErrorKind) -> TidegateError:
        """The error of a request that was held in vain."""


class Reservation:
    """A request's hold on a slot of a replica. Must be released, exactly once or more often."""

    __slots__ = ("_place", "_pool", "_released", "head", "held_seconds")

    def __init__(self, pool: Owner, place: ModelSlots, head: RequestHead, held_seconds: float) -> None:
        self._pool = pool
        self._place = place
        self._released = False
        self.head = head
        self.held_seconds = held_seconds

    @property
    def replica(self) -> ReplicaLease:
        return self._place.replica.lease

    def release(self) -> None:
        """Give the slot back; says nothing of the replica. Harmless when called again, as all of these."""
        if not self._released:
            self._released = True
            self._pool.on_release(self._place, self.head)

    def release_answered(self) -> None:
        """Give the slot back: the replica has answered, whatever it said."""
        if not self._released:
            self._released = True
            self._pool.on_answered(self._place, self.head)

    def release_unreached(self) -> None:
        """Give the slot back because the replica could not be reached; counts also when it was given back before."""
        self._pool.health.on_unreached(self._place.replica)
        self.release()

    def release_lost(self) -> None:
        """Give the slot back because the replica broke the request off."""
        if not self._released:
            self._pool.health.on_lost(self._place.replica)
            self.release()

    def release_overdue(self) -> None:
        """Give the slot back because the deadline passed without an answer."""
        if not self._released:
            self._pool.health.on_overdue(self._place.replica)
            self.release()

    def release_abandoned(self) -> None:
        """Give the slot back because the caller left in the middle: free at once, for held requests a moment later."""
        if not self._released:
            self._released = True
            self._pool.on_abandon(self._place, self.head)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Hold:
    """A held request. ``future`` ends with a Reservation or a TidegateError; ``cancel`` gives up its place."""

    __slots__ = ("_pool", "_timer", "future", "head", "since", "until")

    def __init__(self, pool: Owner, head: RequestHead, since: float, until: float, late: ErrorKind) -> None:
        loop = asyncio.get_running_loop()
        self._pool = pool
        self.head = head
        self.since = since
        self.until = until
        self.future: asyncio.Future[Reservation] = loop.create_future()
        self._timer = loop.call_at(until, self._expire, late)

    def grant(self, reservation: Reservation) -> None:
        self._timer.cancel()
        if self.future.done():
            # Somebody cancelled the future itself. Not at once: the pool is handing out slots just now.
            asyncio.get_running_loop().call_soon(reservation.release)
        else:
            self.future.set_result(reservation)

    def refuse(self, error: TidegateError) -> None:
        """There will be no slot; it has left the queue already."""
        self._timer.cancel()
        if not self.future.done():
            self.future.set_exception(error)

    def cancel(self) -> None:
        """The caller is gone: leave the queue, and give back a slot that was granted in the same instant."""
        self._timer.cancel()
        if self.future.done():
            if not self.future.cancelled() and self.future.exception() is None:
                self.future.result().release()
            return
        self._pool.on_hold_end(self)
        self.future.cancel()

    def _expire(self, late: ErrorKind) -> None:
        if self.future.done():
            return
        self._pool.on_hold_end(self)
        self.future.set_exception(self._pool.late_error(self.head, late))
