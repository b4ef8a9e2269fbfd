"""What the demo sees of the replicas while they live: after they have gone nobody can be asked any more."""

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from stores.membership import ReplicaDirectory
from stores.store import Store
from wire.errors import TidegateError
from wire.membership import ReplicaLease, ReplicaState

_LOOK_SECONDS = 0.2
_STATISTICS_SECONDS = 1.0


@dataclass(slots=True)
class Observed:
    """Sums over everything seen so far."""

    began: float
    replica_seconds: float = 0.0
    zero_seconds: float = 0.0
    """How long no replica existed."""
    leases: dict[str, ReplicaLease] = field(default_factory=dict)
    """The last lease of each replica."""
    statistics: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """Replica -> model -> (requests as Triton counts them, batches it executed)."""
    now: int = 0
    """Replicas that exist now."""

    def by_model(self) -> dict[str, tuple[int, int]]:
        """Requests and batches of each model over all replicas."""
        sums: dict[str, tuple[int, int]] = {}
        for models in self.statistics.values():
            for model, (requests, batches) in models.items():
                before = sums.get(model, (0, 0))
                sums[model] = (before[0] + requests, before[1] + batches)
        return sums


@asynccontextmanager
async def observing(store: Store, pool: str) -> AsyncIterator[Observed]:
    """Watch ``pool`` until the end of the block."""
    observed = Observed(began=time.monotonic())
    task = asyncio.create_task(_observe(store, pool, observed))
    try:
        yield observed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _observe(store: Store, pool: str, observed: Observed) -> None:
    directory = ReplicaDirectory(store)
    last = statistics_at = time.monotonic()
    while True:
        with suppress(TidegateError):
            leases = await directory.list(pool)
            now = time.monotonic()
            observed.replica_seconds += (now - last) * len(leases)
            observed.zero_seconds += 0.0 if leases else now - last
            observed.now, last = len(leases), now
            observed.leases |= {lease.id: lease for lease in leases if lease.state is not ReplicaState.DRAINING}
            if now - statistics_at >= _STATISTICS_SECONDS:
                statistics_at = now
                await look_at_statistics(observed)
        await asyncio.sleep(_LOOK_SECONDS)


async def look_at_statistics(observed: Observed) -> None:
    """Ask every replica that may still answer; those that are gone keep their last answer."""
    for lease in list(observed.leases.values()):
        if lease.state is ReplicaState.READY and lease.http_address is not None:
            with suppress(OSError, ValueError, KeyError):
                observed.statistics[lease.id] = await asyncio.to_thread(_ask, lease.http_address)


def _ask(address: str) -> dict[str, tuple[int, int]]:
    with urllib.request.urlopen(f"http://{address}/v2/models/stats", timeout=2) as answer:
        document: dict[str, Any] = json.load(answer)
    return {
        model["name"]: (int(model["inference_count"]), int(model["execution_count"]))
        for model in document["model_stats"]
    }
