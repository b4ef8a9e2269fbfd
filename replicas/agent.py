"""The life of one replica: start Triton, load the models, serve under a lease, drain, leave.

Only here a replica changes its state; what others see of it is the lease (:class:`wire.membership.ReplicaLease`).
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicas import leftovers, sockets
from replicas.addresses import AttachAddresses, port_of
from replicas.catalogue import publish_catalogue
from replicas.changes import ChangeFollower
from replicas.drain import StopRequests, wait_until_idle
from replicas.lease import LeaseKeeper
from replicas.repository import RepositoryError, check_model, load_failure
from replicas.selfcheck import SelfCheckFailed, check_known_answer
from replicas.server import AttachedTriton, LaunchedTriton, TritonEnded, TritonServer
from replicas.triton import Triton, TritonRefused, TritonUnreachable
from replicas.watch import Fault, watch
from replicas.wheel import CannotLaunch
from wire.membership import ReplicaLease, ReplicaState, StartStage
from wire.pools import LoadMode, PoolSettings

if TYPE_CHECKING:
    from stores.store import Store  # imported at run time by whoever makes it, while Triton comes up

__all__ = ["AttachAddresses", "run_replica"]

_log = logging.getLogger(__name__)

_ANNOUNCE_SECONDS = 1.0
#: After the drain is announced gateways need a moment to hear of it before an idle Triton may be stopped.
_HEARD_SECONDS = 0.2


class StartFailed(Exception):
    """The replica cannot become ready; the message is the one sentence for its lease."""


async def run_replica(
    *,
    pool: str,
    settings: PoolSettings,
    repository: Path,
    run_dir: Path,
    store: "Store | Callable[[], Store]",
    replica_id: str,
    attach: AttachAddresses | None,
    lifeline_fd: int | None,
) -> int:
    """Run one replica of ``pool`` until it is told to leave (SIGTERM, SIGINT, or the end of ``lifeline_fd``).

    ``repository`` is the pool's Triton model repository, laid out; ``run_dir`` this installation's folder for what
    replicas need while they live. ``store`` may be a function that makes it (and imports its driver); it is called in
    a thread while Triton comes up, and its store closed at the end. With ``attach`` the Triton there is used, else one
    is launched. Must be called in the main thread of a process of its own. Returns the exit code: 0 when it left in
    order, 1 when it could not start or its Triton died, lost a Python stub or hung.
    """
    stop = StopRequests()
    stop.listen(lifeline_fd)
    first = ReplicaLease(id=replica_id, pool=pool, state=ReplicaState.STARTING, pid=os.getpid(), waiting_for="Triton")
    lease = LeaseKeeper(store, first, settings.replica.lease_seconds)
    replica = _Replica(pool, settings, repository, run_dir, lease, stop)
    keeping = asyncio.create_task(lease.keep())
    keeping.add_done_callback(lambda task: _leave_unless_cancelled(task, stop, "its lease can no longer be kept"))
    try:
        return await replica.live(replica_id, attach)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await lease.leave()


class _Replica:
    def __init__(
        self,
        pool: str,
        settings: PoolSettings,
        repository: Path,
        run_dir: Path,
        lease: LeaseKeeper,
        stop: StopRequests,
    ) -> None:
        self._pool, self._settings, self._repository, self._run_dir = pool, settings, repository, run_dir
        self._lease, self._stop = lease, stop
        self._models = [model.name for model in settings.models if model.load is LoadMode.PRELOAD]
        self._stages: list[StartStage] = []
        self._changes: ChangeFollower
        self._catalogue: asyncio.Task[None] | None = None

    async def live(self, replica_id: str, attach: AttachAddresses | None) -> int:
        try:
            server = self._server(replica_id, attach)
        except StartFailed as error:
            return await self._fail(str(error))
        try:
            if not await self._unless_asked(self._start(server)):
                return 0
            fault = await self._serve(server)
            if fault is None:
                await self._drain(server, self._stop.reason)
                await server.stop(self._stop.forced)
                return 0
            _log.error("leaving: %s", fault.reason)
            if fault.can_drain:
                await self._drain(server, fault.reason)
            else:
                self._lease.change(state=ReplicaState.DRAINING, reason=fault.reason, waiting_for=None)
                await self._lease.written(_ANNOUNCE_SECONDS)
            return 1
        except StartFailed as error:
            server.kill()  # nothing can be in flight on it
            return await self._fail(str(error))
        finally:
            server.kill()

    def _server(self, replica_id: str, attach: AttachAddresses | None) -> TritonServer:
        if attach is not None:
            return AttachedTriton(attach)
        leftovers.sweep(self._run_dir)
        try:
            for model in self._models:
                check_model(self._repository, model)
            return LaunchedTriton(
                repository=self._repository, run_dir=self._run_dir, replica_id=replica_id, settings=self._settings
            )
        except (RepositoryError, CannotLaunch) as error:
            raise StartFailed(str(error)) from error
        except OSError as error:
            raise StartFailed(f"Triton cannot be launched: {error.strerror}: {error.filename}") from error

    async def _unless_asked(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do ``work``; False when it was given up because the replica is asked to leave."""
        doing, asked = asyncio.create_task(work), asyncio.create_task(self._stop.asked.wait())
        await asyncio.wait({doing, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if doing.done():
            doing.result()
            return True
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)
        return False

    async def _start(self, server: TritonServer) -> None:
        """From the launched process to READY, within the start limit."""
        limit = self._settings.replica.start_limit_seconds
        try:
            async with asyncio.timeout(limit):
                async with self._stage("process"):
                    await server.answers()
                self._lease.change(state=ReplicaState.WARMING, **_shown(server.addresses))
                await self._warm(server)
        except TimeoutError as error:
            waited = self._lease.lease.waiting_for
            raise StartFailed(f"not ready within {limit:g} s; it was still waiting for {waited}") from error
        except (CannotLaunch, TritonEnded) as error:
            raise StartFailed(str(error)) from error
        self._changes = ChangeFollower(
            self._pool,
            self._lease.lease.id,
            Triton(server.addresses),
            self._lease.store,
            models=self._models,
            limit_seconds=limit,
            tell=partial(self._tell_models, server),
        )
        self._lease.change(waiting_for="what operators have changed")
        await self._changes.catch_up()
        self._lease.change(state=ReplicaState.READY, models=tuple(self._changes.models), waiting_for=None)
        _log.info("ready: %s", ", ".join(f"{stage.name} {stage.seconds:.2f} s" for stage in self._stages))

    async def _warm(self, server: TritonServer) -> None:
        """Load every model and check the known answer, all at once; give up as soon as one fails or Triton dies."""
        triton = Triton(server.addresses)
        self._waiting = [*self._models, *(["the self-check"] if server.check_mark else [])]
        self._tell_waiting()
        check = [self._check(server, triton, server.check_mark)] if server.check_mark else []
        work = [asyncio.create_task(each) for each in (*check, *(self._load(triton, model) for model in self._models))]
        ended = asyncio.create_task(server.ended())
        loaded = asyncio.gather(*work)
        first: set[asyncio.Future[Any]] = {loaded, ended}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise StartFailed(f"{ended.result()} while it was loading {', '.join(self._waiting)}")
            try:
                loaded.result()
            except TritonUnreachable as error:
                # Its death is seen on the connections a moment before the process is gone.
                await asyncio.wait({ended}, timeout=1.0)
                raise StartFailed(ended.result() if ended.done() else str(error)) from error
        finally:
            for task in (*work, ended):
                task.cancel()
            await asyncio.gather(*work, ended, loaded, return_exceptions=True)

    async def _load(self, triton: Triton, model: str) -> None:
        async with self._stage(f"load {model}"):
            if not await triton.model_ready(model):
                try:
                    await triton.load(model)
                except TritonRefused as error:
                    raise StartFailed(load_failure(model, str(error))) from error
                if not await triton.model_ready(model):
                    raise StartFailed(f"model '{model}' was loaded and is not ready")
        self._no_longer_waiting(model)

    async def _check(self, server: TritonServer, triton: Triton, mark: str) -> None:
        async with self._stage("self-check"):
            try:
                await check_known_answer(triton, mark)
            except SelfCheckFailed as error:
                raise StartFailed(str(error)) from error
        server.checked()
        self._no_longer_waiting("the self-check")

    async def _serve(self, server: TritonServer) -> Fault | None:
        """Serve until asked to leave (None) or Triton is gone, broken or hangs (the fault)."""
        self._publish(server, self._changes.models)
        following = asyncio.create_task(self._changes.follow())
        following.add_done_callback(
            lambda task: _leave_unless_cancelled(task, self._stop, "changes can no longer be followed")
        )
        ended, asked = asyncio.create_task(server.ended()), asyncio.create_task(self._stop.asked.wait())
        watching = asyncio.create_task(watch(server, self._tell_hung))
        try:
            await asyncio.wait({ended, asked, watching}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return Fault(ended.result(), can_drain=False)
            return None if asked.done() else watching.result()
        finally:
            tasks = [task for task in (self._catalogue, following, ended, asked, watching) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _publish(self, server: TritonServer, models: Collection[str]) -> None:
        if self._catalogue is not None:
            self._catalogue.cancel()
        self._catalogue = asyncio.create_task(
            publish_catalogue(Triton(server.addresses), self._lease.store, self._pool, list(models))
        )

    async def _tell_models(self, server: TritonServer, models: Collection[str]) -> None:
        """Other models can be served than before: say so, if the replica is in service yet."""
        if self._catalogue is None:
            return
        self._lease.change(models=tuple(models))
        self._publish(server, models)
        await self._lease.written(_ANNOUNCE_SECONDS)

    def _tell_hung(self, sentence: str | None) -> None:
        """While Triton hangs the replica is WARMING: gateways send it nothing, and for the autoscaler it still is
        capacity, for it comes back in a moment or is ended soon; a machine out of breath needs no replica more."""
        if sentence is None:
            _log.warning("Triton answers again")
            self._lease.change(state=ReplicaState.READY, reason=None, waiting_for=None)
        else:
            _log.warning("not ready for now: %s", sentence)
            self._lease.change(state=ReplicaState.WARMING, reason=sentence, waiting_for="Triton to answer again")

    async def _drain(self, server: TritonServer, reason: str) -> None:
        """Announce that nothing new may come, and wait until nothing is in flight: no longer than the limit, not at
        all when forced, and not for a Triton that is gone."""
        limit = self._settings.replica.drain_limit_seconds
        if self._stop.drain_limit_seconds is not None:
            limit = min(limit, self._stop.drain_limit_seconds)
        _log.info("draining, at most %g s: %s", limit, reason)
        self._lease.change(state=ReplicaState.DRAINING, reason=reason, waiting_for="requests in flight")
        if await self._lease.written(min(_ANNOUNCE_SECONDS, limit)):
            await asyncio.sleep(min(_HEARD_SECONDS, limit))
        # The sockets of a Triton on another host cannot be seen from here.
        ports = [port_of(address) for address in (server.addresses.http, server.addresses.grpc)]
        ports = [port for port in ports if sockets.anyone_listens(port)]
        idle = asyncio.create_task(wait_until_idle(ports, lambda what: self._lease.change(waiting_for=what)))
        ends = {idle, asyncio.create_task(server.ended()), asyncio.create_task(self._stop.forced.wait())}
        await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            _log.warning("stopping Triton with requests in flight")
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def _fail(self, reason: str) -> int:
        """Say why, keep saying it for as long as a lease lasts so that people see it, then leave."""
        _log.error("cannot serve: %s", reason)
        self._lease.change(state=ReplicaState.FAILED, reason=reason, waiting_for=None, models=())
        asked = asyncio.create_task(self._stop.asked.wait())
        await asyncio.wait({asked}, timeout=self._settings.replica.lease_seconds)
        asked.cancel()
        return 1

    @asynccontextmanager
    async def _stage(self, name: str) -> AsyncIterator[None]:
        """Time one stage of the cold start and put it in the lease when it is done."""
        begun = time.monotonic()
        yield
        self._stages.append(StartStage(name=name, seconds=round(time.monotonic() - begun, 3)))
        self._lease.change(stages=tuple(self._stages))

    def _no_longer_waiting(self, what: str) -> None:
        self._waiting.remove(what)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        models = [name for name in self._waiting if name in self._models]
        parts = [f"{'model' if len(models) == 1 else 'models'} {', '.join(models)} to load"] if models else []
        parts += [name for name in self._waiting if name not in self._models]
        self._lease.change(waiting_for=" and ".join(parts) or None)


def _shown(addresses: AttachAddresses) -> dict[str, str | None]:
    return {"http_address": addresses.http, "grpc_address": addresses.grpc, "metrics_address": addresses.metrics}


def _leave_unless_cancelled(task: "asyncio.Task[None]", stop: StopRequests, reason: str) -> None:
    """A replica that cannot keep its lease for a fault of ours would serve unseen, one that makes no changes would
    serve something else than the others: better it leaves."""
    if not task.cancelled():
        _log.error(reason, exc_info=task.exception())
        stop.ask(reason)
