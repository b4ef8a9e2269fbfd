"""What the autoscaler records of each decision, for ``tidegate why``, the control API and the dashboard."""

from enum import StrEnum

from wire.membership import Record


class Reason(StrEnum):
    """Why a pool's target is what it is. The one-line story of each is in docs/life-of-a-decision.md."""

    DEMAND = "demand"
    """Demand asks for this many."""
    ACTIVATION = "activation"
    """At zero, and someone asked for the pool."""
    MIN_REPLICAS = "min_replicas"
    """The setting min_replicas keeps them."""
    MAX_REPLICAS = "max_replicas"
    """Demand asks for more than max_replicas."""
    SCALE_DOWN_DELAY = "scale_down_delay"
    """Fewer would do, but scale_down_delay_seconds has not passed."""
    RETAIN = "retain"
    """Idle, but scale_to_zero_delay_seconds has not passed."""
    STARTING = "starting"
    """A replica that is still starting is not given up on."""
    IDLE = "idle"
    """Idle for long enough: to zero, or staying there."""
    UNKNOWN_SIGNAL = "unknown_signal"
    """A signal cannot be read: the pool does not shrink."""


class DecisionRecord(Record):
    """One decision of the autoscaler."""

    pool: str
    at: float
    """Unix seconds by the store's clock."""
    target: int
    previous_target: int
    reason: Reason
    explanation: str
    """The reason as a sentence with its figures, and what would change it."""
    demand: int | None
    """Backlog plus interactive requests; None when a signal is unknown."""
    backlog: int | None
    interactive: int | None
    replicas: dict[str, int]
    """Replicas by state at that moment."""


def decisions_key(prefix: str, pool: str) -> str:
    """Stream of a pool's changes of decision, newest last, bounded; field ``record`` = JSON."""
    return f"{prefix}:pool:{pool}:decisions"


def latest_decision_key(prefix: str, pool: str) -> str:
    """The newest decision, rewritten every tick, with a time to live: its absence says that nobody decides."""
    return f"{prefix}:pool:{pool}:decision"
