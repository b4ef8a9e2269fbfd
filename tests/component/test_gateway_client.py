"""The workers' client against a scripted gateway: bytes, headers, retries, time limits."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.valkey import free_port
from wire.errors import ERROR_KIND_HEADER, ErrorKind
from wire.membership import JOB_HEADER, TIMEOUT_HEADER
from workers.cpu_threads import CpuThreads
from workers.gateway_client import GatewayClient
from workers.retry import MOST_LOST_REPLICAS, InferenceFailed
from workers.settings import GatewayAccessSettings

Answer = Callable[[web.Request, bytes], web.StreamResponse]
LENGTH = "Inference-Header-Content-Length"


def _echo(request: web.Request, body: bytes) -> web.StreamResponse:
    """Triton's answer for an identity model, binary."""
    head = int(request.headers[LENGTH])
    tensor = body[head:]
    text = (
        '{"model_name":"m","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,3],'
        f'"parameters":{{"binary_data_size":{len(tensor)}}}}}]}}'
    )
    return web.Response(body=text.encode() + tensor, headers={LENGTH: str(len(text))})


def _error(status: int, kind: ErrorKind | None, **headers: str) -> Answer:
    named = {} if kind is None else {ERROR_KIND_HEADER: str(kind)}
    return lambda request, body: web.json_response({"error": "it says no"}, status=status, headers=named | headers)


class Gateway:
    """Answers requests in the order of ``script``; the last answer is repeated."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.script: list[Answer] = [_echo]
        self.seen: list[web.Request] = []
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        answer = self.script[min(len(self.seen), len(self.script) - 1)]
        self.seen.append(request)
        return answer(request, body)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    scripted = Gateway(free_port())
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[GatewayClient]:
    threads = CpuThreads(1)
    connected = GatewayClient(
        f"http://127.0.0.1:{gateway.port}/",
        GatewayAccessSettings(),
        run_on_cpu=threads.run,
        dice=random.Random(1).random,
    )
    yield connected
    await connected.close()
    threads.close()


async def _infer(client: GatewayClient, limit: float = 10.0) -> Any:
    tensor = np.array([[1.0, 2.0, 3.0]], np.float32)
    outputs = await client.infer("m", {"x": tensor}, job_id="7-1", deadline=time.monotonic() + limit)
    return outputs["y"].tolist()


async def test_tensors_go_both_ways_and_the_request_names_its_job_and_time(
    gateway: Gateway, client: GatewayClient
) -> None:
    assert await _infer(client) == [[1.0, 2.0, 3.0]]
    (request,) = gateway.seen
    assert request.path == "/v2/models/m/infer"
    assert request.headers[JOB_HEADER] == "7-1"
    assert 9000 < int(request.headers[TIMEOUT_HEADER]) <= 10_000


async def test_refusals_that_pass_are_tried_again(gateway: Gateway, client: GatewayClient) -> None:
    lost = ErrorKind.REPLICA_LOST
    gateway.script = [_error(503, None), _error(503, ErrorKind.HOLD_LIMIT), _error(502, lost), _echo]
    assert await _infer(client) == [[1.0, 2.0, 3.0]]
    assert len(gateway.seen) == 4


async def test_the_announced_time_is_waited_for(gateway: Gateway, client: GatewayClient) -> None:
    gateway.script = [_error(503, ErrorKind.NO_REPLICA, **{"Retry-After": "1"}), _echo]
    started = time.monotonic()
    await _infer(client)
    assert 1.0 <= time.monotonic() - started < 2.0


@pytest.mark.parametrize(
    ("status", "kind"), [(400, None), (404, ErrorKind.NOT_FOUND), (500, None), (504, ErrorKind.DEADLINE)]
)
async def test_other_answers_are_final(
    gateway: Gateway, client: GatewayClient, status: int, kind: ErrorKind | None
) -> None:
    gateway.script = [_error(status, kind)]
    with pytest.raises(InferenceFailed, match="model m: it says no") as caught:
        await _infer(client)
    assert (caught.value.failure.status, caught.value.failure.kind) == (status, kind)
    assert len(gateway.seen) == 1


async def test_a_request_that_costs_replicas_is_given_up(gateway: Gateway, client: GatewayClient) -> None:
    """A-079."""
    gateway.script = [_error(502, ErrorKind.REPLICA_LOST)]
    with pytest.raises(InferenceFailed) as caught:
        await _infer(client)
    assert caught.value.attempts.lost_replicas == MOST_LOST_REPLICAS == len(gateway.seen)


async def test_a_replica_with_a_dead_stub_is_not_the_requests_fault(gateway: Gateway, client: GatewayClient) -> None:
    """Triton's own 500 goes through the gateway unchanged; by the next try the replica has left."""
    broken = {"error": "Stub process 'm_0_0' is not healthy."}
    gateway.script = [lambda request, body: web.json_response(broken, status=500), _echo]
    started = time.monotonic()
    assert await _infer(client) == [[1.0, 2.0, 3.0]]
    assert 3.0 <= time.monotonic() - started < 4.5


async def test_the_time_limit_holds_whatever_happens(gateway: Gateway, client: GatewayClient) -> None:
    gateway.script = [_error(503, None)]
    started = time.monotonic()
    with pytest.raises(InferenceFailed, match="within the job's time") as caught:
        await _infer(client, limit=0.6)
    assert caught.value.failure.kind is ErrorKind.DEADLINE
    assert time.monotonic() - started < 1.5


async def test_a_gateway_that_restarts_is_waited_for(gateway: Gateway, client: GatewayClient) -> None:
    await _infer(client)
    await gateway.stop()
    again = Gateway(gateway.port)

    async def later() -> None:
        await asyncio.sleep(0.5)
        await again.start()

    starting = asyncio.create_task(later())
    assert await _infer(client) == [[1.0, 2.0, 3.0]]
    await starting
    await again.stop()
