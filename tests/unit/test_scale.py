"""Which replicas go, and the one step from what runs to what shall run."""

from dataclasses import replace

from autoscaler.backends.base import BackendError, RunningReplica
from autoscaler.decision.observation import SeenReplica
from autoscaler.decision.victims import victims
from autoscaler.scale import Scaled, scale_to
from tests.unit.autoscaler_story import DRAINING, FAILED, READY, STARTING


class Backend:
    """Notes what it is asked for; starts fail from the ``fails_at``-th on."""

    def __init__(self, fails_at: int = 99) -> None:
        self.asked: list[str] = []
        self._fails_at = fails_at

    async def running(self, pool: str) -> list[RunningReplica]:
        raise AssertionError("scaling works on what was observed")

    async def start(self, pool: str) -> str:
        if len(self.asked) + 1 >= self._fails_at:
            raise BackendError("no more processes")
        self.asked.append(f"start {pool}")
        return f"new{len(self.asked)}"

    async def stop(self, replica_id: str) -> None:
        self.asked.append(f"stop {replica_id}")

    async def ending(self, replica_id: str) -> str | None:
        return None


OLD = SeenReplica("old", READY, age_seconds=100.0, in_flight=0)
BUSY = SeenReplica("busy", READY, age_seconds=5.0, in_flight=3)
YOUNG = SeenReplica("young", READY, age_seconds=10.0, in_flight=0)
STARTER = SeenReplica("starter", STARTING, age_seconds=1.0)
LEAVING = SeenReplica("leaving", DRAINING, age_seconds=1.0)


def test_not_ready_goes_first_then_least_busy_then_youngest() -> None:
    assert victims([BUSY, OLD, YOUNG, STARTER], 4) == ("starter", "young", "old", "busy")
    assert victims([replace(BUSY, in_flight=None), BUSY], 1) == ("busy",)
    assert victims([OLD], 0) == victims([OLD], -1) == ()


async def test_right_count_does_nothing() -> None:
    backend = Backend()
    assert await scale_to(backend, "p", 2, [OLD, STARTER, LEAVING], may_start=True) == Scaled()
    assert backend.asked == []


async def test_missing_are_started_beside_those_that_leave() -> None:
    backend = Backend()
    failed = SeenReplica("failed", FAILED)
    scaled = await scale_to(backend, "p", 2, [OLD, LEAVING, failed], may_start=True)
    assert scaled == Scaled(started=("new1",))


async def test_surplus_drains() -> None:
    backend = Backend()
    scaled = await scale_to(backend, "p", 1, [OLD, YOUNG, BUSY], may_start=True)
    assert scaled.stopped == ("young", "old")


async def test_a_failing_start_waits_but_stopping_does_not() -> None:
    backend = Backend()
    assert await scale_to(backend, "p", 3, [OLD], may_start=False) == Scaled()
    assert (await scale_to(backend, "p", 0, [OLD], may_start=False)).stopped == ("old",)


async def test_what_was_done_before_a_failure_is_told() -> None:
    scaled = await scale_to(Backend(fails_at=2), "p", 3, [], may_start=True)
    assert scaled == Scaled(started=("new1",), failure="no more processes")
