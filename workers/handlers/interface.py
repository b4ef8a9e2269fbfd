"""What a handler gets and gives. Importing this module costs nothing; handlers bring their own libraries."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from wire.jobs import Job

if TYPE_CHECKING:
    from numpy.typing import NDArray

P = ParamSpec("P")
T = TypeVar("T")


class BadInput(Exception):
    """The job's payload is at fault. The message is one clear sentence for whoever submitted it."""


class JobContext(Protocol):
    """What a handler may use while it works on one job."""

    @property
    def deployments(self) -> Path:
        """The folder that holds one folder per pool."""

    async def infer(self, model: str, inputs: Mapping[str, "NDArray[Any]"]) -> dict[str, "NDArray[Any]"]:
        """All outputs of ``model``, by tensor name, from the gateway; may be called concurrently.

        Failures are handled by the worker; a handler lets them pass.
        """

    async def cpu(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """``function(*args)`` off the event loop. Everything that takes more than a millisecond belongs here."""


class Handler(Protocol):
    """``async def handle(job, context) -> dict``: the result must be JSON.

    A job may run more than once (a worker that dies is replaced), so a handler must only compute: inference and
    arithmetic, no effects elsewhere.
    """

    async def __call__(self, job: Job, context: JobContext) -> dict[str, Any]:
        """Raises BadInput when the payload is at fault."""
