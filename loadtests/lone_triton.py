"""A Triton by itself, for measurements that need neither a store nor a system around it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replicas.server import LaunchedTriton
from replicas.triton import Triton
from wire.pools import PoolSettings


@contextmanager
def lone_triton(repository: Path, settings: PoolSettings, *, run_dir: Path, name: str) -> Iterator[LaunchedTriton]:
    """A Triton with the models of ``settings`` loaded; it is killed at the end."""
    server = LaunchedTriton(repository=repository, run_dir=run_dir, replica_id=name, settings=settings)

    async def start() -> None:
        await server.answers()
        for model in settings.model_names:
            await Triton(server.addresses).load(model)

    try:
        asyncio.run(start())
        yield server
    finally:
        server.kill()
