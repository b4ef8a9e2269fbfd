"""Which replicas go when a pool shrinks."""

from collections.abc import Sequence

from autoscaler.decision.observation import SeenReplica
from wire.membership import ReplicaState


def victims(capacity: Sequence[SeenReplica], count: int) -> tuple[str, ...]:
    """The ``count`` replicas whose going costs least: not ready yet, then least in flight, then youngest.

    All drain before they stop, so the choice is about time lost, not about safety.
    """
    ranked = sorted(
        capacity,
        key=lambda replica: (
            replica.state is ReplicaState.READY,
            # In flight is unknown: as busy as can be.
            float("inf") if replica.in_flight is None else replica.in_flight,
            float("inf") if replica.age_seconds is None else replica.age_seconds,
            replica.id,
        ),
    )
    return tuple(replica.id for replica in ranked[: max(0, count)])
