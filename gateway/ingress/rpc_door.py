"""The gRPC door: listens, and relays each call frame by frame, tensors never decoded.

Who answers which method is in docs/protocol-grpc.md. The way of a call: rpc_connection (the caller's connection),
rpc_stream (one call), rpc_routes (who answers it), rpc_upstream (connections to replicas).
"""

import asyncio

from gateway.ingress.h2_headers import HeaderBlocks
from gateway.ingress.rpc_calls import read_call
from gateway.ingress.rpc_connection import CallerConnection
from gateway.ingress.rpc_routes import AtZero, Pools, Routes
from gateway.ingress.rpc_upstream import Upstreams
from gateway.settings import GatewaySettings
from gateway.telemetry import Observer
from wire.errors import ErrorKind, TidegateError

#: The protocol's own limit for a message. Bytes.
LONGEST_MESSAGE_BYTES = 2**31 - 1
#: How often idle connections are looked for. Seconds.
_SWEEP_SECONDS = 1.0
#: After the drain limit, the errors that are still being written get this long. Seconds.
_CUT_SECONDS = 0.5


class GrpcDoor:
    """See the module. One instance serves one listening port."""

    def __init__(self, router: Pools, settings: GatewaySettings, at_zero: AtZero, observer: Observer) -> None:
        self._settings = settings
        self._observer = observer
        self.loop = asyncio.get_running_loop()
        self.routes = Routes(router, at_zero)
        self.upstreams = Upstreams(router.pools.values(), settings)
        self.message_limit_bytes = min(settings.body_limit_bytes, LONGEST_MESSAGE_BYTES)
        self.draining = False
        self._blocks = HeaderBlocks(read_call, settings.header_limit_bytes)
        self._connections: set[CallerConnection] = set()
        self._empty = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which matters when ``port`` is 0. Raises OSError when it is taken."""
        limit = self._settings.header_limit_bytes
        self._server = await self.loop.create_server(
            lambda: CallerConnection(self, self._blocks, limit), host, port, reuse_port=True, backlog=1024
        )
        self._sweeper = self.loop.call_later(_SWEEP_SECONDS, self._sweep)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def drain(self, limit_seconds: float) -> None:
        """Take nothing new, let the calls under way finish, for as long as the limit allows; then give up."""
        if self.draining:
            return
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.leave()
        await self._wait_until_empty(limit_seconds)
        late = TidegateError(ErrorKind.DRAINING, "this gateway instance is leaving; try again", retry_after_seconds=1.0)
        for connection in list(self._connections):
            connection.cut(late)
        await self._wait_until_empty(_CUT_SECONDS)
        for connection in list(self._connections):
            connection.abort()
        await self._wait_until_empty(_CUT_SECONDS)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.upstreams.close()

    @property
    def connections(self) -> int:
        """Open connections of callers."""
        return len(self._connections)

    # -- what connections and calls tell ------------------------------------------------------------------

    def opened(self, connection: CallerConnection) -> None:
        """A caller has connected."""
        self._connections.add(connection)
        if self.draining:
            connection.leave()

    def closed(self, connection: CallerConnection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def count(
        self, pool: str | None, status: int, own_error: ErrorKind | None, *, held_seconds: float, since: float
    ) -> None:
        """A call is over; ``since`` is the loop time at which it came."""
        self._observer.request_ended(
            pool=pool,
            protocol="grpc",
            status=status,
            own_error=own_error,
            held_seconds=held_seconds,
            total_seconds=self.loop.time() - since,
        )

    async def _wait_until_empty(self, limit_seconds: float) -> None:
        self._empty.clear()
        if not self._connections:
            return
        try:
            async with asyncio.timeout(limit_seconds):
                await self._empty.wait()
        except TimeoutError:
            pass

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in list(self._connections):
            connection.sweep(now, self._settings.idle_client_seconds)
        self.upstreams.sweep(now)
        self._sweeper = self.loop.call_later(_SWEEP_SECONDS, self._sweep)
