"""One pool's tick: observe -> decide -> scale -> record."""

import asyncio
import logging
from collections.abc import Callable

from pydantic import ValidationError

from autoscaler.backends.base import ScalerBackend
from autoscaler.decision.decide import Decision, decide
from autoscaler.decision.memory import Memory
from autoscaler.decision.observation import Observation
from autoscaler.observe import Observer
from autoscaler.scale import Scaled, scale_to
from stores.scaling import Activations, DecisionLog
from stores.store import Store
from wire.decisions import DecisionRecord
from wire.pools import ScalingSettings

_logger = logging.getLogger(__name__)


class PoolScaler:
    """Keeps one pool at the size that its demand asks for."""

    def __init__(
        self,
        pool: str,
        policy: ScalingSettings,
        store: Store,
        observer: Observer,
        backend: ScalerBackend,
        log: DecisionLog,
        activations: Activations,
        keep_seconds: float,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._store = store
        self._observer = observer
        self._backend = backend
        self._log = log
        self._activations = activations
        self._keep_seconds = keep_seconds
        self._memory: Memory | None = None
        self.ticked_at = float("-inf")
        """When the last tick began, by the loop's clock."""

    async def resume(self) -> None:
        """Take up what the last leader remembered.

        Raises:
            TidegateError: STORE_UNAVAILABLE.
        """
        raw = await self._log.load_memory(self._pool)
        try:
            self._memory = None if raw is None else Memory.model_validate_json(raw).resumed()
        except ValidationError:
            _logger.warning("the memory of pool %s cannot be read and starts anew", self._pool)
            self._memory = None

    async def tick(self, *, is_leader: Callable[[], bool]) -> float:
        """One tick; seconds until the decision would change by itself (infinite when only events can change it).

        ``is_leader`` is asked again right before scaling: reading may have taken longer than the lease.

        Raises:
            TidegateError: STORE_UNAVAILABLE; nothing was scaled, or it was and could not be recorded.
        """
        self.ticked_at = asyncio.get_running_loop().time()
        now = await self._store.now()
        memory = self._memory or Memory.fresh(now)
        seen = await self._observer.observe(self._pool, starting=memory.starting, stopping=memory.stopping)
        decision, after = decide(self._policy, seen, memory, now)
        if not is_leader():
            return 0.0
        scaled = await self._scale(decision, seen)
        after = after.with_scaled(scaled.started, scaled.stopped)
        if scaled.failure is not None and len(seen.capacity) + len(scaled.started) < decision.target:
            after = after.with_failed_start(scaled.failure, now)
        # Kept before it is stored: with the store gone in between, this process still knows what it has done.
        self._memory = after
        await self._record(decision, seen, memory, now)
        await self._log.save_memory(self._pool, after.model_dump_json())
        if seen.activation and seen.is_serving:
            await self._activations.clear(self._pool)
        return float("inf") if decision.look_again_at is None else max(0.0, decision.look_again_at - now)

    async def _scale(self, decision: Decision, seen: Observation) -> Scaled:
        if seen.replicas is None:
            return Scaled()
        scaled = await scale_to(self._backend, self._pool, decision.target, seen.replicas, may_start=decision.may_start)
        for replica_id in scaled.started:
            _logger.info("pool %s: started %s: %s", self._pool, replica_id, decision.explanation)
        for replica_id in scaled.stopped:
            _logger.info("pool %s: draining %s: %s", self._pool, replica_id, decision.explanation)
        if scaled.failure is not None:
            _logger.warning("pool %s: %s", self._pool, scaled.failure)
        return scaled

    async def _record(self, decision: Decision, seen: Observation, before: Memory, now: float) -> None:
        changed = (decision.target, decision.reason) != (before.last_target, before.last_reason)
        load = decision.load
        record = DecisionRecord(
            pool=self._pool,
            at=now,
            target=decision.target,
            previous_target=before.last_target or 0,
            reason=decision.reason,
            explanation=decision.explanation,
            demand=None if load.unknown else load.demand,
            backlog=load.backlog,
            interactive=load.interactive,
            replicas=seen.states(),
        )
        await self._log.record(record, changed=changed, keep_seconds=self._keep_seconds)
