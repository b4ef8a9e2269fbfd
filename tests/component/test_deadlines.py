"""How long a request may wait and run: deadlines, and Triton's own ``timeout`` parameter while it is held."""

import asyncio
import gzip
import json
import time
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.component.test_rpc_door import infer, until
from tests.component.test_rpc_door import running_door as rpc_door
from tests.doors import Caller, RunningDoor, ask, post, running_door
from tests.upstream import Reply, Seen, Upstream
from tests.upstream_grpc import running_upstream
from wire.errors import ERROR_KIND_HEADER

SLOW = "/v2/models/slow/infer"


def slowly(seen: Seen) -> Reply:
    return Reply(delay_seconds=10)


def timed(milliseconds: float) -> bytes:
    """A body with a ``timeout``, behind the tensors as the stock client writes it."""
    return json.dumps({"inputs": [{"data": [1]}], "parameters": {"timeout": int(milliseconds * 1000)}}).encode()


def chunked(body: bytes) -> bytes:
    chunks = b"".join(b"1\r\n%b\r\n" % body[at : at + 1] for at in range(len(body)))
    return f"POST {SLOW} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


async def busy(door: RunningDoor) -> Caller:
    """Capacity 1, and a request on it."""
    caller = await Caller.open(door.port)
    caller.send(post(SLOW))
    await until(lambda: door.pool.in_flight == 1)
    return caller


@pytest.mark.parametrize("framing", ["plain", "gzip", "chunked", "large"])
async def test_a_request_waits_no_longer_than_its_timeout(framing: str) -> None:
    """A-027: the model is busy; the second request is refused in time and never reaches it."""
    async with Upstream(slowly) as upstream, running_door(upstream.lease(), max_in_flight_per_replica=1) as door:
        async with await busy(door):
            body = timed(300)
            raw = {
                "plain": post(SLOW, body),
                "gzip": post(SLOW, gzip.compress(body), "Content-Encoding: gzip"),
                "chunked": chunked(body),
                "large": post(SLOW, body + bytes(300_000), f"inference-header-content-length: {len(body)}"),
            }[framing]
            began = time.monotonic()
            async with await Caller.open(door.port) as caller:
                caller.send(raw)
                answer = await caller.answer()
            assert time.monotonic() - began > 0.29
            assert answer.status == 503 and answer.header(ERROR_KIND_HEADER) == "queue_timeout"
            assert b"timeout of 300000 us passed while it was held" in answer.body
            assert (answer.header("retry-after") or "").isdigit()
        await door.settled()
        assert len(upstream.seen) == 1


async def test_a_timeout_says_nothing_of_a_request_that_is_not_held() -> None:
    async with Upstream(lambda seen: Reply(delay_seconds=0.2)) as upstream, running_door(upstream.lease()) as door:
        assert (await ask(door.port, post(SLOW, timed(1)))).status == 200


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_a_call_waits_no_longer_than_its_timeout(compression: Any) -> None:
    """A-027, over gRPC, a stream's first message too."""
    async with running_upstream() as upstream:
        upstream.unary = _forever
        async with rpc_door(upstream.lease(), max_in_flight_per_replica=1) as door:
            running = door.call("ModelInfer", infer("slow"))
            running_task = asyncio.ensure_future(_outcome(running))
            await until(lambda: door.pool.in_flight == 1)
            request = pb.ModelInferRequest(model_name="slow", raw_input_contents=[bytes(1000)])
            request.parameters["timeout"].int64_param = 300_000
            message = request.SerializeToString()
            began = time.monotonic()
            assert await _outcome(door.call("ModelInfer", message, compression=compression)) == (
                grpc.StatusCode.UNAVAILABLE,
                "queue_timeout",
            )
            assert time.monotonic() - began > 0.29
            stream = door.stream(compression=compression)
            await stream.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stream.read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            running.cancel()
            await running_task
            await until(lambda: door.pool.in_flight == 0 and not door.pool.held)
            assert len(upstream.seen) == 1


async def _forever(message: bytes, context: Any) -> bytes:
    await asyncio.sleep(60)
    return b""


async def _outcome(call: Any) -> Any:
    try:
        return await call
    except asyncio.CancelledError:
        return None
    except grpc.aio.AioRpcError as error:
        return error.code(), dict(error.trailing_metadata() or ()).get(ERROR_KIND_HEADER)


async def test_a_deadline_ends_the_request_on_the_replica_too() -> None:
    """A-024: over HTTP the replica's connection is closed, over gRPC it is told what is left and the call is reset."""
    async with Upstream(slowly) as upstream, running_door(upstream.lease()) as door:
        began = time.monotonic()
        answer = await ask(door.port, post(SLOW, b"{}", "tidegate-timeout-ms: 400"))
        assert answer.status == 504 and time.monotonic() - began > 0.39
        await until(lambda: upstream.seen[0].left_early)
        assert door.pool.in_flight == 0
    async with running_upstream() as calls:
        calls.unary = _forever
        async with rpc_door(calls.lease()) as door:
            assert (await _outcome(door.call("ModelInfer", infer("slow"), timeout=0.4)))[0] is (
                grpc.StatusCode.DEADLINE_EXCEEDED
            )
            await until(lambda: calls.seen[0].cancelled)
            remaining = calls.seen[0].remaining_seconds
            assert remaining is not None and remaining <= 0.4
            await until(lambda: door.pool.in_flight == 0)


async def test_time_that_passed_before_a_call_is_sent_on_is_gone() -> None:
    """Not held, but slow to come: the replica gets what is left."""
    async with running_upstream() as calls, rpc_door(calls.lease()) as door:
        stream = door.stream(timeout=20)
        await stream.wait_for_connection()
        await asyncio.sleep(0.5)
        seen: list[float] = []

        async def note(context: Any) -> None:
            seen.append(context.time_remaining())
            await context.write(await context.read())

        calls.stream = note
        await stream.write(infer("slow"))
        assert await stream.read() == infer("slow")
        assert seen[0] < 19.6
        stream.cancel()


async def test_a_body_that_comes_too_late_is_sent_nowhere() -> None:
    """A-024: the deadline counts from the request's head."""
    async with Upstream() as upstream, running_door(upstream.lease()) as door:
        async with await Caller.open(door.port) as caller:
            raw = post(SLOW, b"{}" * 20, "tidegate-timeout-ms: 200")
            caller.send(raw[:-1])
            assert (await caller.answer()).status == 504
        await door.settled()
        assert not upstream.seen
