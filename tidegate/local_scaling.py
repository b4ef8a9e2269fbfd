"""The autoscaler with replicas as processes of this host."""

import secrets

from autoscaler.backends.local import REPLICA_COMMAND, LocalBackend
from autoscaler.loop import run_autoscaler
from stores.store import Store
from tidegate.launch import no_file_flag
from tidegate.settings import Loaded


async def run_local_autoscaler(loaded: Loaded, *, lifeline_fd: int | None) -> int:
    store = Store.connect(loaded.system.store, client_name="tidegate-autoscaler")
    command = (*REPLICA_COMMAND, *no_file_flag(loaded))
    backend = LocalBackend(
        config=loaded.config_path, run_dir=loaded.state_dir, lifeline_fd=lifeline_fd, command=command
    )
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
