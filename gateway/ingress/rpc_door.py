"""The gRPC door: listens, and relays each call frame by frame, tensors never decoded.

Who answers which method is in docs/protocol-grpc.md. The way of a call: rpc_connection (the caller's connection),
rpc_stream (one call), rpc_routes (who answers it), rpc_upstream (connections to replicas).
"""

import asyncio
import time

from gateway.access import Access
from gateway.ingress.callers import Callers
from gateway.ingress.h2_headers import HeaderBlocks
from gateway.ingress.rpc_calls import read_call
from gateway.ingress.rpc_connection import CallerConnection
from gateway.ingress.rpc_routes import AtZero, Pools, Routes
from gateway.ingress.rpc_upstream import Upstreams
from gateway.pool_wide.service import PoolWide
from gateway.settings import GatewaySettings
from gateway.telemetry import Observer
from gateway.tls import GRPC, ServerTls
from wire.errors import ErrorKind

#: The protocol's own limit for a message. Bytes.
LONGEST_MESSAGE_BYTES = 2**31 - 1
#: How often idle connections are looked for. Seconds.
_SWEEP_SECONDS = 1.0


class GrpcDoor:
    """See the module. One instance serves one listening port."""

    def __init__(
        self,
        router: Pools,
        settings: GatewaySettings,
        at_zero: AtZero,
        observer: Observer,
        pool_wide: PoolWide | None = None,
    ) -> None:
        """Without ``pool_wide``, what concerns all replicas of a pool is refused, or answered by one of them."""
        self._settings = settings
        self._observer = observer
        self.access = Access(settings.api_keys)
        self._tls = None if settings.tls.certificate is None else ServerTls(settings.tls, GRPC)
        self.loop = asyncio.get_running_loop()
        self.pool_wide = pool_wide
        self.routes = Routes(router, at_zero)
        self.upstreams = Upstreams(router.pools.values(), settings)
        self.message_limit_bytes = min(settings.body_limit_bytes, LONGEST_MESSAGE_BYTES)
        self.callers: Callers[CallerConnection] = Callers()
        self._blocks = HeaderBlocks(read_call, settings.header_limit_bytes)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which matters when ``port`` is 0. Raises OSError when it is taken."""
        limit = self._settings.header_limit_bytes
        tls = None if self._tls is None else self._tls.context
        self._server = await self.loop.create_server(
            lambda: CallerConnection(self, self._blocks, limit), host, port, reuse_port=True, backlog=1024, ssl=tls
        )
        self._sweeper = self.loop.call_later(_SWEEP_SECONDS, self._sweep)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def drain(self, limit_seconds: float) -> None:
        """Take nothing new, let the calls under way finish, for as long as the limit allows; then give up."""
        if self.callers.draining:
            return
        if self._server is not None:
            self._server.close()
        await self.callers.drain(limit_seconds)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.upstreams.close()

    def count(
        self, pool: str | None, status: int, own_error: ErrorKind | None, *, held_seconds: float, since: float
    ) -> None:
        """A call is over; ``since`` is the ``time.perf_counter()`` at which it came."""
        self._observer.request_ended(
            pool=pool,
            protocol="grpc",
            status=status,
            own_error=own_error,
            held_seconds=held_seconds,
            total_seconds=time.perf_counter() - since,
        )

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in self.callers:
            connection.sweep(now, self._settings.idle_client_seconds)
        self.upstreams.sweep(now)
        if self._tls is not None:
            self._tls.reload_if_changed()
        self._sweeper = self.loop.call_later(_SWEEP_SECONDS, self._sweep)
