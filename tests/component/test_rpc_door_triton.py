"""The gRPC door in front of a real Triton: every answer equals that of a direct call, byte for byte.

What may differ is in docs/protocol-grpc.md under "Differences from Triton".
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb

from gateway.at_zero import AtZero
from gateway.ingress.rpc_door import GrpcDoor
from gateway.settings import GatewaySettings
from replicas.addresses import AttachAddresses
from tests.differential.grpc_cases import CALLS, Call
from tests.doors import Counted, HandRouter, pool_settings
from tests.h2_peer import caller, framed
from tests.triton import MIXED_MODELS
from wire.errors import ERROR_KIND_HEADER
from wire.membership import ReplicaLease, ReplicaState

SERVICE = "/inference.GRPCInferenceService/"
#: Metadata that the gateway adds to an error of its own.
OWN_METADATA = frozenset((ERROR_KIND_HEADER.lower(), "retry-after"))


@dataclass
class Outcome:
    """All that a caller gets to know of a call."""

    messages: list[bytes]
    code: Any
    details: str | None
    initial: list[tuple[str, str | bytes]]
    trailing: list[tuple[str, str | bytes]]


@dataclass
class Pair:
    """Triton itself and the gateway before it."""

    direct: Any
    through: Any
    url: str
    router: HandRouter


@asynccontextmanager
async def pair(addresses: AttachAddresses) -> AsyncIterator[Pair]:
    router = HandRouter({"vision": pool_settings(MIXED_MODELS)})
    lease = ReplicaLease(
        id="r1", pool="vision", state=ReplicaState.READY, grpc_address=addresses.grpc, models=MIXED_MODELS
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


async def outcome(channel: Any, call: Call) -> Outcome:
    options = {"metadata": call.metadata, "compression": call.compression, "timeout": call.timeout}
    messages: list[bytes] = []
    try:
        if call.is_stream:
            made = channel.stream_stream(SERVICE + call.method)(**options)
            for message in call.sent:
                await made.write(message)
            await made.done_writing()
            async for message in made:
                messages.append(message)
        else:
            made = channel.unary_unary(SERVICE + call.method)(call.sent[0], **options)
            messages.append(await made)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    metadata = [
        [(key, value) for key, value in each or () if key not in OWN_METADATA]
        for each in (await made.initial_metadata(), await made.trailing_metadata())
    ]
    return Outcome(messages, await made.code(), await made.details(), *metadata)


def readable(call: Call, given: Outcome) -> Outcome:
    """Messages as they are read, for those that hold a map: its order is not fixed."""
    kind = getattr(pb, f"{call.method}Response", pb.ModelInferResponse)
    kind = pb.ModelStreamInferResponse if call.is_stream else kind
    return Outcome(
        [kind.FromString(each) for each in given.messages], given.code, given.details, given.initial, given.trailing
    )


async def test_answers_equal_those_of_triton(mixed_triton: AttachAddresses) -> None:
    """A-006, A-009 to A-011, A-014, A-015, A-017, A-019, A-028, A-029."""
    different = []
    async with pair(mixed_triton) as both:
        for name, call in CALLS.items():
            direct, through = await outcome(both.direct, call), await outcome(both.through, call)
            if through != direct and readable(call, through) != readable(call, direct):
                different.append(f"{name}:\n  direct  {direct}\n  through {through}"[:3000])
    assert not different, f"{len(different)} of {len(CALLS)}:\n" + "\n".join(different)


@pytest.mark.parametrize("name", ["told", "wrong type", "a large answer", "A-028 stream of five", "server metadata"])
async def test_header_blocks_equal_those_of_triton(mixed_triton: AttachAddresses, name: str) -> None:
    """Also what libraries keep to themselves, such as the encodings that a server accepts."""
    seen = []
    async with pair(mixed_triton) as both:
        for address in (mixed_triton.grpc, both.url):
            async with caller(int(address.rpartition(":")[2])) as peer:
                path = SERVICE + CALLS[name].method
                stream = await peer.over(peer.call(b"".join(map(framed, CALLS[name].sent)), path=path))
                seen.append((stream.headers, stream.trailers, stream.reset))
    assert seen[0] == seen[1]


async def test_a_stream_ends_when_its_replica_drains(mixed_triton: AttachAddresses) -> None:
    async with pair(mixed_triton) as both:
        call = both.through.stream_stream(SERVICE + "ModelStreamInfer")()
        await call.write(CALLS["A-028 stream of five"].sent[0])
        assert await call.read() is not grpc.aio.EOF
        both.router.pools["vision"].update([])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert both.router.pools["vision"].in_flight == 0


async def test_a_stream_of_the_stock_client(mixed_triton: AttachAddresses) -> None:
    """A-028: five requests on one stream."""
    async with pair(mixed_triton) as both:
        answers = await asyncio.to_thread(_stream, both.url)
        assert sorted(answer.get_response().id for answer in answers) == ["1", "2", "3", "4", "5"]


async def test_deadlines_and_cancels_come_to_the_same(mixed_triton: AttachAddresses) -> None:
    """A-019, A-024."""
    slow = CALLS["told"].messages[0].__class__()
    slow.CopyFrom(CALLS["told"].messages[0])
    slow.raw_input_contents[0] = b"\x09\0\0\0sleep 0.5"
    async with pair(mixed_triton) as both:
        for channel in (both.direct, both.through):
            late = await outcome(channel, Call("ModelInfer", (slow,), timeout=0.2))
            assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
            call = channel.unary_unary(SERVICE + "ModelInfer")(slow.SerializeToString())
            await asyncio.sleep(0.05)
            call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED


def _stream(url: str) -> list[Any]:
    answers: list[Any] = []
    tensor = triton.InferInput("IN_FP32", [16], "FP32")
    tensor.set_data_from_numpy(np.zeros(16, dtype=np.float32))
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        for number in range(1, 6):
            client.async_stream_infer("types", [tensor], request_id=str(number))
        client.stop_stream()
    return answers
