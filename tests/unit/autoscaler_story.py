"""Telling an autoscaler's story in virtual time: no clock, no store, no processes."""

from collections.abc import Sequence

from autoscaler.decision.decide import Decision, decide
from autoscaler.decision.memory import Memory
from autoscaler.decision.observation import Observation, SeenGateway, SeenQueue, SeenReplica
from wire.membership import PoolLoad, ReplicaState
from wire.pools import ScalingSettings

BEGIN = 1_000_000.0
READY, STARTING, DRAINING, FAILED = (
    ReplicaState.READY,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
    ReplicaState.FAILED,
)


def load(
    held: int = 0,
    in_flight: int = 0,
    held_job: int = 0,
    in_flight_job: int = 0,
    total: int = 0,
    idle: float | None = None,
) -> PoolLoad:
    return PoolLoad(
        held_interactive=held,
        in_flight_interactive=in_flight,
        held_job=held_job,
        in_flight_job=in_flight_job,
        requests_total=total,
        idle_seconds=idle,
    )


def gateway(name: str = "g1", *, draining: bool = False, **kinds: float | None) -> SeenGateway:
    return SeenGateway(name, draining, load(**kinds))  # type: ignore[arg-type]


def replica(name: str = "r1", state: ReplicaState | None = READY, ready_at: float | None = None) -> SeenReplica:
    return SeenReplica(name, state, age_seconds=1.0, ready_at=ready_at, in_flight=0)


def seen(
    *,
    lag: int | None = 0,
    pending: int | None = 0,
    gateways: Sequence[SeenGateway] | None = (SeenGateway("g1", False, PoolLoad()),),
    activation: bool | None = False,
    replicas: Sequence[SeenReplica] | None = (),
    endings: Sequence[tuple[str, str]] = (),
) -> Observation:
    return Observation(
        queues=(SeenQueue("pages", lag, pending),),
        gateways=None if gateways is None else tuple(gateways),
        activation=activation,
        replicas=None if replicas is None else tuple(replicas),
        endings=tuple(endings),
    )


class Story:
    """A pool whose replicas obey at once, except that a start takes ``start_seconds``."""

    def __init__(self, *, start_seconds: float = 0.0, **policy: float) -> None:
        settings = {
            "max_replicas": 4,
            "target_demand_per_replica": 10,
            "scale_to_zero_delay_seconds": 30.0,
            "scale_down_delay_seconds": 15.0,
        }
        self.policy = ScalingSettings.model_validate({**settings, **policy})
        self.start_seconds = start_seconds
        self.now = BEGIN
        self.memory = Memory.fresh(BEGIN)
        self.started_at: dict[str, float] = {}
        self.starts = 0

    def replicas(self) -> list[SeenReplica]:
        return [
            replica(name, READY, at + self.start_seconds)
            if self.now >= at + self.start_seconds
            else replica(name, STARTING)
            for name, at in self.started_at.items()
        ]

    def tick(self, after: float = 1.0, **signals: object) -> Decision:
        """One tick ``after`` seconds later, with these signals; the pool is then what was decided."""
        self.now += after
        signals.setdefault("replicas", self.replicas())
        decision, self.memory = decide(self.policy, seen(**signals), self.memory, self.now)  # type: ignore[arg-type]
        # A restart would forget nothing: what is remembered fits into the store.
        self.memory = Memory.model_validate_json(self.memory.model_dump_json())
        while decision.may_start and len(self.started_at) < decision.target:
            self.starts += 1
            self.started_at[f"r{self.starts}"] = self.now
            self.memory = self.memory.with_scaled((f"r{self.starts}",), ())
        while len(self.started_at) > decision.target:
            gone, _ = self.started_at.popitem()
            self.memory = self.memory.with_scaled((), (gone,))
        return decision

    def ticks(self, seconds: float, **signals: object) -> list[Decision]:
        """A tick each second."""
        return [self.tick(**signals) for _ in range(int(seconds))]

    def restart(self) -> None:
        """The autoscaler is killed and started again."""
        self.memory = self.memory.resumed()
