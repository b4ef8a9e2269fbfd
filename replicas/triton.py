"""Talking to the replica's own Triton: health, model control, its exact words about itself.

Every call opens one connection and closes it: a connection that stays open would count as a request in flight
when the replica drains. Plain sockets, because this is on the path of every cold start and an HTTP library costs
half a second of it; gRPC is imported only when somebody asks for :meth:`Triton.grpc_messages`.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replicas.addresses import AttachAddresses
from wire.changes import Call, CallAnswer, CallProtocol

_SERVICE = "/inference.GRPCInferenceService/"


class TritonUnreachable(Exception):
    """Nobody answered, or not in HTTP."""


class TritonRefused(Exception):
    """Triton answered with an error: ``status`` (HTTP) and its sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer of Triton."""

    status: int
    body: bytes
    content_type: str | None


class Triton:
    """One Triton's HTTP and gRPC front ends."""

    def __init__(self, addresses: AttachAddresses) -> None:
        self.addresses = addresses

    async def live(self, limit_seconds: float = 2.0) -> bool:
        """Whether its front end answers at all."""
        try:
            return (await self._call("GET", "/v2/health/live", limit_seconds=limit_seconds)).status == 200
        except TritonUnreachable:
            return False

    async def model_ready(self, model: str) -> bool:
        """Whether ``model`` can serve. Server-wide readiness says something else (any model loading makes it false)."""
        return (await self._call("GET", f"/v2/models/{model}/ready", limit_seconds=5.0)).status == 200

    async def load(
        self, model: str, *, config: Mapping[str, Any] | None = None, files: Mapping[str, str] | None = None
    ) -> None:
        """Load ``model`` and return when it is ready; no time limit of its own.

        ``config`` replaces the repository's config.pbtxt; ``files`` (``<version>/<file>`` -> base64) replaces its
        directory.

        Raises:
            TritonRefused: it could not be loaded.
            TritonUnreachable: Triton went away.
        """
        parameters: dict[str, str] = {} if config is None else {"config": json.dumps(config)}
        parameters |= {f"file:{path}": content for path, content in (files or {}).items()}
        await self._ok("POST", f"/v2/repository/models/{model}/load", json.dumps({"parameters": parameters}).encode())

    async def unload(self, model: str) -> None:
        """Start unloading ``model``; what it has still to answer is answered."""
        await self._ok("POST", f"/v2/repository/models/{model}/unload", b"{}", limit_seconds=30.0)

    async def index(self) -> list[dict[str, str]]:
        """The repository's models: ``name``, and ``version``, ``state``, ``reason`` once loaded."""
        answer = await self._ok("POST", "/v2/repository/index", b"{}", limit_seconds=10.0)
        index: list[dict[str, str]] = json.loads(answer)
        return index

    async def infer(self, model: str, request: Mapping[str, Any], *, limit_seconds: float) -> dict[str, Any]:
        """One inference with JSON tensors: the answer's JSON."""
        answer = await self._ok("POST", f"/v2/models/{model}/infer", json.dumps(request).encode(), limit_seconds)
        result: dict[str, Any] = json.loads(answer)
        return result

    async def server_metadata(self) -> bytes:
        """The exact body of ``GET /v2``."""
        return await self._ok("GET", "/v2", limit_seconds=10.0)

    async def model_metadata(self, model: str) -> bytes:
        """The exact body of ``GET /v2/models/<model>``."""
        return await self._ok("GET", f"/v2/models/{model}", limit_seconds=10.0)

    async def model_config(self, model: str) -> bytes:
        """The exact body of ``GET /v2/models/<model>/config``."""
        return await self._ok("GET", f"/v2/models/{model}/config", limit_seconds=10.0)

    async def grpc_messages(self, calls: Sequence[tuple[str, str]]) -> list[bytes]:
        """The exact answers, serialised, of ``calls``: (RPC, model name or ""), over one connection.

        Raises:
            TritonUnreachable: Triton did not answer one of them.
        """
        import grpc
        import grpc.aio

        try:
            async with grpc.aio.insecure_channel(self.addresses.grpc) as channel:
                return [
                    bytes(await channel.unary_unary(_SERVICE + rpc)(_name_message(model), timeout=10.0))
                    for rpc, model in calls
                ]
        except grpc.aio.AioRpcError as error:
            raise TritonUnreachable(f"gRPC at {self.addresses.grpc}: {error.details()}") from error

    async def pass_on(self, call: Call, replica: str, limit_seconds: float) -> CallAnswer:
        """Triton's answer to an operator's call, whatever it is; ``replica`` is who says so."""
        try:
            if call.protocol is CallProtocol.HTTP:
                answer = await self._call("POST", call.target, call.body, limit_seconds)
                return CallAnswer(
                    replica=replica, status=answer.status, content_type=answer.content_type, body=answer.body
                )
            status, details, message = await self._grpc_call(call.target, call.body, limit_seconds)
        except TritonUnreachable as error:
            return CallAnswer(replica=replica, status=0, unreachable=str(error))
        return CallAnswer(replica=replica, status=status, details=details, body=message)

    async def _grpc_call(self, rpc: str, message: bytes, limit_seconds: float) -> tuple[int, str, bytes]:
        """Status, its words, and the serialised answer if the status is OK."""
        import grpc
        import grpc.aio

        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        try:
            async with grpc.aio.insecure_channel(self.addresses.grpc, options=options) as channel:
                return 0, "", bytes(await channel.unary_unary(_SERVICE + rpc)(message, timeout=limit_seconds))
        except grpc.aio.AioRpcError as error:
            ours = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if ours or not await self.live():
                raise TritonUnreachable(f"gRPC at {self.addresses.grpc}: {error.details()}") from error
            return error.code().value[0], error.details() or "", b""

    async def ready_models(self, known: Iterable[str]) -> list[str]:
        """The models that can serve: those of the index that are ready, and those of ``known`` that say so, for one
        that was loaded with files of its own is not in the index."""
        index = await self.index()
        listed = {entry["name"] for entry in index}
        ready = {entry["name"] for entry in index if entry.get("state") == "READY"}
        return sorted(ready | {model for model in set(known) - listed if await self.model_ready(model)})

    async def _ok(self, method: str, path: str, body: bytes = b"", limit_seconds: float | None = None) -> bytes:
        answer = await self._call(method, path, body, limit_seconds)
        if answer.status == 200:
            return answer.body
        try:
            message = str(json.loads(answer.body)["error"])
        except (ValueError, KeyError, TypeError):
            message = f"HTTP {answer.status}"
        raise TritonRefused(answer.status, message.strip())

    async def _call(self, method: str, path: str, body: bytes = b"", limit_seconds: float | None = None) -> Answer:
        address = self.addresses.http
        try:
            async with asyncio.timeout(limit_seconds):
                return await _exchange(address, method, path, body)
        except TimeoutError as error:
            raise TritonUnreachable(f"{address} did not answer within {limit_seconds:g} s") from error
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise TritonUnreachable(f"{address} did not answer: {error}") from error


def _name_message(name: str) -> bytes:
    """The request of each RPC asked here: a protobuf message whose field 1 is the string ``name`` (under 128 bytes)."""
    encoded = name.encode()
    return b"\x0a" + bytes([len(encoded)]) + encoded if encoded else b""


async def _exchange(address: str, method: str, path: str, body: bytes) -> Answer:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = headers.get("content-length")
        content = await reader.read() if length is None else await reader.readexactly(int(length))
        return Answer(status, content, headers.get("content-type"))
    except IndexError as error:
        raise ValueError("the answer is not HTTP") from error
    finally:
        writer.close()
