"""The autoscaler with replicas as processes of this host."""

import sys
from pathlib import Path

from autoscaler.backends.local import LocalBackend
from autoscaler.loop import run_autoscaler
from stores.store import Store
from tidegate.settings import Loaded


def replica_command(config_path: Path) -> tuple[str, ...]:
    """The command that starts a replica of this installation, without pool, id and lifeline."""
    return (sys.executable, "-m", "tidegate", "run", "replica", "--config", str(config_path))


async def run_local_autoscaler(loaded: Loaded, *, lifeline_fd: int | None) -> int:
    import secrets

    store = Store.connect(loaded.system.store, client_name="tidegate-autoscaler")
    backend = LocalBackend(command=replica_command(loaded.config_path), lifeline_fd=lifeline_fd)
    try:
        return await run_autoscaler(
            settings=loaded.system.autoscaler,
            pools=loaded.pools,
            queues=loaded.system.queues,
            store=store,
            backend=backend,
            token=secrets.token_hex(8),
        )
    finally:
        await store.close()
