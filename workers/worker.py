"""A worker process: claims jobs from all its queues, runs them, ends each claim with one outcome.

Order of leaving, and why: first nothing new is claimed; then claimed jobs get their time to finish, still renewed; what
is left is handed back; renewal stops last, so that no claim goes stale while its job is being finished.
"""

import asyncio
import importlib.util
import logging
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stores.job_claims import Claim, JobClaims
from stores.store import Store
from wire.errors import TidegateError
from wire.queues import QueueSettings
from workers.cpu_threads import CpuThreads
from workers.job_run import Ending, Workshop, run_job
from workers.outage import Outage
from workers.renewal import ClaimRenewal
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

#: Longest blocking read; a worker that is told to leave notices after at most this.
_READ_SECONDS = 1.0
#: With fewer free places than queues, the queues are read in turn; one round of turns takes this long.
_TURN_SECONDS = 0.15
#: How often to look for stale and handed-back claims.
_TAKE_OVER_SECONDS = 1.0
#: Names of dead workers are forgotten after this.
_FORGET_SECONDS = 600.0
#: Longest wait for the store when claims are handed back.
_HAND_BACK_SECONDS = 5.0


async def run_worker(
    *,
    queues: Mapping[str, QueueSettings],
    settings: WorkerSettings,
    store: Store,
    gateway_url: str,
    name: str,
    deployments: Path,
) -> int:
    """Serve ``queues`` until SIGTERM or SIGINT; the exit code (0: drained, 1: forced or misconfigured).

    The first signal drains within ``settings.drain_limit_seconds``, the second hands everything back at once.
    """
    for queue, queue_settings in queues.items():
        module = queue_settings.handler.partition(":")[0]
        if not _exists(module):
            log.error("queue %s: there is no module %s (setting queues.%s.handler)", queue, module, queue)
            return 1
    for key, file in settings.gateway:
        if isinstance(file, Path) and not file.is_file():
            log.error("there is no file %s (setting workers.gateway.%s)", file, key)
            return 1
    workshop = Workshop(
        gateway_url=gateway_url,
        access=settings.gateway,
        deployments=deployments,
        cpu=CpuThreads(settings.cpu_threads),
    )
    worker = Worker(queues, settings, store, f"{name}-{uuid.uuid4().hex[:8]}", workshop)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, worker.leave)
    try:
        return await worker.run()
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)
        await workshop.close()


@dataclass(slots=True)
class _Running:
    claim: Claim
    task: "asyncio.Task[None]"


class Worker:
    """The claim loop and the jobs it has started. ``consumer`` must be unique to the process."""

    def __init__(
        self,
        queues: Mapping[str, QueueSettings],
        settings: WorkerSettings,
        store: Store,
        consumer: str,
        workshop: Workshop,
    ) -> None:
        self._queues = queues
        self._settings = settings
        self._claims = JobClaims(store, consumer)
        self._workshop = workshop
        self._running: dict[tuple[str, str], _Running] = {}
        self._renewal = ClaimRenewal(store, consumer, queues, self._lost_elsewhere)
        self._loop = asyncio.get_running_loop()
        self._leaving = asyncio.Event()
        self._forced = asyncio.Event()
        self._changed = asyncio.Event()
        self._outage = Outage(log)
        self._next_take_over = 0.0
        self._turn = 0

    def leave(self) -> None:
        """Drain; called again: hand everything back at once."""
        if self._leaving.is_set():
            self._forced.set()
        self._leaving.set()
        self._changed.set()

    async def run(self) -> int:
        self._renewal.start()
        log.info("worker %s serves %s", self._claims.consumer, ", ".join(self._queues))
        try:
            await self._through_outages(self._tidy_up)
            while not self._leaving.is_set():
                await self._through_outages(self._claim_round)
            await self._drain()
        finally:
            await self._renewal.close()
        return 1 if self._forced.is_set() else 0

    async def _through_outages(self, step: Callable[[], Awaitable[None]]) -> None:
        """One step; when the store is away, a pause that grows, and a word in the log now and then."""
        try:
            await step()
        except TidegateError as error:
            # Every claim looks stale after an outage; their holders get time to renew them first.
            self._next_take_over = time.monotonic() + max(q.claim_seconds for q in self._queues.values()) / 2
            await self._pause(self._outage.failed(error.message, time.monotonic()))
        else:
            self._outage.over(time.monotonic())

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), seconds)

    async def _tidy_up(self) -> None:
        for queue in self._queues:
            await self._claims.forget_consumers(queue, _FORGET_SECONDS)

    # Claiming

    async def _claim_round(self) -> None:
        """Start what can be started, or wait for a job or a free place."""
        self._changed.clear()
        if self._leaving.is_set():
            return
        if self._free() <= 0:
            await self._changed.wait()
            return
        if time.monotonic() >= self._next_take_over:
            await self._take_over()
            self._next_take_over = time.monotonic() + _TAKE_OVER_SECONDS
        free = self._free()
        if free <= 0:
            return
        queues = list(self._queues)
        if free >= len(queues):
            count_each, wait = free // len(queues), _READ_SECONDS
        else:
            # A read of several queues can bring a job from each; so only as many are read as there are places.
            start, self._turn = self._turn, (self._turn + free) % len(queues)
            wait = _TURN_SECONDS * free / len(queues)
            queues, count_each = (queues + queues)[start : start + free], 1
        for claim in await self._claims.claim_new(queues, count_each=count_each, wait_seconds=wait):
            await self._start(claim)

    def _free(self) -> int:
        """Places for further jobs. None while a suspect runs: see ``_is_suspect``."""
        if any(_is_suspect(running.claim) for running in self._running.values()):
            return 0
        return self._settings.concurrency - len(self._running)

    async def _take_over(self) -> None:
        for queue, settings in self._queues.items():
            while self._free() > 0 and not self._leaving.is_set():
                claims, lost = await self._claims.take_over(
                    queue, count=1, stale_seconds=settings.claim_seconds, keep_seconds=settings.outcome_keep_seconds
                )
                for job_id in lost:
                    log.warning("job %s of queue %s was deleted before it was done; recorded as lost", job_id, queue)
                for claim in claims:
                    await self._start(claim)
                if not claims:
                    break

    async def _start(self, claim: Claim) -> None:
        if self._leaving.is_set():
            await self._claims.hand_back(claim)
            return
        key = (claim.queue, claim.id)
        self._renewal.hold(claim)
        if key in self._running:
            # Delivered again to ourselves (the group was made anew, or renewal was too late): one run is enough.
            self._running[key].claim = claim
            return
        # The task first runs after this function has returned, so it finds its entry.
        self._running[key] = _Running(claim, asyncio.create_task(self._work(key)))

    # Working

    async def _work(self, key: tuple[str, str]) -> None:
        running = self._running[key]
        settings = self._queues[running.claim.queue]
        try:
            ending = await run_job(running.claim, settings, self._workshop)
            await self._end(running, ending, settings.outcome_keep_seconds)
        except Exception:
            log.exception("job %s of queue %s could not be ended; it will be delivered again", key[1], key[0])
        finally:
            self._renewal.release(running.claim)
            self._running.pop(key, None)
            self._changed.set()

    async def _end(self, running: _Running, ending: Ending, keep_seconds: float) -> None:
        """Deliver the ending, however long the store is away."""
        outage = Outage(log)
        while True:
            claim, outcome = running.claim, ending.outcome
            try:
                if ending.dead_reason is None:
                    delivered = await self._claims.finish(claim, outcome, keep_seconds)
                else:
                    log.error("job %s of queue %s is given up: %s", claim.id, claim.queue, ending.dead_reason)
                    delivered = await self._claims.dead_letter(claim, outcome, ending.dead_reason, keep_seconds)
            except TidegateError as error:
                await asyncio.sleep(outage.failed(error.message, time.monotonic()))
                continue
            if not delivered and running.claim is claim:
                log.info("job %s of queue %s: the claim was lost, the outcome is not used", claim.id, claim.queue)
            return

    def _lost_elsewhere(self, claim: Claim) -> None:
        """Called in the renewal thread: another worker holds this job now."""
        self._loop.call_soon_threadsafe(self._stop_lost, claim)

    def _stop_lost(self, claim: Claim) -> None:
        running = self._running.get((claim.queue, claim.id))
        if running is not None and running.claim is claim:
            log.warning("job %s of queue %s was taken over by another worker; stopped here", claim.id, claim.queue)
            running.task.cancel()

    # Leaving

    async def _drain(self) -> None:
        if self._running:
            log.info("worker %s finishes %d jobs", self._claims.consumer, len(self._running))
        finished = asyncio.create_task(self._all_finished())
        forced = asyncio.create_task(self._forced.wait())
        limit = self._settings.drain_limit_seconds
        await asyncio.wait({finished, forced}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()
        forced.cancel()
        left = list(self._running.values())
        for running in left:
            running.task.cancel()
        await asyncio.gather(*(running.task for running in left), return_exceptions=True)
        try:
            async with asyncio.timeout(_HAND_BACK_SECONDS):
                for running in left:
                    await self._claims.hand_back(running.claim)
        except (TidegateError, TimeoutError):
            log.warning("%d claims could not be handed back; they are taken over when they are stale", len(left))

    async def _all_finished(self) -> None:
        while self._running:
            self._changed.clear()
            await self._changed.wait()


def _is_suspect(claim: Claim) -> bool:
    """A job whose last worker fell silent may have killed it. It runs with no new job beside it, so that a job that
    kills its worker does not use up the deliveries of innocent ones."""
    return claim.deliveries > 1


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # a parent package is missing
