"""The data plane of one gateway instance: routing, doors and metrics on one event loop in a thread of its own.

Ray Serve runs an instance's requests (here: the control API) on a loop of its own making. The bytes of inference do
not share it: this loop is uvloop, and a slow answer of the control API cannot hold it up.
"""

import asyncio
import contextlib
import errno
import logging
import threading
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from gateway.at_zero import AtZero
from gateway.ingress.http_door import HttpDoor
from gateway.ingress.rpc_door import GrpcDoor
from gateway.pool_wide.service import PoolWide
from gateway.ports import PortTakenError
from gateway.routing.pool import Pool
from gateway.routing.router import Router
from gateway.settings import InstanceSettings
from gateway.telemetry import MetricsListener, Telemetry
from stores.changes import ChangeStore
from stores.membership import CatalogueStore, GatewayDirectory, ReplicaDirectory
from stores.scaling import Activations
from stores.sequences import SequencePlaces
from stores.store import Store
from wire.errors import ErrorKind, TidegateError
from wire.membership import GatewayReport

log = logging.getLogger(__name__)

#: Longest wait for the store when leaving. Seconds.
_TELL_SECONDS = 2.0

#: A pool that was asked for shows its first replica within this time; how often it is looked for. Seconds.
_WAKE_SECONDS = 2.0
_LOOK_SECONDS = 0.1

T = TypeVar("T")


class DataPlane:
    """See the module. Create, open, drain and close it on its own loop (see :class:`DataPlaneThread`)."""

    def __init__(self, settings: InstanceSettings, instance: str) -> None:
        gateway = settings.gateway
        self._gateway = gateway
        self._store = Store.connect(settings.store, client_name=f"tidegate-gateway-{instance}")
        self._router = Router(
            settings.pools,
            replicas=ReplicaDirectory(self._store),
            gateways=GatewayDirectory(self._store),
            catalogues=CatalogueStore(self._store),
            changes=ChangeStore(self._store),
            activations=Activations(self._store),
            identity=GatewayReport(
                instance=instance,
                http_address=f"{gateway.host}:{gateway.http_port}",
                grpc_address=f"{gateway.host}:{gateway.grpc_port}",
            ),
        )
        for pool in self._router.pools.values():
            pool.sequences.places = SequencePlaces(self._store)
        telemetry = Telemetry(instance)
        telemetry.watch(self._router)
        at_zero = AtZero(self._router)
        self._pool_wide = PoolWide(
            self._router,
            ChangeStore(self._store),
            at_zero,
            host=gateway.host,
            operator_endpoints=gateway.operator_endpoints,
        )
        self._http = HttpDoor(self._router, gateway, at_zero, telemetry, self._pool_wide)
        self._grpc = GrpcDoor(self._router, gateway, at_zero, telemetry, self._pool_wide)
        self._metrics = MetricsListener(telemetry)
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the ports and follow the store; the store need not be there yet.

        Raises:
            PortTakenError: after closing what was open already.
        """
        host, gateway = self._gateway.host, self._gateway
        doors = {
            ("http_port", gateway.http_port): self._http.start,
            ("grpc_port", gateway.grpc_port): self._grpc.start,
            ("metrics_port", gateway.metrics_port): self._metrics.start,
        }
        try:
            for (key, port), start in doors.items():
                await _open(key, host, port, start(host, port))
        except PortTakenError:
            await self._close_doors(limit_seconds=0.0)
            await self._store.close()
            raise
        self._following = asyncio.create_task(self._router.run())

    async def drain(self) -> None:
        """Take nothing new, finish what is there within the drain limit, leave."""
        refusing = asyncio.create_task(refuse_in_vain(self._router.pools.values()))
        await asyncio.gather(
            self._tell(draining=True), self._close_doors(limit_seconds=self._gateway.drain_limit_seconds)
        )
        refusing.cancel()
        await self._metrics.stop()
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
        await self._tell(draining=False)
        await self._store.close()

    async def _tell(self, *, draining: bool) -> None:
        """Tell the store that this instance leaves; a store that does not answer does not keep it from leaving."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_SECONDS):
                await self._router.leave(draining=draining)

    @property
    def failure(self) -> BaseException | None:
        """What ended the following of the store, which nothing should; None while all is well."""
        task = self._following
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    async def _close_doors(self, limit_seconds: float) -> None:
        await asyncio.gather(self._http.drain(limit_seconds), self._grpc.drain(limit_seconds))
        self._pool_wide.close()


async def refuse_in_vain(pools: Collection[Pool]) -> None:
    """While an instance leaves: requests held for a pool that has no replica, and for a while none coming, are told to
    try elsewhere. Who could wake it may be gone, as after a crash of what started us all. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    alone_since: dict[str, float] = {}
    while True:
        for pool in pools:
            if pool.has_coming_replica or not pool.held:
                alone_since.pop(pool.name, None)
            elif loop.time() - alone_since.setdefault(pool.name, loop.time()) >= _WAKE_SECONDS:
                message = f"this gateway instance is leaving, and pool '{pool.name}' has no replica; try again"
                pool.refuse_held(TidegateError(ErrorKind.DRAINING, message, retry_after_seconds=1.0))
        await asyncio.sleep(_LOOK_SECONDS)


class DataPlaneThread:
    """A data plane and the thread and loop it lives in. Its methods are called from other threads."""

    def __init__(self, settings: InstanceSettings, instance: str) -> None:
        self._settings = settings
        self._instance = instance
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._loop.run_forever, name="data-plane", daemon=True)
        self._plane: DataPlane | None = None

    async def open(self) -> None:
        """Open the data plane. Raises PortTakenError."""
        self._thread.start()
        try:
            await self._run(self._open())
        except BaseException:
            self._end()
            raise

    async def drain(self) -> None:
        """Drain the data plane and end its thread."""
        if self._plane is not None:
            await self._run(self._plane.drain())
            self._end()
            self._plane = None

    def check(self) -> None:
        """Raises RuntimeError when the data plane has died."""
        failure = None if self._plane is None else self._plane.failure
        if failure is not None or not self._thread.is_alive():
            raise RuntimeError(f"the data plane has died: {failure}")

    async def _open(self) -> None:
        plane = DataPlane(self._settings, self._instance)
        await plane.open()
        self._plane = plane

    def _run(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        done: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return asyncio.wrap_future(done)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _open(key: str, host: str, port: int, opening: Coroutine[Any, Any, Any]) -> None:
    try:
        await opening
    except OSError as error:
        why = (
            "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
        )
        raise PortTakenError(f"port {port} on {host} ({key}) {why}") from error


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Errors of the loop itself, in one line. gRPC's poller serves all loops of a process through one socket; that one
    of them finds it empty is no error."""
    if isinstance(context.get("exception"), BlockingIOError):
        return
    log.error("event=loop-error message=%r error=%r", context.get("message"), context.get("exception"))
