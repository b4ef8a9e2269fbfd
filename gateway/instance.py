"""One gateway instance as Ray Serve sees it: a Serve replica with a data plane in a thread beside Serve's own loop.

The process that starts Ray imports this module to describe instances; only an instance imports the data plane.
"""

import logging
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.settings import InstanceSettings

if TYPE_CHECKING:
    from gateway.data_plane import DataPlaneThread


@dataclass(frozen=True)
class LogTarget:
    """Where and how instances log: as the process that started them does."""

    stderr: str
    """Path under which that process's standard error can be opened."""
    level: int
    formatter: logging.Formatter | None


class GatewayInstance:
    """See the module. Serve makes one per instance, in a process of its own."""

    _plane: "DataPlaneThread"

    async def __init__(self, settings: InstanceSettings, logs: LogTarget | None) -> None:  # type: ignore[misc]
        """Open the data plane. Serve awaits constructors. Raises PortTakenError."""
        from ray import serve

        from gateway.data_plane import DataPlaneThread

        if logs is not None:
            _log_to(logs)
        _allow_many_connections()
        self._plane = DataPlaneThread(settings, serve.get_replica_context().replica_id.unique_id)
        await self._plane.open()

    def check_health(self) -> None:
        """Raises when the data plane has died; Serve then replaces this instance."""
        self._plane.check()

    async def __del__(self) -> None:
        # Serve awaits this before it ends the process; it is the drain.
        await self._plane.drain()


def quiet_ray() -> None:
    """Ray and Serve tell in long words what we say in short ones."""
    for name in ("ray", "ray.serve", "uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _allow_many_connections() -> None:
    """A connection is a file, and a shell's usual 1,024 are soon used up; up to the hard limit it is ours to raise."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _log_to(target: LogTarget) -> None:
    """Write this instance's log lines where its starter writes; where that is another machine, Ray's own files stay."""
    try:
        stream = open(target.stderr, "a", buffering=1)  # noqa: SIM115 (open as long as the process lives)
    except OSError:
        return
    handler = logging.StreamHandler(stream)
    handler.setFormatter(target.formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(target.level)
    quiet_ray()
