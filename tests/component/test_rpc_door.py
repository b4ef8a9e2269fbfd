"""The gRPC door against a scripted upstream, through real sockets."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2 as pb

from gateway.at_zero import AtZero
from gateway.ingress.rpc_door import GrpcDoor
from gateway.routing.pool import Pool
from gateway.settings import GatewaySettings
from tests.doors import Counted, HandRouter, pool_settings
from tests.upstream_grpc import UpstreamGrpc, running_upstream
from wire.errors import ERROR_KIND_HEADER, ErrorKind
from wire.membership import JOB_HEADER, ReplicaLease, ReplicaState

SERVICE = "/inference.GRPCInferenceService/"


@dataclass
class Door:
    door: GrpcDoor
    router: HandRouter
    counted: Counted
    channel: Any
    port: int

    @property
    def pool(self) -> Pool:
        return self.router.pools["vision"]

    def call(self, method: str, message: bytes, **how: Any) -> Any:
        path = method if method.startswith("/") else SERVICE + method
        return self.channel.unary_unary(path)(message, **how)

    def stream(self, **how: Any) -> Any:
        return self.channel.stream_stream(SERVICE + "ModelStreamInfer")(**how)


@asynccontextmanager
async def running_door(
    *leases: ReplicaLease, settings: dict[str, Any] | None = None, **routing: Any
) -> AsyncIterator[Door]:
    router = HandRouter({"vision": pool_settings(**routing)})
    router.pools["vision"].update(leases)
    counted = Counted()
    door = GrpcDoor(router, GatewaySettings(**(settings or {})), AtZero(router), counted)
    port = await door.start("127.0.0.1", 0)
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
        try:
            yield Door(door, router, counted, channel, port)
        finally:
            await door.drain(0.2)


@pytest.fixture
async def upstream() -> AsyncIterator[UpstreamGrpc]:
    async with running_upstream() as running:
        yield running


def infer(model: str = "ident", **more: Any) -> bytes:
    return bytes(pb.ModelInferRequest(model_name=model, **more).SerializeToString())


async def until(condition: Any, seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def own_kind(error: Any) -> str | None:
    return dict(error.trailing_metadata()).get(ERROR_KIND_HEADER)


async def test_bytes_metadata_and_trailers_pass_unchanged(upstream: UpstreamGrpc) -> None:
    async def answer(message: bytes, context: Any) -> bytes:
        await context.send_initial_metadata((("before", "1"),))
        context.set_trailing_metadata((("after", "2"), ("raw-bin", b"\x00\xff")))
        return message[::-1]

    upstream.unary = answer
    body = infer(raw_input_contents=[bytes(range(256)) * 40_000])  # 10 MB: over gRPC's own default limits
    async with running_door(upstream.lease()) as door:
        call = door.call("ModelInfer", body, metadata=(("x-trace", "abc"), (JOB_HEADER, "7-0")))
        assert await call == body[::-1]
        assert dict(await call.initial_metadata()) == {"before": "1"}
        assert dict(await call.trailing_metadata()) == {"after": "2", "raw-bin": b"\x00\xff"}
        assert upstream.seen[0].method == SERVICE + "ModelInfer"
        assert upstream.seen[0].metadata["x-trace"] == "abc"
        assert JOB_HEADER not in upstream.seen[0].metadata
        assert upstream.seen[0].messages == [body]
        assert door.pool.in_flight == 0
        told = door.counted.requests[0]
        assert (told["pool"], told["protocol"], told["status"], told["own_error"]) == ("vision", "grpc", 0, None)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT])
async def test_a_status_of_the_replica_passes_unchanged(upstream: UpstreamGrpc, code: grpc.StatusCode) -> None:
    """Also UNAVAILABLE, which is Triton's word for a full queue and not a lost replica."""

    async def refuse(message: bytes, context: Any) -> bytes:
        await context.abort(code, "Exceeds maximum queue size é", (("why", "full"),))

    upstream.unary = refuse
    async with running_door(upstream.lease()) as door:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.call("ModelInfer", infer())
        assert caught.value.code() is code
        assert caught.value.details() == "Exceeds maximum queue size é"
        told = dict(caught.value.trailing_metadata())
        # With a full queue on the only replica the gateway says when to come back, and changes nothing else.
        assert (told.pop("retry-after", "none") != "none") == (code is grpc.StatusCode.UNAVAILABLE)
        assert told == {"why": "full"}
        assert door.pool.in_flight == 0


async def test_deadline_is_passed_on_as_what_remains(upstream: UpstreamGrpc) -> None:
    async def hang(message: bytes, context: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    upstream.unary = hang
    async with running_door(upstream.lease()) as door:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.call("ModelInfer", infer(), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        remaining = upstream.seen[0].remaining_seconds
        assert remaining is not None and 0.1 < remaining <= 0.5
        await until(lambda: upstream.seen[0].cancelled and door.pool.in_flight == 0)


async def test_cancelling_reaches_the_replica(upstream: UpstreamGrpc) -> None:
    async def hang(message: bytes, context: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    upstream.unary = hang
    async with running_door(upstream.lease()) as door:
        call = door.call("ModelInfer", infer())
        await until(lambda: upstream.seen)
        call.cancel()
        await until(lambda: upstream.seen[0].cancelled and door.pool.in_flight == 0)
        assert door.counted.requests[0]["status"] == 1


async def test_a_request_in_flight_on_a_lost_replica_is_answered(upstream: UpstreamGrpc) -> None:
    async def hang(message: bytes, context: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    upstream.unary = hang
    async with running_door(upstream.lease()) as door:
        call = door.call("ModelInfer", infer())
        await until(lambda: upstream.seen)
        upstream.wire.cut()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert own_kind(caught.value) == ErrorKind.REPLICA_LOST
        upstream.unary = lambda message, context: asyncio.sleep(0, message)
        assert await door.call("ModelInfer", infer()) == infer()


async def test_what_did_not_reach_a_replica_goes_to_another(upstream: UpstreamGrpc) -> None:
    async with running_upstream() as gone, running_door(gone.lease("gone"), upstream.lease("there")) as door:
        assert await door.call("ModelInfer", infer()) == infer()
        await gone.stop()
        for _ in range(6):
            assert await door.call("ModelInfer", infer()) == infer()
        assert door.pool.in_flight == 0
        await gone.start()


async def test_unreachable_replicas_answer_within_the_hold_limit() -> None:
    async with running_upstream() as gone:
        lease = gone.lease()
    async with running_door(lease, hold_limit_seconds=1.5) as door:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.call("ModelInfer", infer())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert own_kind(caught.value) == ErrorKind.NO_REPLICA
        assert int(dict(caught.value.trailing_metadata())["retry-after"]) >= 1


async def test_held_at_zero_until_a_replica_is_ready(upstream: UpstreamGrpc) -> None:
    """A-039: the first request waits and succeeds."""
    async with running_door() as door:
        call = asyncio.ensure_future(_awaited(door.call("ModelInfer", infer())))
        await until(lambda: door.pool.held == 1)
        assert door.router.wanted == ["vision"]
        door.pool.update([upstream.lease()])
        assert await call == infer()
        assert door.counted.requests[0]["held_seconds"] > 0


async def test_holding_switched_off_refuses_at_once() -> None:
    """A-039: with holding off, UNAVAILABLE with the time after which a retry works."""
    async with running_door(hold_limit_seconds=0) as door:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.call("ModelInfer", infer())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata())["retry-after"] == "15"


async def test_a_cancelled_held_request_leaves_the_queue() -> None:
    async with running_door() as door:
        call = door.call("ModelInfer", infer())
        await until(lambda: door.pool.held == 1)
        call.cancel()
        await until(lambda: door.pool.held == 0)


async def test_connections_close_when_the_replica_drains(upstream: UpstreamGrpc) -> None:
    release = asyncio.Event()

    async def wait(message: bytes, context: Any) -> bytes:
        await release.wait()
        return message

    upstream.unary = wait
    async with running_door(upstream.lease()) as door:
        call = asyncio.ensure_future(_awaited(door.call("ModelInfer", infer())))
        await until(lambda: upstream.seen)
        door.pool.update([upstream.lease().model_copy(update={"state": ReplicaState.DRAINING})])
        await asyncio.sleep(0.1)
        assert upstream.wire.open == 1  # its request is still on it
        release.set()
        assert await call == infer()
        await until(lambda: upstream.wire.open == 0)


async def test_stream_goes_both_ways_and_ends(upstream: UpstreamGrpc) -> None:
    async with running_door(upstream.lease()) as door:
        call = door.stream(metadata=(("triton_grpc_error", "true"),))
        for number in range(5):
            message = infer(id=str(number))
            await call.write(message)
            assert await call.read() == message
        assert door.pool.in_flight == 1
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert upstream.seen[0].metadata["triton_grpc_error"] == "true"
        await until(lambda: door.pool.in_flight == 0)


async def test_unknown_model_on_a_stream_is_answered_in_the_stream(upstream: UpstreamGrpc) -> None:
    async with running_door(upstream.lease()) as door:
        call = door.stream()
        await call.write(infer("nope", id="a"))
        answer = pb.ModelStreamInferResponse.FromString(await call.read())
        assert answer.error_message == "Request for unknown model: 'nope' is not found"
        assert answer.infer_response.id == "a"
        await call.write(infer())
        assert await call.read() == infer()
        call.cancel()


async def test_a_stream_ends_when_its_replica_drains(upstream: UpstreamGrpc) -> None:
    """What the replica still had to answer comes through first."""

    async def late(context: Any) -> None:
        messages = []
        while (message := await context.read()) is not grpc.aio.EOF:
            messages.append(message)
        for message in messages:
            await context.write(message)

    upstream.stream = late
    async with running_door(upstream.lease()) as door:
        call = door.stream()
        await call.write(infer(id="1"))
        await until(lambda: upstream.seen)
        await asyncio.sleep(0.05)
        door.pool.update([])
        assert await call.read() == infer(id="1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert own_kind(caught.value) == ErrorKind.DRAINING
        await until(lambda: upstream.wire.open == 0 and door.pool.in_flight == 0)


async def test_cancelling_a_stream_reaches_the_replica(upstream: UpstreamGrpc) -> None:
    async with running_door(upstream.lease()) as door:
        call = door.stream()
        await call.write(infer())
        await call.read()
        call.cancel()
        await until(lambda: upstream.seen[0].ended and door.pool.in_flight == 0)


async def test_a_stream_on_a_lost_replica_ends(upstream: UpstreamGrpc) -> None:
    async with running_door(upstream.lease()) as door:
        call = door.stream()
        await call.write(infer())
        await call.read()
        upstream.wire.cut()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert own_kind(caught.value) == ErrorKind.REPLICA_LOST


async def test_what_the_gateway_answers_itself(upstream: UpstreamGrpc) -> None:
    """A-043: health and readiness have an answer at zero, and asking wakes nothing."""
    async with running_door() as door:
        assert pb.ServerLiveResponse.FromString(await door.call("ServerLive", b"")).live
        assert pb.ServerReadyResponse.FromString(await door.call("ServerReady", b"")).ready
        assert await door.call("/grpc.health.v1.Health/Check", b"") == b"\x08\x01"
        ask = pb.ModelReadyRequest(name="ident").SerializeToString()
        assert pb.ModelReadyResponse.FromString(await door.call("ModelReady", ask)).ready
        ask = pb.ModelReadyRequest(name="nope").SerializeToString()
        assert not pb.ModelReadyResponse.FromString(await door.call("ModelReady", ask)).ready
        index = pb.RepositoryIndexResponse.FromString(await door.call("RepositoryIndex", b""))
        assert [(model.name, model.state) for model in index.models] == [("ident", "READY"), ("slow", "READY")]
        assert door.router.wanted == []


@pytest.mark.parametrize(
    ("method", "message", "code", "words"),
    [
        ("ModelInfer", infer("nope"), grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nope' is not found"),
        ("ModelInfer", b"", grpc.StatusCode.NOT_FOUND, "Request for unknown model: '' is not found"),
        ("ModelInfer", b"\xff\xff\xff", grpc.StatusCode.NOT_FOUND, "unknown model"),
        ("RepositoryModelLoad", b"", grpc.StatusCode.UNIMPLEMENTED, "pool's settings"),
        ("SystemSharedMemoryRegister", b"", grpc.StatusCode.UNIMPLEMENTED, "shared memory"),
        ("CudaSharedMemoryStatus", b"", grpc.StatusCode.UNIMPLEMENTED, "shared memory"),
        ("Nonsense", b"", grpc.StatusCode.UNIMPLEMENTED, ""),
        ("ModelStatistics", b"\x0a\x04nope", grpc.StatusCode.INVALID_ARGUMENT, "requested model 'nope'"),
    ],
)
async def test_refusals(method: str, message: bytes, code: grpc.StatusCode, words: str) -> None:
    async with running_door() as door:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.call(method, message)
        assert caught.value.code() is code
        assert words in (caught.value.details() or "")


async def test_a_message_over_the_limit_is_refused(upstream: UpstreamGrpc) -> None:
    """A-007 (gRPC)."""
    async with running_door(upstream.lease(), settings={"body_limit_bytes": 1 << 20}) as door:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.call("ModelInfer", infer(raw_input_contents=[bytes(2 << 20)]))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        upstream.unary = lambda message, context: asyncio.sleep(0, bytes(2 << 20))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.call("ModelInfer", infer())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert door.pool.in_flight == 0


async def test_drain_finishes_what_is_under_way(upstream: UpstreamGrpc) -> None:
    async def wait(message: bytes, context: Any) -> bytes:
        await asyncio.sleep(0.4)
        return message

    upstream.unary = wait
    async with running_door(upstream.lease()) as door:
        call = asyncio.ensure_future(_awaited(door.call("ModelInfer", infer())))
        await until(lambda: upstream.seen)
        await door.door.drain(5.0)
        assert await call == infer()
        await until(lambda: upstream.wire.open == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.call("ModelInfer", infer())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_taken_port_is_an_os_error() -> None:
    async with running_door() as door:
        other = GrpcDoor(door.router, GatewaySettings(), AtZero(door.router), Counted())
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with server:
            with pytest.raises(OSError, match="bind"):
                await other.start("127.0.0.1", server.sockets[0].getsockname()[1])
        await other.drain(0)


async def test_the_stock_clients_work(upstream: UpstreamGrpc) -> None:
    """tritonclient.grpc, sync and aio, with compression, a stream and keep-alive pings."""

    async def infer_answer(message: bytes, context: Any) -> bytes:
        return _answer(message).SerializeToString()

    async def stream_answer(context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(pb.ModelStreamInferResponse(infer_response=_answer(message)).SerializeToString())

    upstream.unary, upstream.stream = infer_answer, stream_answer
    values = np.arange(8, dtype=np.float32)
    async with running_door(upstream.lease()) as door:
        url = f"127.0.0.1:{door.port}"
        async with triton_aio.InferenceServerClient(url) as client:
            for algorithm in (None, "gzip", "deflate"):
                result = await client.infer("ident", [_input(triton_aio, values)], compression_algorithm=algorithm)
                assert np.array_equal(result.as_numpy("OUTPUT0"), values)
        assert await asyncio.to_thread(_use_sync_client, url, values) == [values.tolist()] * 3


def _use_sync_client(url: str, values: Any) -> list[Any]:
    keepalive = triton.KeepAliveOptions(
        keepalive_time_ms=10_000, keepalive_permit_without_calls=True, http2_max_pings_without_data=0
    )
    answers: list[Any] = []
    with triton.InferenceServerClient(url, keepalive_options=keepalive) as client:
        answers.append(client.infer("ident", [_input(triton, values)]).as_numpy("OUTPUT0").tolist())
        client.start_stream(lambda result, error: answers.append(error or result.as_numpy("OUTPUT0").tolist()))
        for _ in range(2):
            client.async_stream_infer("ident", [_input(triton, values)])
        client.stop_stream()
    return answers


def _input(library: Any, values: Any) -> Any:
    tensor = library.InferInput("INPUT0", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    return tensor


def _answer(message: bytes) -> Any:
    request = pb.ModelInferRequest.FromString(message)
    output = pb.ModelInferResponse.InferOutputTensor(name="OUTPUT0", datatype="FP32", shape=[8])
    return pb.ModelInferResponse(
        model_name="ident", id=request.id, outputs=[output], raw_output_contents=request.raw_input_contents
    )


async def _awaited(call: Iterable[Any]) -> Any:
    return await call  # type: ignore[misc]
