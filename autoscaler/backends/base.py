"""What the autoscaler needs of a place where replicas run."""

from dataclasses import dataclass
from typing import Protocol


class BackendError(Exception):
    """The backend could not do it; the message is one clear sentence."""


@dataclass(frozen=True, slots=True)
class RunningReplica:
    """A replica that exists in the backend, with or without a lease."""

    id: str
    pool: str
    age_seconds: float
    """Seconds since its process (or pod) started."""
    stopping: bool = False
    """The backend has told it to drain."""


class ScalerBackend(Protocol):
    """Starts and stops single replicas, and says which exist. How many there shall be is ``autoscaler.scale``."""

    async def running(self, pool: str) -> list[RunningReplica]:
        """Every living replica of ``pool``, oldest first, also those that another autoscaler started.

        Raises:
            BackendError: it cannot be told.
        """
        ...

    async def start(self, pool: str) -> str:
        """Start one replica and return its id; ``running`` shows it from now on.

        Raises:
            BackendError: nothing was started.
        """
        ...

    async def stop(self, replica_id: str) -> None:
        """Have a replica drain and leave; returns at once. Telling one twice, or one that is gone, does nothing.

        Raises:
            BackendError: it could not be told.
        """
        ...

    async def ending(self, replica_id: str) -> str | None:
        """How a replica that this backend started ended, as words; None while it runs or if it is not known."""
        ...
