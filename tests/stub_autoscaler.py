"""The real autoscaler over stub replicas: ``python -m tests.stub_autoscaler PORT CONFIG RUN_DIR POLL``."""

import asyncio
import secrets
import sys
from pathlib import Path

from autoscaler.backends.local import LocalBackend
from autoscaler.loop import run_autoscaler
from autoscaler.settings import AutoscalerSettings
from stores.settings import StoreSettings
from stores.store import Store
from wire.pools import ModelSettings, PoolSettings, ScalingSettings
from wire.queues import QueueSettings

SCALING = ScalingSettings(
    max_replicas=3, target_demand_per_replica=10, scale_to_zero_delay_seconds=1.0, scale_down_delay_seconds=1.0
)
POOLS = {"vision": PoolSettings(models=(ModelSettings(name="segmenter"),), scaling=SCALING)}
QUEUES = {"pages": QueueSettings(handler="tests.none:handle", pools=("vision",))}


def stub_command(port: int, *, ready_after: float = 0.0, drain: float = 0.0, how: str = "works") -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.stub_replica", str(port), str(ready_after), str(drain), how)


async def main(port: int, config: Path, run_dir: Path, poll: float) -> int:
    store = Store.connect(StoreSettings(embedded_port=port, timeout_seconds=1.0), client_name="autoscaler")
    backend = LocalBackend(config=config, run_dir=run_dir, command=stub_command(port))
    try:
        return await run_autoscaler(
            settings=AutoscalerSettings(poll_seconds=poll, leader_lease_seconds=1.0),
            pools=POOLS,
            queues=QUEUES,
            store=store,
            backend=backend,
            token=secrets.token_hex(8),
        )
    finally:
        await store.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))))
