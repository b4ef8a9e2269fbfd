"""The gRPC door in front of a real Triton: the same bytes as without it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb

from gateway.at_zero import AtZero
from gateway.ingress.rpc_door import GrpcDoor
from gateway.settings import GatewaySettings
from tests.doors import Counted, HandRouter, pool_settings
from tests.triton import running_triton
from wire.membership import ReplicaLease, ReplicaState

SERVICE = "/inference.GRPCInferenceService/"


@dataclass
class Pair:
    """Triton itself and the gateway before it."""

    direct: Any
    through: Any
    url: str
    router: HandRouter


@asynccontextmanager
async def pair(repository: Path, run_dir: Path) -> AsyncIterator[Pair]:
    async with running_triton(repository, ["ident", "batched"], run_dir) as addresses:
        router = HandRouter({"vision": pool_settings(("ident", "batched"))})
        lease = ReplicaLease(
            id="r1", pool="vision", state=ReplicaState.READY, grpc_address=addresses.grpc, models=("ident", "batched")
        )
        router.pools["vision"].update([lease])
        door = GrpcDoor(router, GatewaySettings(), AtZero(router), Counted())
        url = f"127.0.0.1:{await door.start('127.0.0.1', 0)}"
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with (
            grpc.aio.insecure_channel(addresses.grpc, options=unlimited) as direct,
            grpc.aio.insecure_channel(url, options=unlimited) as through,
        ):
            try:
                yield Pair(direct, through, url, router)
            finally:
                await door.drain(0.5)


def _infer(values: Any, model: str = "ident", **more: Any) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=list(values.shape))
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[values.tobytes()], **more)


async def _outcome(channel: Any, method: str, message: Any) -> Any:
    try:
        return await channel.unary_unary(SERVICE + method)(message.SerializeToString())
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


async def test_answers_equal_those_of_triton(echo_repository: Path, tmp_path: Path) -> None:
    """A-006: also 33 MB out; errors of Triton keep code and words."""
    small = np.arange(16, dtype=np.float32)
    cases: list[tuple[str, Any]] = [
        ("ModelInfer", _infer(small, id="abc")),
        ("ModelInfer", _infer(np.zeros(43 * 3 * 65536, dtype=np.float32))),
        ("ModelInfer", _infer(small, model_version="7")),
        ("ModelInfer", _infer(small.astype(np.float64))),
        ("ModelInfer", _infer(small, model="nope")),
        ("ModelMetadata", pb.ModelMetadataRequest(name="ident")),
        ("ModelMetadata", pb.ModelMetadataRequest(name="ident", version="9")),
        ("ModelMetadata", pb.ModelMetadataRequest(name="nope")),
        ("ModelConfig", pb.ModelConfigRequest(name="batched")),
        ("ModelReady", pb.ModelReadyRequest(name="ident")),
        ("ModelReady", pb.ModelReadyRequest(name="ident", version="x")),
        ("ModelReady", pb.ModelReadyRequest(name="nope")),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="nope")),
        ("ServerMetadata", pb.ServerMetadataRequest()),
        ("ServerLive", pb.ServerLiveRequest()),
        ("ServerReady", pb.ServerReadyRequest()),
    ]
    async with pair(echo_repository, tmp_path) as both:
        for method, message in cases:
            direct, through = (
                await _outcome(both.direct, method, message),
                await _outcome(both.through, method, message),
            )
            assert through == direct, method
        # These answers hold a map, whose order is not fixed.
        ask = pb.TraceSettingRequest(model_name="ident")
        answers = [await _outcome(channel, "TraceSetting", ask) for channel in (both.direct, both.through)]
        direct, through = (pb.TraceSettingResponse.FromString(answer) for answer in answers)
        assert direct == through
        assert await _outcome(both.through, "LogSettings", pb.LogSettingsRequest())


async def test_a_stream_of_the_stock_client(echo_repository: Path, tmp_path: Path) -> None:
    """A-028: five requests on one stream; and when the replica drains, its stream ends."""
    async with pair(echo_repository, tmp_path) as both:
        answers = await asyncio.to_thread(_stream, both.url)
        assert sorted(answer.get_response().id for answer in answers) == ["1", "2", "3", "4", "5"]

        call = both.through.stream_stream(SERVICE + "ModelStreamInfer")()
        await call.write(_infer(np.zeros(16, dtype=np.float32)).SerializeToString())
        assert await call.read() is not grpc.aio.EOF
        both.router.pools["vision"].update([])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert both.router.pools["vision"].in_flight == 0


def _stream(url: str) -> list[Any]:
    answers: list[Any] = []
    tensor = triton.InferInput("INPUT0", [16], "FP32")
    tensor.set_data_from_numpy(np.zeros(16, dtype=np.float32))
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        for number in range(1, 6):
            client.async_stream_infer("ident", [tensor], request_id=str(number))
        client.stop_stream()
    return answers
