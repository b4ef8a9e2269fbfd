"""The gRPC door: every method of Triton's service, tensors never decoded.

Who answers which method is in docs/protocol-grpc.md. Where a message names a model, routing reads that one field.
"""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import grpc

from gateway.ingress.protobuf import first_string
from gateway.ingress.rpc_exchange import Exchanges, Passage, UpstreamStatusError, error_metadata, head_of, stream_error
from gateway.ingress.rpc_upstream import LONGEST_MESSAGE_BYTES, Upstreams
from gateway.routing.pool import Pool
from gateway.settings import GatewaySettings
from gateway.telemetry import Observer
from wire.errors import ERROR_KIND_HEADER, ErrorKind, TidegateError

log = logging.getLogger(__name__)

_SERVICE = "/inference.GRPCInferenceService/"
_HEALTH = "/grpc.health.v1.Health/Check"

#: {live: true}, {ready: true} and {status: SERVING} are the same two bytes.
_YES = b"\x08\x01"
_OWN = frozenset(("ServerLive", "ServerReady"))
_STREAM = "ModelStreamInfer"
#: Answered from memory while no replica is ready, so that asking for them does not wake a pool.
_AT_ZERO = frozenset(("ServerMetadata", "RepositoryIndex", "ModelMetadata", "ModelConfig", "ModelReady"))
#: Methods that a replica answers, with the field that names the model (None: the server as a whole).
_MODEL_FIELD: dict[str, int | None] = {
    "ModelInfer": 1,
    "ModelReady": 1,
    "ModelMetadata": 1,
    "ModelConfig": 1,
    "ModelStatistics": 1,
    "TraceSetting": 2,
    "ServerMetadata": None,
    "RepositoryIndex": None,
    "LogSettings": None,
}
_CONTROL = "models are loaded and unloaded by their pool's settings, not through the gateway"
_SHARED_MEMORY = "shared memory is not supported: a caller and a replica need not be on one machine"
_REFUSED = {
    "RepositoryModelLoad": _CONTROL,
    "RepositoryModelUnload": _CONTROL,
    **{
        f"{kind}SharedMemory{action}": _SHARED_MEMORY
        for kind in ("System", "Cuda")
        for action in ("Status", "Register", "Unregister")
    },
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Pools(Protocol):
    """The pools of this gateway instance; gateway.routing.router.Router is one."""

    @property
    def pools(self) -> Mapping[str, Pool]: ...

    def pool_of(self, model: str) -> Pool: ...


class AtZero(Protocol):
    """What a pool answers about itself while it has no ready replica."""

    def grpc(self, method: str, message: bytes) -> bytes | None:
        """The serialised response; None when it is not known here."""


class GrpcDoor:
    """See the module. One instance serves one listening port."""

    def __init__(self, router: Pools, settings: GatewaySettings, at_zero: AtZero, observer: Observer) -> None:
        self._router = router
        self._settings = settings
        self._at_zero = at_zero
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._upstreams = Upstreams(router.pools.values(), settings)
        self._exchanges = Exchanges(self._upstreams)
        self._leaving = asyncio.Event()
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which matters when ``port`` is 0. Raises OSError when it is taken."""
        limit = min(self._settings.body_limit_bytes, LONGEST_MESSAGE_BYTES)
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.max_metadata_size", self._settings.header_limit_bytes),
            ("grpc.so_reuseport", 1),
            # Callers may ping as often as they like, also between calls: it costs nothing here.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.aio.server(handlers=(_Methods(self),), options=options)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(errno.EADDRINUSE, str(error)) from error
        await self._server.start()
        return bound

    async def drain(self, limit_seconds: float) -> None:
        """Take nothing new, let the calls under way finish, for as long as the limit allows; then give up."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        if self._server is not None:
            await self._server.stop(limit_seconds)
        await self._upstreams.close()

    # -- calls --------------------------------------------------------------------------------------------

    async def answer(self, path: str, message: bytes, context: Any) -> bytes:
        """The response to a unary call."""
        passage = Passage(self._loop.time())
        response: bytes = await self._finish(self._answer(path, message, context, passage), context, passage)
        return response

    async def stream(self, _: Any, context: Any) -> None:
        """Serve a two-way stream."""
        passage = Passage(self._loop.time())
        await self._finish(self._stream(context, passage), context, passage)

    async def _answer(self, path: str, message: bytes, context: Any, passage: Passage) -> bytes:
        method = path.removeprefix(_SERVICE)
        if path == _HEALTH or method in _OWN:
            return _YES
        if method in _REFUSED:
            raise TidegateError(ErrorKind.NOT_SUPPORTED, _REFUSED[method])
        field = _MODEL_FIELD[method]
        model = (first_string(message, field) or None) if field is not None else None
        if field == 1 and model is None and method != "ModelStatistics":
            model = ""  # no name at all: unknown, as in Triton
        pool = passage.pool = self._pool_for(method, model)
        if pool is None:
            return b""  # ModelReady of an unknown model: ready = false
        if method in _AT_ZERO and not pool.has_ready_replica:
            known = self._at_zero.grpc(method, message)
            if known is not None:
                return known
            if method == "ModelReady":
                return b""  # a version of which nothing is known yet: asking whether it is ready wakes nothing
        head = head_of(model, context, passage.began)
        return await self._exchanges.unary(path, message, context, head, passage)

    async def _stream(self, context: Any, passage: Passage) -> None:
        while (first := await context.read()) is not grpc.aio.EOF:
            try:
                passage.pool = self._router.pool_of(first_string(first, 1) or "")
            except TidegateError as error:
                await context.write(stream_error(first, error.message))  # as Triton: the stream goes on
                continue
            head = head_of(first_string(first, 1), context, passage.began)
            path = _SERVICE + _STREAM
            await self._exchanges.stream(path, first, context, head, passage, self._leaving)
            return

    def _pool_for(self, method: str, model: str | None) -> Pool | None:
        """The pool of a model, or None where that is the answer; for the server as a whole any pool with a ready
        replica, else the first. Raises TidegateError."""
        if model is None:
            pools = self._router.pools.values()
            return next((pool for pool in pools if pool.has_ready_replica), next(iter(pools)))
        try:
            return self._router.pool_of(model)
        except TidegateError:
            if method == "ModelReady":
                return None
            if method == "ModelStatistics":
                message = f"requested model '{model}' is not available"
                raise TidegateError(ErrorKind.BAD_REQUEST, message) from None
            raise

    async def _finish(self, work: Awaitable[Any], context: Any, passage: Passage) -> Any:
        """Await ``work``, count it, and end the call with the status that belongs to what it raised."""
        try:
            result = await work
            self._count(passage, grpc.StatusCode.OK, None)
            return result
        except UpstreamStatusError as error:
            code, details, trailing = error.code, error.details, error.trailing
            self._count(passage, code, None)
        except TidegateError as error:
            code, details, trailing = _CODES[error.row.grpc], error.message, error_metadata(error, ERROR_KIND_HEADER)
            self._count(passage, code, error.kind)
        except asyncio.CancelledError:
            self._count(passage, grpc.StatusCode.CANCELLED, None)
            raise
        except Exception:
            log.exception("event=rpc-failed")
            fault = TidegateError(ErrorKind.INTERNAL, "the gateway failed on this request; its log has the reason")
            code, details, trailing = _CODES[fault.row.grpc], fault.message, error_metadata(fault, ERROR_KIND_HEADER)
            self._count(passage, code, fault.kind)
        await context.abort(code, details, trailing)

    def _count(self, passage: Passage, code: grpc.StatusCode, own_error: ErrorKind | None) -> None:
        self._observer.request_ended(
            pool=None if passage.pool is None else passage.pool.name,
            protocol="grpc",
            status=code.value[0],
            own_error=own_error,
            held_seconds=passage.held_seconds,
            total_seconds=self._loop.time() - passage.began,
        )


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Which handler a path has; paths that Triton does not have get none (UNIMPLEMENTED)."""

    def __init__(self, door: GrpcDoor) -> None:
        self._door = door

    def service(self, details: Any) -> Any:
        path: str = details.method
        if path == _SERVICE + _STREAM:
            return grpc.stream_stream_rpc_method_handler(self._door.stream)
        method = path.removeprefix(_SERVICE)
        known = path.startswith(_SERVICE) and (method in _OWN or method in _REFUSED or method in _MODEL_FIELD)
        return grpc.unary_unary_rpc_method_handler(_bound(self._door, path)) if known or path == _HEALTH else None


def _bound(door: GrpcDoor, path: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def handle(message: bytes, context: Any) -> bytes:
        return await door.answer(path, message, context)

    return handle
