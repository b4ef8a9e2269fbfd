"""How many replicas a pool shall have now: one pure function.

The rules, in the order in which they bind:

1. Demand is the backlog of the pool's queues plus the interactive requests, held and in flight; requests of jobs are
   in the backlog already. One of anything is enough to leave zero.
2. ``ceil(demand / target_demand_per_replica)`` replicas, within ``min_replicas`` and ``max_replicas``. This is a
   number, not a step: replicas that are still starting count as capacity.
3. Unknown is not zero. With a signal missing the pool may grow on what is known; it never shrinks.
4. Down to one replica: the most that was wanted within ``scale_down_delay_seconds`` stays.
5. The last replica goes when it has been ready, and the pool without work, for ``scale_to_zero_delay_seconds``.
"""

from dataclasses import dataclass

from autoscaler.decision import explain
from autoscaler.decision.load import Load, weigh
from autoscaler.decision.memory import Memory, notice
from autoscaler.decision.observation import Observation
from wire.decisions import Reason
from wire.pools import ScalingSettings


@dataclass(frozen=True, slots=True)
class Decision:
    """What a pool shall be, and why."""

    target: int
    reason: Reason
    explanation: str
    load: Load
    may_start: bool
    """False while a failing start waits for its next try."""
    look_again_at: float | None
    """When this decision would change by itself, by the store's clock; None when only events can change it."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    target: int
    reason: Reason
    until: float | None = None


def decide(policy: ScalingSettings, seen: Observation, memory: Memory, now: float) -> tuple[Decision, Memory]:
    """The decision for one pool at ``now`` (Unix seconds, store clock), and the memory for the next tick."""
    memory = notice(seen, memory.not_after(now), now)
    load = weigh(seen, memory, now)
    memory = _remember_activity(load, memory, now)
    held = _held(seen, memory)
    wanted = _wanted(policy, load)
    # What a new process finds running counts as wanted until the delay has shown that it is not.
    window = _window(policy, memory, now, wanted if memory.held is not None else max(wanted, held))
    kept = min(window[0][1], held, policy.max_replicas)
    if load.unknown:
        verdict = _unknown(policy, load, wanted, max(held, len(seen.capacity)))
    elif kept > max(wanted, 1):
        last = max(at for at, value in window if value >= kept)
        verdict = _Verdict(kept, Reason.SCALE_DOWN_DELAY, last + policy.scale_down_delay_seconds)
    elif wanted == 0 and seen.capacity:
        verdict = _last_replica(policy, seen, memory, now)
    else:
        verdict = _Verdict(wanted, _reason(policy, load))
    decision = _told(policy, seen, load, memory, now, verdict)
    memory = memory.model_copy(
        update={
            "held": verdict.target,
            "last_target": verdict.target,
            "last_reason": verdict.reason,
            # An unknown signal may hide any demand: what was kept through it counts as wanted.
            "wanted": _window(policy, memory, now, verdict.target) if load.unknown else window,
        }
    )
    return decision, memory


def _wanted(policy: ScalingSettings, load: Load) -> int:
    """Replicas that the (known) demand asks for, within the bounds."""
    wanted = max(load.replicas_needed(policy), 1 if load.activation else 0)
    return max(policy.min_replicas, min(wanted, policy.max_replicas))


def _held(seen: Observation, memory: Memory) -> int:
    """What the pool has now and would keep: the last target, or what runs right after a restart."""
    running = len(seen.capacity)
    if seen.replicas is None:
        return memory.last_target or 0 if memory.held is None else memory.held
    if memory.held is None:
        return running
    # With nothing wanted, a replica that died is not replaced only because the window remembers it.
    return memory.held if memory.was_active else min(memory.held, running)


def _window(policy: ScalingSettings, memory: Memory, now: float, wanted: int) -> tuple[tuple[float, int], ...]:
    """The window with ``wanted`` added: only entries that can still be its maximum, greatest (and oldest) first."""
    begin = now - policy.scale_down_delay_seconds
    kept = [(at, value) for at, value in memory.wanted if at > begin and value > wanted]
    return (*kept, (now, wanted))


def _unknown(policy: ScalingSettings, load: Load, wanted: int, held: int) -> _Verdict:
    # The bounds are the operator's word, not a signal: they hold even now.
    target = max(wanted, min(held, policy.max_replicas))
    return _Verdict(target, _reason(policy, load) if target > held else Reason.UNKNOWN_SIGNAL)


def _last_replica(policy: ScalingSettings, seen: Observation, memory: Memory, now: float) -> _Verdict:
    """No demand, something runs: keep one, or let it go."""
    if any(replica.is_starting for replica in seen.capacity):
        return _Verdict(1, Reason.STARTING)
    newest = max(memory.ready_since.get(replica.id, now) for replica in seen.capacity)
    leaves_at = max(memory.active_at, newest) + policy.scale_to_zero_delay_seconds
    if now < leaves_at:
        return _Verdict(1, Reason.RETAIN, leaves_at)
    return _Verdict(0, Reason.IDLE)


def _reason(policy: ScalingSettings, load: Load) -> Reason:
    """Why demand's own answer is what it is."""
    needed = load.replicas_needed(policy)
    if needed > policy.max_replicas:
        return Reason.MAX_REPLICAS
    if load.activation and needed == 0:
        return Reason.ACTIVATION
    if policy.min_replicas > needed:
        return Reason.MIN_REPLICAS
    return Reason.DEMAND if needed else Reason.IDLE


def _remember_activity(load: Load, memory: Memory, now: float) -> Memory:
    """Work seen now, or seen at the last tick and over since: the idle clock starts now."""
    active = load.demand > 0 or load.activation
    update: dict[str, object] = {}
    if active or memory.was_active:
        update["active_at"] = now
    # While something is unknown, work that was there may still be.
    update["was_active"] = active or (memory.was_active and bool(load.unknown))
    if not load.unknown:
        update["unknown_since"] = None
    elif memory.unknown_since is None:
        update["unknown_since"] = now
    return memory.model_copy(update=update)


def _told(
    policy: ScalingSettings, seen: Observation, load: Load, memory: Memory, now: float, verdict: _Verdict
) -> Decision:
    may_start = memory.may_start(now)
    again = [verdict.until]
    if verdict.target > len(seen.capacity) and not may_start:
        again.append(memory.retry_at)
    return Decision(
        target=verdict.target,
        reason=verdict.reason,
        explanation=explain.sentence(policy, seen, load, memory, now, verdict.target, verdict.reason, verdict.until),
        load=load,
        may_start=may_start,
        look_again_at=min((at for at in again if at is not None), default=None),
    )
