"""Closed-loop callers for side-by-side benchmarks: N callers, each sends its next request when the last was answered.

Raw and cheap on purpose, so that the client is not what is measured: HTTP requests are prepared once as bytes and
sent on keep-alive sockets; gRPC messages are prepared once and sent through generic byte-level stubs.
A closed loop tells throughput and the price of a hop; it does not tell latency under an arrival rate.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import uvloop
from tritonclient.grpc import service_pb2

#: Callers share channels, so that no single HTTP/2 connection is the bottleneck.
_CALLERS_PER_CHANNEL = 8
_GRPC_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run saw. Latencies in seconds."""

    requests: int
    failures: int
    seconds: float
    p50_seconds: float
    p99_seconds: float

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared: where to send requests."""

    name: str
    http: str
    grpc: str


def run(protocol: str, side: Side, *, values: int, callers: int, seconds: float) -> Measured:
    """Call model ``ident`` with FP32[1, values] for ``seconds`` with ``callers`` callers over ``http`` or ``grpc``."""
    one = _http_callers if protocol == "http" else _grpc_callers
    return uvloop.run(_measure(one, side, values, callers, seconds))


async def _measure(
    prepare: Callable[[Side, int, int], Awaitable["Callers"]], side: Side, values: int, callers: int, seconds: float
) -> Measured:
    group = await prepare(side, values, callers)
    latencies: list[float] = []
    failures = 0
    try:
        for call in group.calls:
            await call()
        until = time.perf_counter() + seconds

        async def loop(call: Callable[[], Awaitable[bool]]) -> None:
            nonlocal failures
            while (begin := time.perf_counter()) < until:
                failures += not await call()
                latencies.append(time.perf_counter() - begin)

        begin = time.perf_counter()
        await asyncio.gather(*(loop(call) for call in group.calls))
        elapsed = time.perf_counter() - begin
    finally:
        await group.close()
    latencies.sort()
    p50, p99 = latencies[len(latencies) // 2], latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))]
    return Measured(len(latencies), failures, elapsed, p50, p99)


@dataclass(frozen=True, slots=True)
class Callers:
    """Prepared callers: each ``calls[i]()`` sends one request and tells whether the answer was right."""

    calls: list[Callable[[], Awaitable[bool]]]
    close: Callable[[], Awaitable[None]]


async def _http_callers(side: Side, values: int, callers: int) -> Callers:
    tensor = np.arange(values, dtype=np.float32).tobytes()
    request_input: dict[str, Any] = {"name": "INPUT0", "shape": [1, values], "datatype": "FP32"}
    request_input["parameters"] = {"binary_data_size": len(tensor)}
    head = json.dumps({"inputs": [request_input], "parameters": {"binary_data_output": True}}).encode()
    host, port = side.http.rsplit(":", 1)
    request = (
        f"POST /v2/models/ident/infer HTTP/1.1\r\nHost: {side.http}\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + len(tensor)}\r\n\r\n"
    ).encode()
    body = head + tensor
    writers: list[asyncio.StreamWriter] = []

    async def caller() -> Callable[[], Awaitable[bool]]:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
        writers.append(writer)

        async def call() -> bool:
            writer.write(request + body if values < 1024 else request)
            if values >= 1024:
                writer.write(body)
                await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0])
            received = await reader.readexactly(length)
            return answer.startswith(b"HTTP/1.1 200") and received.endswith(tensor[-64:])

        return call

    async def close() -> None:
        for writer in writers:
            writer.close()

    return Callers([await caller() for _ in range(callers)], close)


async def _grpc_callers(side: Side, values: int, callers: int) -> Callers:
    tensor = np.arange(values, dtype=np.float32).tobytes()
    request = service_pb2.ModelInferRequest(model_name="ident")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, values])
    request.raw_input_contents.append(tensor)
    message = request.SerializeToString()
    channels = [
        grpc.aio.insecure_channel(side.grpc, options=_GRPC_OPTIONS)
        for _ in range(max(1, callers // _CALLERS_PER_CHANNEL))
    ]

    def caller(channel: grpc.aio.Channel) -> Callable[[], Awaitable[bool]]:
        stub = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        async def call() -> bool:
            try:
                answer: bytes = await stub(message)
            except grpc.aio.AioRpcError:
                return False
            return answer.endswith(tensor[-64:])

        return call

    async def close() -> None:
        for channel in channels:
            await channel.close()

    return Callers([caller(channels[index % len(channels)]) for index in range(callers)], close)
