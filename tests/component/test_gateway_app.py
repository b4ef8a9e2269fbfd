"""The gateway as a whole: real Ray, Serve and store. Starting Ray is slow, so one start serves a long story."""

import asyncio
import json
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from gateway.settings import GatewaySettings
from stores.membership import GatewayDirectory, ReplicaDirectory
from stores.store import Store
from tests.gateway_process import GatewayProcess, gateway_process
from tests.upstream_grpc import running_upstream
from tests.valkey import RunningValkey, free_port

INFER = "/inference.GRPCInferenceService/ModelInfer"
REQUEST = b"\x0a\x05ident"


def _settings() -> GatewaySettings:
    return GatewaySettings(
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=free_port(),
        control_port=free_port(),
        drain_limit_seconds=10,
    )


async def _get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def test_life_of_a_gateway(valkey: RunningValkey, store: Store) -> None:
    """Start, control API, doors, a held request, an instance that dies, drain on SIGTERM with a request in flight."""
    settings = _settings()
    with gateway_process(settings, valkey.settings) as gateway:
        await asyncio.to_thread(gateway.wait_until_logged, "event=gateway-ready", 90)
        assert os.getpriority(os.PRIO_PROCESS, gateway.instance_pid()) == os.getpriority(os.PRIO_PROCESS, 0)
        await _control_api_answers(settings)
        await _doors_and_metrics_answer(settings)
        await _held_request_goes_through(settings, store)
        await _instance_is_replaced(gateway, store)
        await _drains(gateway, store)


async def _control_api_answers(settings: GatewaySettings) -> None:
    port = settings.control_port
    assert await _get(port, "/health") == (200, '{"status":"ok"}')
    status, text = await _get(port, "/v1/status")
    snapshot = json.loads(text)
    assert status == 200
    assert [pool["name"] for pool in snapshot["pools"]] == ["vision"]
    assert snapshot["at"].endswith("Z")
    assert snapshot["gateways"][0]["http_address"] == f"127.0.0.1:{settings.http_port}"
    assert json.loads((await _get(port, "/v1/pools/vision/decisions"))[1]) == {
        "pool": "vision",
        "latest": None,
        "changes": [],
    }
    assert await _get(port, "/v1/pools/nope/decisions") == (404, '{"error":"no pool \'nope\'; there are: vision"}')
    assert "/v1/status" in (await _get(port, "/openapi.json"))[1]
    assert (await _get(port, "/docs"))[0] == 404


async def _doors_and_metrics_answer(settings: GatewaySettings) -> None:
    assert await _get(settings.http_port, "/v2/health/ready") == (200, "")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{settings.grpc_port}") as channel:
        assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
    status, text = await _get(settings.metrics_port, "/metrics")
    assert status == 200
    assert 'protocol="grpc",status="0"' in text
    assert "tidegate_store_reachable" in text


async def _held_request_goes_through(settings: GatewaySettings, store: Store) -> None:
    """A-040: the first request asks for the pool directly."""
    async with running_upstream() as upstream, grpc.aio.insecure_channel(f"127.0.0.1:{settings.grpc_port}") as channel:
        call = channel.unary_unary(INFER)(REQUEST, timeout=20)
        began = time.monotonic()
        while not await store.redis.exists(store.key("pool", "vision", "activation")):
            assert time.monotonic() - began < 1.0
            await asyncio.sleep(0.01)
        await ReplicaDirectory(store).renew(upstream.lease(models=("ident",)), 30, announce=True)
        assert await call == REQUEST
        await ReplicaDirectory(store).leave("vision", "r1")
        async with asyncio.timeout(3):
            while upstream.wire.open:
                await asyncio.sleep(0.01)


async def _instance_is_replaced(gateway: GatewayProcess, store: Store) -> None:
    before = gateway.instance_pid()
    soft, hard = resource.prlimit(before, resource.RLIMIT_NOFILE)
    assert soft == hard
    os.kill(before, signal.SIGKILL)
    async with asyncio.timeout(60):
        while True:
            await asyncio.sleep(0.2)
            try:
                if await _get(gateway.settings.http_port, "/v2/health/live") == (200, ""):
                    break
            except aiohttp.ClientError:
                continue
    assert gateway.instance_pid() != before


async def _drains(gateway: GatewayProcess, store: Store) -> None:
    async def slow(message: bytes, context: Any) -> bytes:
        await asyncio.sleep(2.0)
        return message

    port = gateway.settings.grpc_port
    async with running_upstream() as upstream, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        upstream.unary = slow
        await ReplicaDirectory(store).renew(upstream.lease(models=("ident",)), 30, announce=True)
        call = asyncio.ensure_future(_awaited(channel.unary_unary(INFER)(REQUEST, timeout=20)))
        async with asyncio.timeout(10):
            while not upstream.seen:
                await asyncio.sleep(0.01)
        family = gateway.family()
        gateway.process.send_signal(signal.SIGTERM)
        assert await call == REQUEST
    code = await asyncio.to_thread(gateway.process.wait, 20)
    assert code == 0, gateway.log
    assert [pid for pid in family if _is_alive(pid)] == []
    assert not gateway.ray_dir.exists()
    assert "ray-process-killed" not in gateway.log
    assert await GatewayDirectory(store).list() == []


async def test_a_taken_port_is_one_clear_sentence(valkey: RunningValkey) -> None:
    settings = _settings()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", settings.grpc_port))
        taken.listen()
        with gateway_process(settings, valkey.settings) as gateway:
            assert await asyncio.to_thread(gateway.process.wait, 20) == 1
            assert f"gateway.grpc_port: port {settings.grpc_port} on 127.0.0.1: Address already in use" in gateway.log
            assert "Traceback" not in gateway.log


async def test_nothing_outlives_a_killed_gateway(valkey: RunningValkey) -> None:
    with gateway_process(_settings(), valkey.settings) as gateway:
        await asyncio.to_thread(gateway.wait_until_logged, "event=gateway-ready", 90)
        family = gateway.family()
        gateway.process.kill()
        async with asyncio.timeout(30):
            while any(_is_alive(pid) for pid in family):
                await asyncio.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state != b"Z"


async def _awaited(call: Any) -> Any:
    return await call
