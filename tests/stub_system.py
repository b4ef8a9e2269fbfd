"""A supervisor whose gateway is a stub, so that its own behaviour is tested without waiting for Ray.

``python -m tests.stub_system CONFIG NOTIFY_FD`` is the supervisor; the gateway it starts is this
module again, with ``run gateway ...``.
"""

import asyncio
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.settings import GatewaySettings
from stores.membership import GatewayDirectory
from stores.settings import StoreSettings
from stores.store import Store
from tidegate.supervisor import up
from wire.errors import TidegateError
from wire.membership import GatewayReport, PoolLoad


async def serve(settings: GatewaySettings, store_settings: StoreSettings, pools: Mapping[str, Any]) -> int:
    """Opens the doors and reports, as a gateway does, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    for port in (settings.http_port, settings.grpc_port, settings.control_port):
        await asyncio.start_server(lambda _, writer: writer.close(), settings.host, port)
    store = Store.connect(store_settings, client_name="stub-gateway")
    report = GatewayReport(
        instance="stub", http_address="stub", grpc_address="stub", pools={pool: PoolLoad() for pool in pools}
    )
    while not stop.is_set():
        with suppress(TidegateError):
            await GatewayDirectory(store).report(report, 3)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)
    await store.close()
    return 0


def run_role(arguments: list[str]) -> int:
    """``run gateway`` with the stub in the place of the room's entry function."""
    import types

    from tidegate.run import main

    stub = types.ModuleType("gateway.app")
    stub.run_gateway = lambda settings, *_: asyncio.run(  # type: ignore[attr-defined]
        serve(settings.gateway, settings.store, settings.pools)
    )
    sys.modules["gateway.app"] = stub
    return main(arguments)


def supervise(config: Path, notify_fd: int) -> int:
    """The real supervisor with the stub's command for the gateway."""
    from tidegate.settings import load

    real = up.run_command

    def command(loaded: Any, role: str) -> tuple[str, ...]:
        words = real(loaded, role)
        return words if role != "gateway" else (words[0], "-m", "tests.stub_system", *words[words.index("run") :])

    up.run_command = command  # type: ignore[assignment]
    return asyncio.run(up.run_supervisor(load(config), notify_fd=notify_fd, log_level="info"))


if __name__ == "__main__":
    sys.exit(
        run_role(sys.argv[2:]) if sys.argv[1] == "run" else supervise(Path(sys.argv[1]), notify_fd=int(sys.argv[2]))
    )
