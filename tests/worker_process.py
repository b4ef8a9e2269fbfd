"""A real worker process: ``python -m tests.worker_process '<json>'``, and how tests start and stop it."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stores.settings import StoreSettings
from stores.store import Store
from wire.queues import QueueSettings
from workers.settings import WorkerSettings
from workers.worker import run_worker

QUEUE = "work"


@asynccontextmanager
async def worker_process(store: StoreSettings, log: Path, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker that serves ``QUEUE``; killed at the end if it still runs. ``options``: fields of queue and worker
    settings, and ``handler``, ``gateway_url``, ``deployments``."""
    words = {"port": store.embedded_port, "timeout_seconds": store.timeout_seconds} | options
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.worker_process", json.dumps(words), stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _serve(words: dict[str, Any]) -> int:
    queue_fields = QueueSettings.model_fields.keys() & words.keys()
    queue = QueueSettings(
        **{"handler": "tests.handlers:handle", "pools": ("none",)} | {name: words[name] for name in queue_fields}
    )
    worker_fields = WorkerSettings.model_fields.keys() & words.keys()
    store = Store.connect(
        StoreSettings(embedded_port=words["port"], timeout_seconds=words["timeout_seconds"]), client_name="worker"
    )
    try:
        return await run_worker(
            queues={name: queue for name in words.get("queues", [QUEUE])},
            settings=WorkerSettings(**{name: words[name] for name in worker_fields}),
            store=store,
            gateway_url=words.get("gateway_url", "http://127.0.0.1:9"),
            name="worker",
            deployments=Path(words.get("deployments", "deployments")),
        )
    finally:
        await store.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    sys.exit(asyncio.run(_serve(json.loads(sys.argv[1]))))
