"""What the system still waits for before it can be called up."""

import socket
from collections.abc import Mapping

from stores.membership import GatewayDirectory
from stores.scaling import DecisionLog
from stores.snapshot import connected_names
from stores.store import Store
from tidegate.launch import reachable
from tidegate.settings import Loaded
from wire.errors import TidegateError


async def still_waiting_for(loaded: Loaded, store: Store, workers: tuple[str, ...]) -> list[str]:
    """Each part that is not ready, in words; empty when the system is up. Unknown counts as not ready."""
    try:
        await store.ping()
        waiting = [
            *await _gateways(loaded, store),
            *await _decisions(loaded, store),
            *await _workers(store, workers),
        ]
    except TidegateError as error:
        return [f"the store ({error.message})"]
    return waiting


async def _gateways(loaded: Loaded, store: Store) -> list[str]:
    settings = loaded.system.gateway
    there = [report for report in await GatewayDirectory(store).list() if not report.draining]
    if len(there) < settings.instances:
        return [f"the gateway ({len(there)} of {settings.instances} instances listen)"]
    host = reachable(settings.host)
    doors: Mapping[str, int] = {
        "its HTTP door": settings.http_port,
        "its gRPC door": settings.grpc_port,
        "its control API": settings.control_port,
    }
    closed = [name for name, port in doors.items() if not _answers(host, port)]
    return [f"the gateway ({', '.join(closed)})"] if closed else []


async def _decisions(loaded: Loaded, store: Store) -> list[str]:
    decisions = DecisionLog(store)
    undecided = [pool for pool in loaded.pools if await decisions.latest(pool) is None]
    return [f"the autoscaler (no decision yet for {', '.join(undecided)})"] if undecided else []


async def _workers(store: Store, workers: tuple[str, ...]) -> list[str]:
    connected = await connected_names(store)
    if connected is None:
        return []  # it does not tell; a worker that cannot work ends, and that is seen
    missing = [name for name in workers if f"tidegate-{name}" not in connected]
    return [f"{', '.join(missing)} (not connected to the store yet)"] if missing else []


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=0.2):
            return True
    except OSError:
        return False
