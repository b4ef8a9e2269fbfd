"""One job, from its claim to the outcome it deserves. Knows nothing of streams: the worker delivers the ending."""

import asyncio
import importlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from stores.job_claims import Claim
from wire.errors import ErrorKind
from wire.jobs import DecodeError, Job, Outcome, OutcomeStatus, decode_job
from wire.queues import QueueSettings
from workers.cpu_threads import CpuThreads
from workers.handlers.interface import BadInput, Handler
from workers.retry import MOST_LOST_REPLICAS, InferenceFailed
from workers.settings import GatewayAccessSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workers.gateway_client import GatewayClient

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """What becomes of a claim. With ``dead_reason`` the job is kept among the dead letters."""

    outcome: Outcome
    dead_reason: str | None = None


class Workshop:
    """What all jobs of one process share: threads, the connection to the gateway, handlers. Heavy libraries are loaded
    when the first job needs them, so that an idle worker stays small."""

    def __init__(self, *, gateway_url: str, access: GatewayAccessSettings, deployments: Path, cpu: CpuThreads) -> None:
        self.deployments = deployments
        self.cpu = cpu
        self._gateway_url = gateway_url
        self._access = access
        self._gateway: GatewayClient | None = None
        self._loading = asyncio.Lock()

    async def gateway(self) -> "GatewayClient":
        async with self._loading:
            if self._gateway is None:
                module = await self.cpu.run(importlib.import_module, "workers.gateway_client")
                self._gateway = module.GatewayClient(
                    self._gateway_url, self._access, run_on_cpu=self.cpu.run, dice=random.random
                )
            return cast("GatewayClient", self._gateway)

    async def handler(self, path: str) -> Handler:
        """The handler at ``package.module:name``."""
        module_name, _, name = path.partition(":")
        module = await self.cpu.run(importlib.import_module, module_name)
        return cast(Handler, getattr(module, name))

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.close()
        self.cpu.close()


class _Context:
    """The JobContext of one job."""

    def __init__(self, workshop: Workshop, job: Job, deadline: float) -> None:
        self._workshop = workshop
        self._job = job
        self._deadline = deadline

    @property
    def deployments(self) -> Path:
        return self._workshop.deployments

    async def infer(self, model: str, inputs: Mapping[str, "NDArray[Any]"]) -> dict[str, "NDArray[Any]"]:
        gateway = await self._workshop.gateway()
        return await gateway.infer(model, inputs, job_id=self._job.id, deadline=self._deadline)

    async def cpu(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._workshop.cpu.run(function, *args, **kwargs)


async def run_job(claim: Claim, settings: QueueSettings, workshop: Workshop) -> Ending:
    """Do the job of ``claim``. Every way it can end is an Ending; only cancellation is raised."""
    started = time.monotonic()
    if claim.deliveries > settings.max_deliveries:
        tries = claim.deliveries - 1
        reason = f"it was delivered {tries} times and its worker never came back with an outcome"
        return Ending(_failure(claim, "poison", reason, started), dead_reason=reason)
    try:
        job = decode_job(claim.queue, claim.id, claim.fields)
    except DecodeError as error:
        reason = f"it cannot be read: {error}"
        return Ending(_failure(claim, ErrorKind.BAD_REQUEST, reason, started), dead_reason=reason)
    if len(job.payload) > settings.payload_limit_bytes:
        # A plain XADD asks nobody, so the limit binds here.
        sizes = f"{len(job.payload)} bytes, and queue {claim.queue} takes at most {settings.payload_limit_bytes}"
        return Ending(_failure(claim, "bad_input", f"the payload has {sizes} (payload_limit_bytes)", started))
    limit = settings.job_limit_seconds
    if job.timeout_ms is not None:
        limit = min(limit, job.timeout_ms / 1000 - claim.waited_seconds)
    time_limit = asyncio.timeout(limit)
    try:
        async with time_limit:
            handler = await workshop.handler(settings.handler)
            result = await handler(job, _Context(workshop, job, started + limit))
        outcome = _outcome(claim, started, status=OutcomeStatus.SUCCEEDED, result=result)
        outcome.model_dump_json()  # a result that is not JSON is the handler's fault; find it out here
        return Ending(outcome)
    except TimeoutError as error:
        if not time_limit.expired():
            return _ending_of(error, claim, started)
        late = "the job was not done within its time limit"
        return Ending(_failure(claim, ErrorKind.DEADLINE, late, started))
    except BadInput as error:
        return Ending(_failure(claim, "bad_input", str(error), started))
    except Exception as error:  # noqa: BLE001 - handlers are plugins; whatever they raise ends their job, not the worker
        return _ending_of(error, claim, started)


def _ending_of(error: Exception, claim: Claim, started: float) -> Ending:
    errors = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    for cause in errors:
        if isinstance(cause, BadInput):
            return Ending(_failure(claim, "bad_input", str(cause), started))
        if isinstance(cause, InferenceFailed):
            failure = cause.failure
            kind = failure.kind or ErrorKind.INTERNAL
            poison = cause.attempts.lost_replicas >= MOST_LOST_REPLICAS
            reason = f"{cause.attempts.lost_replicas} replicas were lost while they worked on it" if poison else None
            return Ending(_failure(claim, kind, reason or str(cause), started), dead_reason=reason)
    log.error("job %s of queue %s: its handler failed", claim.id, claim.queue, exc_info=error)
    sentence = (
        f"the handler of queue {claim.queue} failed ({type(errors[0]).__name__}); the worker's log has the details"
    )
    return Ending(_failure(claim, ErrorKind.INTERNAL, sentence, started))


def _failure(claim: Claim, kind: str, sentence: str, started: float) -> Outcome:
    return _outcome(claim, started, status=OutcomeStatus.FAILED, error=sentence, error_kind=str(kind))


def _outcome(claim: Claim, started: float, **fields: Any) -> Outcome:
    return Outcome(
        job_id=claim.id,
        queue=claim.queue,
        worker=claim.consumer,
        deliveries=claim.deliveries,
        waited_seconds=round(claim.waited_seconds, 3),
        worked_seconds=round(time.monotonic() - started, 3),
        **fields,
    )
