"""Closed-loop callers: each sends its next request when its last was answered. For requests that differ from each
other, and for everything where h2load is not installed.

Raw and cheap on purpose, so that the client is not what is measured: HTTP requests are prepared once as bytes and
sent on keep-alive sockets; gRPC messages are prepared once and sent through generic byte-level stubs.
A closed loop tells throughput and the price of a hop; it does not tell latency under an arrival rate.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import uvloop

from loadtests.measured import Measured, Side, percentiles
from loadtests.work import Work

_GRPC_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
#: Bodies up to this size go out in one write with their head. Bytes.
_ONE_WRITE = 4096

#: Sends one request; whether the answer was a good one.
Call = Callable[[], Coroutine[Any, Any, bool]]


class ClosedLoop:
    """See the module; the other generator is :class:`loadtests.h2load.H2load`."""

    name = "closed_loop.py"

    def run(self, work: Work, side: Side, *, connections: int, streams: int = 1, seconds: float) -> Measured:
        """``connections`` x ``streams`` callers for ``seconds``; callers send the bodies of ``work`` in turn."""
        return uvloop.run(_measure(work, side, connections, streams, seconds))


async def _measure(work: Work, side: Side, connections: int, streams: int, seconds: float) -> Measured:
    latencies: list[float] = []
    failures = 0

    async def loop(call: Call) -> None:
        nonlocal failures
        while (begin := time.perf_counter()) < until:
            failures += not await call()
            latencies.append(time.perf_counter() - begin)

    async with AsyncExitStack() as stack:
        if work.protocol == "http":
            calls = [await http_caller(stack, side.http, work, start) for start in range(connections * streams)]
        else:
            channels = [grpc.aio.insecure_channel(side.grpc, options=_GRPC_OPTIONS) for _ in range(connections)]
            for channel in channels:
                await stack.enter_async_context(channel)
            calls = [_grpc_caller(channel, work) for channel in channels for _ in range(streams)]
        begin = time.perf_counter()
        until = begin + seconds
        await asyncio.gather(*(loop(call) for call in calls))
        elapsed = time.perf_counter() - begin
    return Measured(len(latencies), failures, elapsed, *percentiles(latencies))


async def http_caller(stack: AsyncExitStack, address: str, work: Work, start: int) -> Call:
    """A keep-alive connection, closed with ``stack``; its requests begin with body number ``start``."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    stack.callback(writer.close)
    requests = _turns(_http_requests(address, work), start)

    async def call() -> bool:
        try:
            for part in next(requests):
                writer.write(part)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0])
            await reader.readexactly(length)
        except (OSError, EOFError):
            return False
        return head.startswith(b"HTTP/1.1 200")

    return call


def _http_requests(address: str, work: Work) -> list[tuple[bytes, ...]]:
    headers = "".join(f"{name}: {value}\r\n" for name, value in work.headers)
    requests: list[tuple[bytes, ...]] = []
    for body in work.bodies:
        head = f"POST {work.path} HTTP/1.1\r\nHost: {address}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode()
        requests.append((head + body,) if len(body) <= _ONE_WRITE else (head, body))
    return requests


def _turns(requests: list[tuple[bytes, ...]], start: int) -> Iterator[tuple[bytes, ...]]:
    start %= len(requests)
    return itertools.cycle(requests[start:] + requests[:start])


def _grpc_caller(channel: grpc.aio.Channel, work: Work) -> Call:
    body = work.bodies[0]
    if work.streams:
        stream = channel.stream_stream(work.path)

        async def call() -> bool:
            replies = 0
            try:
                async for _ in stream(iter((body,))):
                    replies += 1
            except grpc.aio.AioRpcError:
                return False
            return replies > 0

        return call
    unary = channel.unary_unary(work.path)

    async def call_once() -> bool:
        try:
            await unary(body)
        except grpc.aio.AioRpcError:
            return False
        return True

    return call_once
