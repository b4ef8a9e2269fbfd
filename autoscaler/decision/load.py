"""What is known of the work that waits for a pool, and what is not."""

from dataclasses import dataclass

from autoscaler.decision.memory import Memory, silent_gateways
from autoscaler.decision.observation import Observation
from wire.pools import ScalingSettings


@dataclass(frozen=True, slots=True)
class Load:
    """The work for a pool. ``demand`` is exact when ``unknown`` is empty, else a lower bound."""

    demand: int
    backlog: int | None
    """Jobs not claimed + claimed and unfinished."""
    interactive: int | None
    """Requests that no job accounts for."""
    activation: bool
    unknown: tuple[str, ...]
    """The signals that cannot be read, in words."""

    def replicas_needed(self, policy: ScalingSettings) -> int:
        """Replicas that carry this demand, bounds aside."""
        return -(-self.demand // policy.target_demand_per_replica)


def weigh(seen: Observation, memory: Memory, now: float) -> Load:
    """The load in ``seen``; every job counts once, whether it waits, is claimed, or is a request at a gateway."""
    unknown = _unknown(seen, memory, now)
    backlog = seen.backlog
    interactive = seen.known_interactive
    jobs = seen.known_backlog
    if not seen.queues:
        # No queue names this pool, so no backlog accounts for these requests.
        interactive += seen.job_requests
    elif backlog is None:
        jobs = max(jobs, seen.job_requests)
    elif seen.job_requests:
        # A job whose entry is gone (trimmed, deleted) may still have requests under way.
        jobs = max(jobs, 1)
    gateways_known = seen.gateways is not None and not silent_gateways(seen, memory, now)
    return Load(
        demand=jobs + interactive,
        backlog=None if backlog is None else jobs,
        interactive=interactive if gateways_known else None,
        activation=bool(seen.activation),
        unknown=unknown,
    )


def _unknown(seen: Observation, memory: Memory, now: float) -> tuple[str, ...]:
    words = [f"backlog of {queue.name}" for queue in seen.queues if queue.lag is None or queue.pending is None]
    if seen.gateways is None:
        words.append("load of the gateways")
    else:
        words.extend(f"load of gateway {name}" for name in silent_gateways(seen, memory, now))
    if seen.activation is None:
        words.append("activation")
    if seen.replicas is None:
        words.append("running replicas")
    elif any(replica.state is None for replica in seen.replicas):
        words.append("states of the replicas")
    return tuple(words)
