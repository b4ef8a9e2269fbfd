"""The HTTP door: listens, decides what becomes of each request, drains.

What a request says of itself is its first line and a few headers; bodies are passed on unread. The table of
endpoints and who answers them is in docs/protocol.md.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from gateway.access import Access
from gateway.ingress.callers import Callers
from gateway.ingress.heads import is_batch, tenant_of
from gateway.ingress.http_body import too_large
from gateway.ingress.http_connection import ClientConnection, OwnAnswer
from gateway.ingress.http_exchange import Exchange
from gateway.ingress.http_operation import HttpOperation
from gateway.ingress.http_routes import Endpoint, Route, path_of, route
from gateway.ingress.http_wire import Request, error_body
from gateway.ingress.upstream import Upstreams
from gateway.pool_wide.operations import Operation
from gateway.pool_wide.service import PoolWide
from gateway.routing.pool import Pool, RequestHead
from gateway.settings import GatewaySettings
from gateway.telemetry import Observer
from gateway.tls import HTTP, ServerTls
from wire.errors import ErrorKind, TidegateError
from wire.membership import TIMEOUT_HEADER

#: How often idle connections are looked for, and callers that left while they were not read. Seconds.
_SWEEP_SECONDS = 0.5
_LONGEST_TIMEOUT_MS = 10**12

_TEXT = [(b"Content-Type", b"text/plain")]
_JSON = [(b"Content-Type", b"application/json")]
_OK: OwnAnswer = (200, _TEXT, b"")
_NOT_READY: OwnAnswer = (400, _TEXT, error_body("Model version not ready"))

#: Answered from memory while no replica is ready, so that asking for them does not wake a pool.
_AT_ZERO = frozenset(
    (Endpoint.SERVER_METADATA, Endpoint.INDEX, Endpoint.MODEL_METADATA, Endpoint.MODEL_CONFIG, Endpoint.MODEL_READY)
)
_REFUSED = {
    Endpoint.REPOSITORY_CONTROL: "models are loaded and unloaded by their pool's settings, not through the gateway",
    Endpoint.SHARED_MEMORY: "shared memory is not supported: a caller and a replica need not be on one machine",
}


class Pools(Protocol):
    """The pools of this gateway instance; gateway.routing.router.Router is one."""

    @property
    def pools(self) -> Mapping[str, Pool]: ...

    def pool_of(self, model: str) -> Pool: ...


class AtZero(Protocol):
    """What a pool answers about itself while it has no ready replica."""

    def http(self, method: str, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
        """Status, headers and body; None when it is not known here."""


class HttpDoor:
    """See the module. One instance serves one listening port."""

    def __init__(
        self,
        pools: Pools,
        settings: GatewaySettings,
        at_zero: AtZero,
        observer: Observer,
        pool_wide: PoolWide | None = None,
    ) -> None:
        """Without ``pool_wide``, what concerns all replicas of a pool is refused, or answered by one of them."""
        self._pools = pools
        self._pool_wide = pool_wide
        self._settings = settings
        self._at_zero = at_zero
        self._observer = observer
        self._access = Access(settings.api_keys)
        self._tls = None if settings.tls.certificate is None else ServerTls(settings.tls, HTTP)
        self._loop = asyncio.get_running_loop()
        self.header_limit_bytes = settings.header_limit_bytes
        self.body_limit_bytes = settings.body_limit_bytes
        self.callers: Callers[ClientConnection] = Callers()
        self.upstreams = Upstreams(
            pools.pools.values(),
            connect_timeout_seconds=settings.connect_timeout_seconds,
            idle_seconds=settings.idle_upstream_seconds,
            answer_limit_bytes=settings.body_limit_bytes,
        )
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, reuse_port: bool = True) -> int:
        """Listen; returns the port, which matters when ``port`` is 0. Raises OSError when it is taken."""
        tls = None if self._tls is None else self._tls.context
        self._server = await self._loop.create_server(
            lambda: ClientConnection(self), host, port, reuse_port=reuse_port, backlog=1024, ssl=tls
        )
        self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def drain(self, limit_seconds: float) -> None:
        """Take nothing new, let the requests under way finish, for as long as the limit allows; then give up."""
        if self._server is not None:
            self._server.close()
        await self.callers.drain(limit_seconds)
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.upstreams.close()

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in self.callers:
            connection.sweep(now, self._settings.idle_client_seconds, self._settings.body_stall_seconds)
        self.upstreams.sweep(now)
        if self._tls is not None:
            self._tls.reload_if_changed()
        self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    # -- requests -----------------------------------------------------------------------------------------

    def begin(self, request: Request, caller: ClientConnection) -> Exchange | HttpOperation | OwnAnswer:
        """What becomes of a request: an exchange, to be started, or the answer. Raises TidegateError."""
        asked = self._asked(request)
        if asked.endpoint is Endpoint.LIVE or asked.endpoint is Endpoint.READY:
            return _OK
        tenant = self._access.tenant(request.authorization, operator=asked.for_operators)
        if asked.operation is not None:
            operation = self._operation(request, asked, asked.operation, caller)
            if operation is not None:
                return operation
        pool = self._pool_for(asked)
        if pool is None:
            return _unknown_model(asked)
        if asked.endpoint in _AT_ZERO and not pool.has_ready_replica:
            own = self._answer_at_zero(asked, request)
            if own is not None:
                return own
        model = asked.model
        if model in pool.unloaded or asked.endpoint is Endpoint.MODEL_READY:
            model = _model_that_answers(asked, pool)
        deadline = _deadline(request.timeout_ms, self._loop.time())
        runs_model = asked.endpoint is Endpoint.INFER or asked.endpoint is Endpoint.GENERATE
        head = RequestHead(
            model,
            deadline,
            request.job,
            runs_model,
            batch=is_batch(job=request.job, declared=request.declared_class),
            tenant=tenant_of(pool, tenant, request.tenant),
            body_bytes=max(0, request.body_bytes),
        )
        return Exchange(request, head, pool, caller=caller, upstreams=self.upstreams, ledger=self, loop=self._loop)

    def count(
        self, pool: str | None, status: int, own_error: ErrorKind | None, *, held_seconds: float, since: float
    ) -> None:
        """A request is over; ``since`` is the ``time.perf_counter()`` at which it came."""
        self._observer.request_ended(
            pool=pool,
            protocol="http",
            status=status,
            own_error=own_error,
            held_seconds=held_seconds,
            total_seconds=time.perf_counter() - since,
        )

    def _asked(self, request: Request) -> Route:
        """What a request is for. Raises TidegateError."""
        if request.expectation not in (b"", b"100-continue"):
            raise TidegateError(ErrorKind.BAD_REQUEST, "the only expectation met here is 100-continue")
        if request.body_bytes > self.body_limit_bytes:
            raise too_large(self.body_limit_bytes)
        asked = route(request.target)
        if asked is None:
            raise TidegateError(ErrorKind.NOT_FOUND, "Not Found")
        if request.method not in asked.methods:
            raise TidegateError(ErrorKind.METHOD_NOT_ALLOWED, "Method Not Allowed")
        return asked

    def _operation(
        self, request: Request, asked: Route, operation: Operation, caller: ClientConnection
    ) -> HttpOperation | None:
        """What concerns all replicas of a pool; None where one of them can answer. Raises TidegateError."""
        pool_wide = self._pool_wide
        if pool_wide is None:
            refusal = _REFUSED.get(asked.endpoint)
            if refusal is not None:
                raise TidegateError(ErrorKind.NOT_SUPPORTED, refusal)
            return None
        pool_wide.check(operation)
        changes = operation.change is not None and request.method == b"POST"
        if pool_wide.is_for_one(operation, asked.model, changes=changes):
            return None
        deadline = _deadline(request.timeout_ms, self._loop.time())
        return HttpOperation(
            request, asked, operation, deadline=deadline, caller=caller, pool_wide=pool_wide, ledger=self
        )

    def _pool_for(self, asked: Route) -> Pool | None:
        """The pool of a model, or None where Triton words its absence in its own way; for the server as a whole
        any pool with a ready replica, else the first."""
        if asked.model is None:
            pools = self._pools.pools.values()
            return next((pool for pool in pools if pool.has_ready_replica), next(iter(pools)))
        try:
            return self._pools.pool_of(asked.model)
        except TidegateError:
            if asked.endpoint in (Endpoint.MODEL_READY, Endpoint.MODEL_STATS, Endpoint.SETTINGS):
                return None
            raise

    def _answer_at_zero(self, asked: Route, request: Request) -> OwnAnswer | None:
        own = self._at_zero.http(request.method.decode(), path_of(request.target).decode("latin-1"))
        if own is None and asked.endpoint is Endpoint.MODEL_READY:
            # Asking whether a model is ready never wakes it. It can be served; of its versions nothing is known.
            return _NOT_READY if asked.versioned else _OK
        return own


def _model_that_answers(asked: Route, pool: Pool) -> str | None:
    """The model that a replica must have to answer; None where any replica may say that it has not got the one asked
    for: readiness neither waits nor wakes. Raises TidegateError."""
    model = asked.model
    if model in pool.unloaded:
        return pool.who_answers_for(model)
    return model if pool.has_ready_replica_for(model) else None


def _unknown_model(asked: Route) -> OwnAnswer:
    if asked.endpoint is Endpoint.MODEL_STATS:
        return 400, _JSON, error_body(f"requested model '{asked.model}' is not available")
    if asked.endpoint is Endpoint.SETTINGS:
        return 400, _JSON, error_body(f"Request for unknown model : {asked.model}")
    return _NOT_READY


def _deadline(timeout_ms: bytes | None, now: float) -> float | None:
    """Loop time at which the caller's patience ends. Raises BAD_REQUEST."""
    if timeout_ms is None:
        return None
    if not timeout_ms.isdigit() or len(timeout_ms) > 15 or not 0 < int(timeout_ms) <= _LONGEST_TIMEOUT_MS:
        raise TidegateError(ErrorKind.BAD_REQUEST, f"{TIMEOUT_HEADER} must be a whole number of milliseconds above 0")
    return now + int(timeout_ms) / 1000
