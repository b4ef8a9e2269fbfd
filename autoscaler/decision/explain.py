"""The reason of a decision as a sentence with its figures, and what would change it."""

from autoscaler.decision.load import Load
from autoscaler.decision.memory import Memory
from autoscaler.decision.observation import Observation
from wire.decisions import Reason
from wire.pools import ScalingSettings


def sentence(
    policy: ScalingSettings,
    seen: Observation,
    load: Load,
    memory: Memory,
    now: float,
    target: int,
    reason: Reason,
    until: float | None,
) -> str:
    """One sentence, e.g. ``kept at 1: no demand for 18 s; down to 0 in 12 s unless work arrives``.

    ``memory`` is what was remembered before this decision: its ``last_target`` says what the target changes from.
    """
    told = _because(policy, seen, load, memory, now, target, reason, until)
    if memory.failed_starts and target > 0:
        count = "the last start" if memory.failed_starts == 1 else f"the last {memory.failed_starts} starts"
        told += f"; {count} failed ({memory.last_failure})"
        if memory.retry_at is not None and now < memory.retry_at:
            told += f", next try in {_seconds(memory.retry_at - now)}"
    return told


def _because(  # noqa: C901 - one branch per reason, each a sentence
    policy: ScalingSettings,
    seen: Observation,
    load: Load,
    memory: Memory,
    now: float,
    target: int,
    reason: Reason,
    until: float | None,
) -> str:
    left = _seconds(0.0 if until is None else until - now)
    per_replica = policy.target_demand_per_replica
    needed = load.replicas_needed(policy)
    demand = _demand(seen, load)
    held = _held(memory.last_target, target)
    match reason:
        case Reason.DEMAND:
            told = f"{target} for {demand} at {per_replica} per replica; more above {target * per_replica}"
            return told + _missing(load)
        case Reason.ACTIVATION:
            return f"{target}: a caller waits for the pool, which has no ready replica" + _missing(load)
        case Reason.MIN_REPLICAS:
            return f"{target} by min_replicas: {demand} needs {needed}; more above {target * per_replica}"
        case Reason.MAX_REPLICAS:
            return f"{target} by max_replicas: {demand} needs {needed}; a greater max_replicas would start more"
        case Reason.SCALE_DOWN_DELAY:
            within = _seconds(policy.scale_down_delay_seconds)
            return (
                f"{held}: {demand} needs {needed}, but {target} were wanted within the last {within}; "
                f"fewer in {left} unless demand rises"
            )
        case Reason.RETAIN:
            idle = _seconds(now - memory.active_at)
            return f"{held}: no demand for {idle}; down to 0 in {left} unless work arrives"
        case Reason.STARTING:
            names = ", ".join(replica.id for replica in seen.capacity if replica.is_starting)
            delay = _seconds(policy.scale_to_zero_delay_seconds)
            return f"{held}: no demand, but {names} is still starting; down to 0 {delay} after it is ready"
        case Reason.IDLE:
            if seen.capacity:
                idle = _seconds(now - memory.active_at)
                return f"down to 0: no demand for {idle}; one request or job starts a replica"
            return "0: no demand; one request or job starts a replica"
        case Reason.UNKNOWN_SIGNAL:
            since = now if memory.unknown_since is None else memory.unknown_since
            what = ", ".join(load.unknown)
            change = "never shrinks on an unknown signal" if target else "a request or a job that can be seen starts it"
            return f"{held}: unknown for {_seconds(now - since)}: {what} (known: {demand}); {change}"


def _held(before: int | None, target: int) -> str:
    """What becomes of the number, for reasons that hold a pool where it is, or let it go no further than there."""
    if before is not None and target != before:
        return f"{'down' if target < before else 'up'} to {target}"
    return f"kept at {target}" if target else "stays at 0"


def _demand(seen: Observation, load: Load) -> str:
    """``demand 41 (backlog 40 = 38 waiting + 2 claimed, interactive 1)``."""
    lag = sum(queue.lag or 0 for queue in seen.queues)
    pending = sum(queue.pending or 0 for queue in seen.queues)
    backlog = "?" if load.backlog is None else load.backlog
    interactive = "?" if load.interactive is None else load.interactive
    parts = f" = {lag} waiting + {pending} claimed" if lag or pending else ""
    return f"demand {load.demand} (backlog {backlog}{parts}, interactive {interactive})"


def _missing(load: Load) -> str:
    return f"; unknown: {', '.join(load.unknown)}" if load.unknown else ""


def _seconds(value: float) -> str:
    return f"{max(0.0, value):.0f} s"
