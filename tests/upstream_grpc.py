"""A scripted gRPC upstream in the test's process, behind a wire that can be cut and whose connections are counted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from wire.membership import ReplicaLease, ReplicaState

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass
class SeenCall:
    """One call as it came."""

    method: str
    metadata: dict[str, str | bytes]
    remaining_seconds: float | None
    messages: list[bytes] = field(default_factory=list)
    cancelled: bool = False
    ended: bool = False


Unary = Callable[[bytes, Any], Awaitable[bytes]]
Stream = Callable[[Any], Awaitable[None]]


async def echo(message: bytes, context: Any) -> bytes:
    return message


async def echo_stream(context: Any) -> None:
    """Each message back, until the caller has no more."""
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


class UpstreamGrpc:
    """See the module. ``unary`` and ``stream`` decide what is answered; change them at any time."""

    def __init__(self) -> None:
        self.unary: Unary = echo
        self.stream: Stream = echo_stream
        self.seen: list[SeenCall] = []
        self.wire = Wire()
        self._server: Any = None

    async def start(self) -> None:
        limit = 2**31 - 1
        options = [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]
        self._server = grpc.aio.server(handlers=(_Handler(self),), options=options)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        await self.wire.start(port)

    async def stop(self) -> None:
        await self.wire.stop()
        await self._server.stop(None)

    def lease(self, replica_id: str = "r1", *, models: tuple[str, ...] = ("ident", "slow")) -> ReplicaLease:
        """The lease of a ready replica that this is."""
        return ReplicaLease(
            id=replica_id,
            pool="vision",
            state=ReplicaState.READY,
            grpc_address=f"127.0.0.1:{self.wire.port}",
            models=models,
        )


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, upstream: UpstreamGrpc) -> None:
        self._upstream = upstream

    def service(self, details: Any) -> Any:
        call = SeenCall(details.method, dict(details.invocation_metadata), None)
        self._upstream.seen.append(call)

        async def unary(message: bytes, context: Any) -> bytes:
            call.messages.append(message)
            call.remaining_seconds = context.time_remaining()
            with _noting_cancellation(call):
                return await self._upstream.unary(message, context)

        async def stream(_: Any, context: Any) -> None:
            with _noting_cancellation(call):
                await self._upstream.stream(context)

        if details.method == STREAM:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


class _noting_cancellation:
    def __init__(self, call: SeenCall) -> None:
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._call.ended = True
        self._call.cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)


class Wire:
    """A TCP relay: what a replica looks like from outside when its machine loses power."""

    def __init__(self) -> None:
        self.port = 0
        self.opened = 0
        """Connections ever made."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def open(self) -> int:
        """Connections open now."""
        return len(self._writers)

    async def start(self, target: int) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.opened += 1
            self._writers.add(writer)
            try:
                there, back = await asyncio.open_connection("127.0.0.1", target)
                with suppress(OSError):
                    await asyncio.gather(_copy(reader, back), _copy(there, writer))
                back.close()
            finally:
                self._writers.discard(writer)
                writer.close()

        self._server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Accept no further connections; those that are open stay."""
        assert self._server is not None
        self._server.close()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def stop(self) -> None:
        self.refuse()
        self.cut()
        async with asyncio.timeout(2):
            while self._writers:
                await asyncio.sleep(0.01)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def running_upstream() -> AsyncIterator[UpstreamGrpc]:
    upstream = UpstreamGrpc()
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()
