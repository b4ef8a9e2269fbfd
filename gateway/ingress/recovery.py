"""What becomes of a request whose replica failed it: repeated, moved, or told; the same for HTTP and gRPC.

The rules are in docs/protocol.md; what may be repeated at all, and how often, says gateway/routing/faults.py.
"""

from dataclasses import replace

from gateway.ingress.placement import RESEND_LIMIT, C, Placement
from wire.errors import ErrorKind, TidegateError
from wire.membership import ReplicaState

#: A replica that dies takes so long, at most, to refuse connections after it has dropped those it had. Seconds.
_DYING_SECONDS = 0.05


class Recovery(Placement[C]):
    """A placement that survives faults of replicas. A subclass gives ``_take_back``, and calls ``_await_first_byte``
    and ``_on_first_byte``."""

    __slots__ = ()

    def _take_back(self) -> bool:
        """Let go of the replica and get ready to be sent again. False, and nothing is changed, where what was sent is
        no longer there, or the answer has begun."""
        return False

    def _may_repeat(self) -> bool:
        """Whether it may be run once more though it may have run; that is counted. A step of a sequence never is."""
        faults = self._pool.faults
        return (
            self._head.model in faults.repeatable
            and self._part is None
            and self._resent < RESEND_LIMIT
            and faults.budget.spend()
        )

    def _repeat_unless_died(self, error: TidegateError) -> None:
        """Its connection broke when it may have run: once more, or ``error``. Never after the death of a replica, which
        may have died of this very request; one that lives is heard from soon."""
        reservation = self._reservation
        if reservation is None or not self._may_repeat() or not self._take_back():
            self.fail(error)
            return
        self._resent += 1

        def on_probed(connection: C | None) -> None:
            if connection is not None:
                self._upstreams.put_back(connection)
            if self._ended:
                return
            if connection is None:
                reservation.release_unreached()
                self.fail(error)
            else:
                self._elsewhere(unreached=False)

        self._fault_timer = self._loop.call_later(
            _DYING_SECONDS, self._upstreams.connect, reservation.replica, on_probed
        )

    def _move(self) -> bool:
        """To another replica that has room now, because this one has sent it away; False where there is none."""
        here = self._reservation
        if here is None or self._part is not None or self._resent == RESEND_LIMIT:
            return False
        for lease in self._pool.replicas:
            if lease.id == here.replica.id or lease.state is not ReplicaState.READY:
                continue
            if self._head.model not in lease.models:
                continue
            there = self._pool.try_reserve(replace(self._head, replica=lease.id), since=self._arrived)
            if there is None:
                continue
            if not self._take_back():
                there.release()
                return False
            self._resent += 1
            here.release_answered()
            self._on_slot(there)
            return True
        return False

    def _await_first_byte(self) -> None:
        """The replica has the whole request. To be called where the pool's settings limit that time."""
        limit = self._pool.faults.first_byte_limit_seconds
        self._fault_timer = self._loop.call_later(limit, self._on_no_first_byte, limit)

    def _on_first_byte(self) -> None:
        if self._fault_timer is not None:
            self._fault_timer.cancel()
            self._fault_timer = None

    def _on_no_first_byte(self, limit: float) -> None:
        """It is frozen, or its machine is gone."""
        if self._may_repeat() and self._take_back():
            self._resent += 1
            self._elsewhere(unreached=True)
            return
        if self._reservation is not None:
            self._reservation.release_unreached()
        message = f"the replica did not begin to answer within first_byte_limit_seconds ({limit:g}); it may have run"
        self.fail(TidegateError(ErrorKind.REPLICA_LOST, message))
