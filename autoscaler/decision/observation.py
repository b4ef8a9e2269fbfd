"""What the autoscaler saw of one pool in one tick. Pure data; None always means "could not be read", never zero."""

from dataclasses import dataclass

from wire.membership import PoolLoad, ReplicaState

#: States of a replica that serves or will serve: what counts as capacity (replicas still starting included).
_CAPACITY = (ReplicaState.STARTING, ReplicaState.WARMING, ReplicaState.READY, None)


@dataclass(frozen=True, slots=True)
class SeenReplica:
    """One replica: a process (or pod) that the backend runs, joined with its lease."""

    id: str
    state: ReplicaState | None
    """STARTING while it has no lease yet; None while leases cannot be read."""
    age_seconds: float | None = None
    """Seconds since its process started; None where the backend cannot tell."""
    ready_at: float | None = None
    """Unix seconds by the store's clock when it became ready."""
    in_flight: int | None = None
    """Requests on it now, over all gateways; None while gateways cannot be read."""
    reason: str | None = None
    """Its own words why it failed or drains."""

    @property
    def is_capacity(self) -> bool:
        return self.state in _CAPACITY

    @property
    def is_starting(self) -> bool:
        return self.state in (ReplicaState.STARTING, ReplicaState.WARMING)


@dataclass(frozen=True, slots=True)
class SeenQueue:
    """One queue whose jobs need this pool."""

    name: str
    lag: int | None
    """Jobs that no worker has claimed yet."""
    pending: int | None
    """Jobs that a worker has claimed and not finished."""
    oldest_seconds: float | None = None
    """Age of the oldest unfinished job."""


@dataclass(frozen=True, slots=True)
class SeenGateway:
    """One gateway instance that reported lately, with its load on this pool."""

    instance: str
    draining: bool
    load: PoolLoad


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything ``decide`` may know of one pool, besides its memory and the time."""

    queues: tuple[SeenQueue, ...]
    gateways: tuple[SeenGateway, ...] | None
    activation: bool | None
    replicas: tuple[SeenReplica, ...] | None
    """None while the backend cannot say what runs."""
    endings: tuple[tuple[str, str], ...] = ()
    """(replica id, how it ended) for replicas that were starting at the last tick and no longer run."""

    @property
    def backlog(self) -> int | None:
        """Lag + pending over all queues; None when one of them is unknown."""
        parts = [part for queue in self.queues for part in (queue.lag, queue.pending)]
        return None if None in parts else self.known_backlog

    @property
    def known_backlog(self) -> int:
        """The part of the backlog that could be read: a lower bound."""
        return sum((queue.lag or 0) + (queue.pending or 0) for queue in self.queues)

    @property
    def known_interactive(self) -> int:
        """Interactive requests, held and in flight, of the gateways that reported: a lower bound."""
        return sum(
            gateway.load.held_interactive + gateway.load.in_flight_interactive for gateway in self.gateways or ()
        )

    @property
    def job_requests(self) -> int:
        """Requests of jobs, held and in flight, of the gateways that reported: a lower bound."""
        return sum(gateway.load.held_job + gateway.load.in_flight_job for gateway in self.gateways or ())

    @property
    def idle_seconds(self) -> float | None:
        """Seconds since any reporting gateway last had a request for this pool; None if none ever had."""
        times = [gateway.load.idle_seconds for gateway in self.gateways or () if gateway.load.idle_seconds is not None]
        return min(times, default=None)

    @property
    def capacity(self) -> tuple[SeenReplica, ...]:
        """Replicas that serve or will serve: starting and warming ones count, draining and failed ones do not."""
        return tuple(replica for replica in self.replicas or () if replica.is_capacity)

    @property
    def is_serving(self) -> bool:
        """Some replica is ready."""
        return any(replica.state is ReplicaState.READY for replica in self.replicas or ())

    def states(self) -> dict[str, int]:
        """Replicas by state."""
        counts: dict[str, int] = {}
        for replica in self.replicas or ():
            name = "unknown" if replica.state is None else replica.state.value
            counts[name] = counts.get(name, 0) + 1
        return counts
