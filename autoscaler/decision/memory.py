"""What ``decide`` remembers of a pool from tick to tick. Kept in the store, so that a restart forgets nothing.

All times are Unix seconds by the store's clock, the only clock that outlives a process.
"""

from typing import Self

from pydantic import Field

from autoscaler.decision.observation import Observation
from wire.decisions import Reason
from wire.membership import Record, ReplicaState

#: A gateway that stopped reporting without having drained may be stalled rather than gone: its load is unknown for
#: this long after its last report was seen, then it is taken for gone and its load for zero. The same time is granted
#: to the first gateway after the first tick ever. Unit: seconds.
GATEWAY_GONE_SECONDS = 30.0
#: Longest pause between two tries of a start that keeps failing. Unit: seconds.
LONGEST_BACK_OFF_SECONDS = 60.0


class RememberedGateway(Record):
    """The last report of one gateway instance."""

    seen_at: float
    draining: bool
    requests_total: int


class Memory(Record):
    """Everything that outlives a tick."""

    since: float
    """The first tick ever."""
    held: int | None = None
    """Target of the last tick of this process; None right after a (re)start: then what runs is what is held."""
    last_target: int | None = None
    last_reason: Reason | None = None
    """The last recorded decision, of whatever process."""
    active_at: float
    """When work was last seen (or could not be ruled out)."""
    was_active: bool = False
    """There was work, or something was unknown, at the last tick: it ended some time after it."""
    wanted: tuple[tuple[float, int], ...] = ()
    """The window of the scale-down delay: (time, replicas wanted), values strictly falling, so that it stays short."""
    gateways: dict[str, RememberedGateway] = Field(default_factory=dict)
    ready_since: dict[str, float] = Field(default_factory=dict)
    """Living replicas that were ready, and since when."""
    starting: tuple[str, ...] = ()
    """Replicas that were started and have not been ready."""
    stopping: tuple[str, ...] = ()
    """Replicas told to drain that still run; telling them again would force them."""
    failed_starts: int = 0
    """Starts that failed since one last succeeded."""
    retry_at: float | None = None
    """No start before this time."""
    last_failure: str | None = None
    unknown_since: float | None = None
    """Since when some signal cannot be read; None while all can."""

    @classmethod
    def fresh(cls, now: float) -> Self:
        """The memory of the first tick ever. The idle clock starts here: what was before is not known."""
        return cls(since=now, active_at=now)

    def resumed(self) -> Self:
        """This memory in a new process: it holds what it finds running, not what the last process aimed at."""
        return self.model_copy(update={"held": None})

    def not_after(self, now: float) -> Self:
        """This memory with no time later than it can be, should the store's clock have gone back."""
        latest_retry = now + LONGEST_BACK_OFF_SECONDS
        return self.model_copy(
            update={
                "since": min(self.since, now),
                "active_at": min(self.active_at, now),
                "retry_at": None if self.retry_at is None else min(self.retry_at, latest_retry),
                "wanted": tuple((min(at, now), value) for at, value in self.wanted),
                "ready_since": {name: min(at, now) for name, at in self.ready_since.items()},
                "gateways": {
                    name: last if last.seen_at <= now else last.model_copy(update={"seen_at": now})
                    for name, last in self.gateways.items()
                },
            }
        )

    def with_scaled(self, started: tuple[str, ...], stopped: tuple[str, ...]) -> Self:
        """After scaling: a start counts as failed unless it is ready one day, a stop is told once."""
        starting = tuple(dict.fromkeys((*(name for name in self.starting if name not in stopped), *started)))
        return self.model_copy(
            update={"starting": starting, "stopping": tuple(dict.fromkeys((*self.stopping, *stopped)))}
        )

    def with_failed_start(self, failure: str, now: float) -> Self:
        """A start failed: the next try waits 1, 2, 4... seconds."""
        failures = self.failed_starts + 1
        pause = min(2.0 ** min(failures - 1, 10), LONGEST_BACK_OFF_SECONDS)
        return self.model_copy(update={"failed_starts": failures, "retry_at": now + pause, "last_failure": failure})

    def may_start(self, now: float) -> bool:
        return self.retry_at is None or now >= self.retry_at


def notice(seen: Observation, memory: Memory, now: float) -> Memory:
    """``memory`` with what this tick shows of gateways and replicas folded in; unreadable parts stay as they were."""
    if seen.gateways is not None:
        memory = _notice_gateways(seen, memory, now)
    if seen.replicas is not None:
        memory = _notice_replicas(seen, memory, now)
    return memory


def silent_gateways(seen: Observation, memory: Memory, now: float) -> tuple[str, ...]:
    """Gateways whose load is unknown: they reported before, have not drained, and do not report now.

    A gateway that announced its drain is gone as soon as its report is; any other is gone GATEWAY_GONE_SECONDS after
    its last report, for by then its held requests have either timed out or died with it. ``(none yet)`` stands for the
    first gateway of a system that has just come up.
    """
    reporting = {gateway.instance for gateway in seen.gateways or ()}
    silent = tuple(
        name
        for name, last in sorted(memory.gateways.items())
        if name not in reporting and not last.draining and now - last.seen_at < GATEWAY_GONE_SECONDS
    )
    if not reporting and not memory.gateways and now - memory.since < GATEWAY_GONE_SECONDS:
        return ("(none yet)",)
    return silent


def _notice_gateways(seen: Observation, memory: Memory, now: float) -> Memory:
    active_at = memory.active_at
    gateways = {name: last for name, last in memory.gateways.items() if now - last.seen_at < GATEWAY_GONE_SECONDS}
    for gateway in seen.gateways or ():
        last = memory.gateways.get(gateway.instance)
        load = gateway.load
        if load.idle_seconds is not None:
            active_at = max(active_at, now - load.idle_seconds)
        elif load.requests_total != (0 if last is None else last.requests_total):
            # Requests came and went since the last tick, and their gateway cannot say when.
            active_at = now
        gateways[gateway.instance] = RememberedGateway(
            seen_at=now, draining=gateway.draining, requests_total=load.requests_total
        )
    return memory.model_copy(update={"gateways": gateways, "active_at": active_at})


def _notice_replicas(seen: Observation, memory: Memory, now: float) -> Memory:
    replicas = {replica.id: replica for replica in seen.replicas or ()}
    ready_since = {name: at for name, at in memory.ready_since.items() if name in replicas}
    for replica in replicas.values():
        if replica.state is ReplicaState.READY:
            ready_since.setdefault(replica.id, now if replica.ready_at is None else min(replica.ready_at, now))
    stopping = tuple(name for name in memory.stopping if name in replicas)
    endings = dict(seen.endings)
    succeeded = False
    failures: list[str] = []
    starting: list[str] = []
    adopted = (name for name, replica in replicas.items() if replica.is_starting and name not in ready_since)
    for name in dict.fromkeys((*memory.starting, *adopted)):
        seen_now = replicas.get(name)
        if name in memory.stopping:
            continue
        if name in ready_since:
            succeeded = True
        elif seen_now is None:
            failures.append(endings.get(name, "it ended"))
        elif seen_now.state is ReplicaState.FAILED:
            failures.append(seen_now.reason or "it says that it failed")
        else:
            starting.append(name)
    memory = memory.model_copy(update={"ready_since": ready_since, "starting": tuple(starting), "stopping": stopping})
    if succeeded:
        memory = memory.model_copy(update={"failed_starts": 0, "retry_at": None, "last_failure": None})
    elif failures:
        # Several that fail in one tick fail for one reason: one step of the back-off.
        memory = memory.with_failed_start(failures[-1], now)
    return memory
