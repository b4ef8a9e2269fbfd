"""One idempotent step from what runs to what shall run."""

from collections.abc import Sequence
from dataclasses import dataclass

from autoscaler.backends.base import BackendError, ScalerBackend
from autoscaler.decision.observation import SeenReplica
from autoscaler.decision.victims import victims


@dataclass(frozen=True, slots=True)
class Scaled:
    """What one step did."""

    started: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    failure: str | None = None
    """Why the step stopped short; the next tick tries again."""


async def scale_to(
    backend: ScalerBackend, pool: str, target: int, replicas: Sequence[SeenReplica], *, may_start: bool
) -> Scaled:
    """Bring ``pool`` to ``target`` replicas, given those just seen; nothing is done when they are that many.

    Replicas that start count, replicas that drain do not: a new one is started beside them, and none of them is
    called back. ``may_start`` is False while a failing start waits for its next try; stopping is always allowed.
    """
    capacity = [replica for replica in replicas if replica.is_capacity]
    started: list[str] = []
    stopped: list[str] = []
    try:
        while may_start and len(capacity) + len(started) < target:
            started.append(await backend.start(pool))
        for replica_id in victims(capacity, len(capacity) - target):
            await backend.stop(replica_id)
            stopped.append(replica_id)
    except BackendError as error:
        return Scaled(tuple(started), tuple(stopped), str(error))
    return Scaled(tuple(started), tuple(stopped))
