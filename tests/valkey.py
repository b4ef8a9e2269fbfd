"""A real Valkey for tests: own free port, own temporary folder, stopped at the end whatever happens."""

import asyncio
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest_asyncio

from stores.embedded import server_argv, valkey_binary, wait_until_answers
from stores.settings import StoreSettings
from stores.store import Store


class RunningValkey:
    """One server that can be stopped, killed, frozen and started again on the same port and data."""

    def __init__(self, data_dir: Path, port: int) -> None:
        self.data_dir = data_dir
        self.port = port
        self.settings = StoreSettings(embedded_port=port, timeout_seconds=2.0)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self.data_dir / "log").open("ab") as log:
            argv = server_argv(valkey_binary(), self.data_dir, self.port)
            self._process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
        store = Store.connect(self.settings, client_name="test-probe")
        try:
            await wait_until_answers(store, 10)
        finally:
            await store.close()

    async def stop(self) -> None:
        """SIGTERM: the append-only file is complete."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """SIGKILL."""
        await self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.send_signal(signal.SIGCONT)
            await self._process.wait()
            self._process = None


@asynccontextmanager
async def running_valkey() -> AsyncIterator[RunningValkey]:
    with tempfile.TemporaryDirectory(prefix="tidegate-valkey-") as folder:
        valkey = RunningValkey(Path(folder), free_port())
        try:
            await valkey.start()
            yield valkey
        finally:
            await valkey.kill()


@pytest_asyncio.fixture
async def valkey() -> AsyncIterator[RunningValkey]:
    async with running_valkey() as server:
        yield server


@pytest_asyncio.fixture
async def store(valkey: RunningValkey) -> AsyncIterator[Store]:
    """A store connected to ``valkey``."""
    connected = Store.connect(valkey.settings, client_name="test")
    yield connected
    await connected.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
