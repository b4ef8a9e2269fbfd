"""What concerns all replicas of a pool, behind the real doors: two replicas with real Tritons, a real store."""

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException, shared_memory

from gateway.access import digest
from gateway.at_zero import AtZero
from gateway.ingress.http_door import HttpDoor
from gateway.ingress.rpc_door import GrpcDoor
from gateway.pool_wide.service import PoolWide
from gateway.routing.router import Router
from gateway.settings import ApiKeySettings, GatewaySettings, Role
from stores.changes import ChangeStore
from stores.membership import CatalogueStore, GatewayDirectory, ReplicaDirectory
from stores.scaling import Activations
from stores.store import Store
from tests.doors import Answer, Counted, ask, get, post
from tests.triton import ReplicaProcess, write_model
from tests.valkey import RunningValkey
from wire.errors import ERROR_KIND_HEADER
from wire.membership import GatewayReport, ReplicaState
from wire.pools import ModelSettings, PoolSettings, ReplicaSettings

SERVICE = "/inference.GRPCInferenceService/"
TENSOR = {"name": "INPUT0", "shape": [2], "datatype": "FP32", "data": [1, 2]}
INFER = json.dumps({"inputs": [TENSOR]}).encode()


@dataclass
class Gateway:
    """One gateway instance in the test's process."""

    router: Router
    http: int
    grpc: int

    async def post(self, path: str, body: Any = b"") -> Answer:
        return await ask(self.http, post(path, body if isinstance(body, bytes) else json.dumps(body).encode()))

    async def get(self, path: str) -> Answer:
        return await ask(self.http, get(path))

    async def infer(self, model: str) -> Answer:
        return await self.post(f"/v2/models/{model}/infer", INFER)

    async def call(self, method: str, request: Any) -> bytes:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc}") as channel:
            return bytes(await channel.unary_unary(SERVICE + method)(request.SerializeToString(), timeout=60))

    async def until_ready(self, count: int) -> None:
        async with asyncio.timeout(60):
            while [lease.state for lease in self.router.pools["test"].replicas].count(ReplicaState.READY) != count:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running_gateway(store: Store, name: str, **settings: Any) -> AsyncIterator[Gateway]:
    changes = ChangeStore(store)
    router = Router(
        {"test": PoolSettings(models=(ModelSettings(name="ident"),), replica=ReplicaSettings(lease_seconds=1.5))},
        replicas=ReplicaDirectory(store),
        gateways=GatewayDirectory(store),
        catalogues=CatalogueStore(store),
        changes=changes,
        activations=Activations(store),
        identity=GatewayReport(instance=name, http_address="", grpc_address=""),
    )
    at_zero, gateway = AtZero(router), GatewaySettings(**settings)
    pool_wide = PoolWide(router, changes, at_zero, host=gateway.host, operator_endpoints=gateway.operator_endpoints)
    http = HttpDoor(router, gateway, at_zero, Counted(), pool_wide)
    rpc = GrpcDoor(router, gateway, at_zero, Counted(), pool_wide)
    running = asyncio.create_task(router.run())
    ports = await http.start("127.0.0.1", 0, reuse_port=False), await rpc.start("127.0.0.1", 0)
    try:
        yield Gateway(router, *ports)
    finally:
        await asyncio.gather(http.drain(0.0), rpc.drain(0.0))
        pool_wide.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Replicas:
    """Replicas of the pool ``test``: settings say ``ident``, the repository also has ``extra`` and ``broken``."""

    def __init__(self, store: Store, valkey: RunningValkey, folder: Path) -> None:
        self._store, self._valkey, self._folder = store, valkey, folder
        self.repository = folder / "models"
        write_model(self.repository, "ident")
        write_model(self.repository, "extra")
        write_model(self.repository, "broken", refuse="no room")
        self.running: list[ReplicaProcess] = []

    def start(self) -> ReplicaProcess:
        run_dir = self._folder / f"run{len(self.running)}"
        replica = ReplicaProcess(self._store, self._valkey.settings, self.repository, ["ident"], run_dir)
        replica.start()
        self.running.append(replica)
        return replica

    async def stop(self, replica: ReplicaProcess) -> None:
        replica.process.terminate()
        await replica.exit_code()
        self.running.remove(replica)

    async def stop_all(self) -> None:
        for replica in self.running:
            replica.process.terminate()
        for replica in self.running:
            await replica.exit_code()
        self.running.clear()

    async def http_ports(self) -> list[int]:
        """Ports of the Tritons themselves."""
        leases = [await replica.lease() for replica in self.running]
        return [int((lease.http_address or "").rpartition(":")[2]) for lease in leases if lease is not None]

    async def grpc_port(self) -> int:
        """Port of the first Triton itself."""
        lease = await self.running[0].lease()
        assert lease is not None
        return int((lease.grpc_address or "").rpartition(":")[2])


@asynccontextmanager
async def running_replicas(store: Store, valkey: RunningValkey, folder: Path, count: int) -> AsyncIterator[Replicas]:
    replicas = Replicas(store, valkey, folder)
    for _ in range(count):
        replicas.start()
    try:
        yield replicas
    finally:
        await replicas.stop_all()


async def test_reading_is_merged_and_changes_reach_every_replica(
    valkey: RunningValkey, store: Store, tmp_path: Path
) -> None:
    """A-064, with two gateways."""
    async with (
        running_replicas(store, valkey, tmp_path, 2) as replicas,
        running_gateway(store, "one") as one,
        running_gateway(store, "two") as two,
    ):
        await one.until_ready(2)
        await two.until_ready(2)
        await _statistics_are_summed(one)
        await _a_load_reaches_all_and_is_routed(one, two)
        await _failures_are_tritons(one)
        await _answers_look_like_tritons(one, replicas)
        await _settings_reach_all(one, replicas)
        await _a_newcomer_has_them_all(one, replicas)
        await _an_unload_is_heard_everywhere(one, two)


async def _statistics_are_summed(gateway: Gateway) -> None:
    for _ in range(10):
        assert (await gateway.infer("ident")).status == 200
    await asyncio.sleep(0.2)  # Triton counts after it has answered
    [stats] = json.loads((await gateway.get("/v2/models/ident/stats")).body)["model_stats"]
    assert stats["inference_count"] == stats["inference_stats"]["success"]["count"] == 10
    assert [batch["compute_infer"]["count"] for batch in stats["batch_stats"]] == [10]
    message = await gateway.call("ModelStatistics", pb.ModelStatisticsRequest())
    [told] = pb.ModelStatisticsResponse.FromString(message).model_stats
    assert (told.name, told.inference_count, told.inference_stats.success.count) == ("ident", 10, 10)
    assert told.inference_stats.queue.ns == stats["inference_stats"]["queue"]["ns"]
    assert told.last_inference == stats["last_inference"]
    unknown = await gateway.get("/v2/models/ident/versions/7/stats")
    assert (unknown.status, unknown.header(ERROR_KIND_HEADER)) == (400, None)


async def _a_load_reaches_all_and_is_routed(one: Gateway, two: Gateway) -> None:
    assert (await one.infer("extra")).status == 404
    loaded = await one.post("/v2/repository/models/extra/load")
    assert (loaded.status, loaded.body) == (200, b"")
    for gateway in (one, two):
        await _until_served(gateway, "extra")
        assert {(await gateway.infer("extra")).status for _ in range(30)} == {200}
    index = json.loads((await two.post("/v2/repository/index", {"ready": True})).body)
    assert index == [{"name": name, "version": "1", "state": "READY"} for name in ("extra", "ident")]
    message = await two.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
    models = pb.RepositoryIndexResponse.FromString(message).models
    assert [(model.name, model.version, model.state) for model in models] == [
        ("extra", "1", "READY"),
        ("ident", "1", "READY"),
    ]


async def _until_served(gateway: Gateway, model: str) -> None:
    """The other instance hears of it a moment later."""
    async with asyncio.timeout(5):
        while sum(model in lease.models for lease in gateway.router.pools["test"].replicas) != 2:
            await asyncio.sleep(0.02)


async def _failures_are_tritons(gateway: Gateway) -> None:
    unknown = await gateway.post("/v2/repository/models/nope/load")
    assert unknown.status == 500
    assert json.loads(unknown.body) == {"error": "failed to load 'nope', failed to poll from model repository"}
    assert unknown.header(ERROR_KIND_HEADER) is None
    broken = await gateway.post("/v2/repository/models/broken/load")
    assert broken.status == 400
    assert "no room" in json.loads(broken.body)["error"]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateway.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="nope"))
    assert refused.value.code() is grpc.StatusCode.INTERNAL
    assert refused.value.details() == "failed to load 'nope', failed to poll from model repository"
    fatal = {"parameters": {"config": "{}", f"file:1/{'x' * 256}": ""}}
    assert (await gateway.post("/v2/repository/models/extra/load", fatal)).status == 400
    assert (await gateway.post("/v2/repository/models/nope/unload")).status == 200


async def _answers_look_like_tritons(gateway: Gateway, replicas: Replicas) -> None:
    """Byte for byte, heads included."""
    direct, *_ = await replicas.http_ports()
    for raw in (
        post("/v2/repository/models/extra/load"),
        post("/v2/repository/models/nope/load"),
        post("/v2/repository/models/nope/unload"),
        post("/v2/repository/models/extra/load", b"{"),
        post("/v2/repository/models/extra/load", b'{"parameters":{"config":3}}'),
        post("/v2/repository/any/models/extra/load"),
        post("/v2/repository/index", b'{"ready":true}'),
        post("/v2/repository/index", b"{"),
        post("/v2/logging", b"{}"),
        post("/v2/logging", b'{"nope":1}'),
        post("/v2/trace/setting", b'{"trace_level":["NOPE"]}'),
        post("/v2/models/ident/trace/setting", b'{"trace_count":"5"}'),
        post("/v2/models/nope/trace/setting", b'{"trace_count":"5"}'),
        post("/v2/systemsharedmemory/region/a/register", b'{"key":"/nope","offset":0,"byte_size":8}'),
        post("/v2/systemsharedmemory/region/a/unregister"),
        get("/v2/systemsharedmemory/status"),
        get("/v2/systemsharedmemory/region/a/status"),
        get("/v2/models/nope/stats"),
    ):
        assert (await ask(gateway.http, raw)).raw == (await ask(direct, raw)).raw, raw
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await replicas.grpc_port()}") as triton:
        for method, request in (
            ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="nope")),
            ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="any", model_name="ident")),
            ("TraceSetting", pb.TraceSettingRequest(model_name="nope")),
            ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="a", key="/nope", byte_size=8)),
            ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="nope")),
            ("RepositoryIndex", pb.RepositoryIndexRequest(ready=True)),
            ("ModelStatistics", pb.ModelStatisticsRequest(name="nope")),
            ("ModelStatistics", pb.ModelStatisticsRequest(name="ident", version="7")),
        ):
            said = await outcome(triton.unary_unary(SERVICE + method)(request.SerializeToString()))
            assert await outcome(gateway.call(method, request)) == said, method


async def outcome(call: Awaitable[bytes]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


async def _settings_reach_all(gateway: Gateway, replicas: Replicas) -> None:
    changed = await gateway.post("/v2/logging", {"log_verbose_level": 1})
    assert json.loads(changed.body)["log_verbose_level"] == 1
    request = pb.TraceSettingRequest(settings={"trace_rate": pb.TraceSettingRequest.SettingValue(value=["77"])})
    answer = pb.TraceSettingResponse.FromString(await gateway.call("TraceSetting", request))
    assert list(answer.settings["trace_rate"].value) == ["77"]
    await _everywhere_as_set(replicas)
    assert json.loads((await gateway.get("/v2/trace/setting")).body)["trace_rate"] == "77"
    read = await gateway.call("LogSettings", pb.LogSettingsRequest())
    assert pb.LogSettingsResponse.FromString(read).settings["log_verbose_level"].uint32_param == 1
    assert (await gateway.post("/v2/logging", {"log_verbose_level": "?"})).status == 500


async def _everywhere_as_set(replicas: Replicas) -> None:
    for port in await replicas.http_ports():
        assert json.loads((await ask(port, get("/v2/logging"))).body)["log_verbose_level"] == 1
        assert json.loads((await ask(port, get("/v2/trace/setting"))).body)["trace_rate"] == "77"


async def _a_newcomer_has_them_all(gateway: Gateway, replicas: Replicas) -> None:
    """Another config than the repository's, too. The newcomer replaces one of the two."""
    config: dict[str, Any] = {"name": "ident", "backend": "python", "max_batch_size": 4}
    config["input"] = [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]
    config["output"] = [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]
    given = {"parameters": {"config": json.dumps(config)}}
    assert (await gateway.post("/v2/repository/models/ident/load", given)).status == 200
    assert (await gateway.post("/v2/repository/models/ident/load")).status == 200
    await _load_with_files(gateway, config, replicas)
    await replicas.stop(replicas.running[0])
    newcomer = replicas.start()
    lease = await newcomer.until(ReplicaState.READY)
    assert lease.models == ("extra", "given", "ident")
    await gateway.until_ready(2)
    await _everywhere_as_set(replicas)
    assert {(await gateway.infer("given")).status for _ in range(10)} == {200}
    for port in await replicas.http_ports():
        assert json.loads((await ask(port, get("/v2/models/ident/config"))).body)["max_batch_size"] == 4


async def _load_with_files(gateway: Gateway, config: dict[str, Any], replicas: Replicas) -> None:
    """Of a model that is in no repository, over gRPC, in a message larger than any first window."""
    code = (replicas.repository / "ident" / "1" / "model.py").read_bytes() + b"#" * 300_000
    parameters = {
        "config": pb.ModelRepositoryParameter(string_param=json.dumps(config | {"name": "given", "max_batch_size": 0})),
        "file:1/model.py": pb.ModelRepositoryParameter(bytes_param=code),
    }
    await gateway.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="given", parameters=parameters))
    assert {(await gateway.infer("given")).status for _ in range(10)} == {200}


async def _an_unload_is_heard_everywhere(one: Gateway, two: Gateway) -> None:
    direct = "Request for unknown model: 'extra' has no available versions"
    await one.call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="extra"))
    for gateway in (one, two):
        answer = await gateway.infer("extra")
        assert (answer.status, json.loads(answer.body)) == (404, {"error": direct})
        assert answer.header(ERROR_KIND_HEADER) is None
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.call("ModelInfer", pb.ModelInferRequest(model_name="extra"))
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, direct)
        assert (await gateway.get("/v2/models/extra/ready")).status == 400
    gone = {"name": "extra", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    async with asyncio.timeout(10):
        while gone not in json.loads((await two.post("/v2/repository/index")).body):
            await asyncio.sleep(0.1)  # it is unloading


async def test_a_pool_at_zero_remembers(valkey: RunningValkey, store: Store, tmp_path: Path) -> None:
    """Unloading wakes nothing, and a gateway that starts later knows of it; a load waits for a replica."""
    async with running_gateway(store, "before") as before:
        unloaded = await before.post("/v2/repository/models/ident/unload")
        assert (unloaded.status, unloaded.body) == (200, b"")
        assert not await Activations(store).is_active("test")
    async with running_gateway(store, "after") as gateway:
        async with asyncio.timeout(5):
            while not gateway.router.pools["test"].unloaded:
                await asyncio.sleep(0.02)
        gone = await gateway.infer("ident")
        direct = "Request for unknown model: 'ident' has no available versions"
        assert (gone.status, json.loads(gone.body)) == (404, {"error": direct})
        assert (await gateway.get("/v2/models/ident/ready")).status == 400
        assert not await Activations(store).is_active("test")
        loading = asyncio.create_task(gateway.post("/v2/repository/models/extra/load"))
        async with asyncio.timeout(5):
            while not await Activations(store).is_active("test"):
                await asyncio.sleep(0.02)
        async with running_replicas(store, valkey, tmp_path, 1) as replicas:
            lease = await replicas.running[0].until(ReplicaState.READY)
            assert lease.models == ()
            assert (await loading).status == 200
            assert (await gateway.infer("extra")).status == 200
            assert (await gateway.infer("ident")).status == 404
            assert (await gateway.post("/v2/repository/models/ident/load")).status == 200
            assert (await gateway.infer("ident")).status == 200


async def test_shared_memory_on_one_machine(valkey: RunningValkey, store: Store, tmp_path: Path) -> None:
    """A-031: register, then infer with two replicas; a third gets the region before it serves."""
    async with running_replicas(store, valkey, tmp_path, 2) as replicas, running_gateway(store, "g") as gateway:
        await gateway.until_ready(2)
        await asyncio.to_thread(_infers_through_memory, gateway, 50)
        region = f"tidegate-test-{uuid.uuid4().hex[:8]}"
        memory = shared_memory.create_shared_memory_region("kept", f"/{region}", 64)
        try:
            body = {"key": f"/{region}", "offset": 0, "byte_size": 64}
            path = "/v2/systemsharedmemory/region/kept"
            assert (await gateway.post(f"{path}/register", body)).status == 200
            again = await gateway.post(f"{path}/register", body)
            assert (again.status, b"already in manager" in again.body) == (400, True)
            regions = json.loads((await gateway.get("/v2/systemsharedmemory/status")).body)
            assert regions == [{"name": "kept", **body}]
            told = await gateway.call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest())
            [kept] = pb.SystemSharedMemoryStatusResponse.FromString(told).regions.values()
            assert (kept.name, kept.key, kept.byte_size) == ("kept", f"/{region}", 64)
            replicas.start()
            await gateway.until_ready(3)
            for port in await replicas.http_ports():
                assert json.loads((await ask(port, get("/v2/systemsharedmemory/status"))).body) == regions
            assert (await gateway.post("/v2/systemsharedmemory/unregister")).status == 200
            assert json.loads((await gateway.get(f"{path}/status")).body or b"[]") != regions
        finally:
            shared_memory.destroy_shared_memory_region(memory)
        cuda = {"raw_handle": {"b64": base64.b64encode(bytes(64)).decode()}, "device_id": 0, "byte_size": 64}
        assert (await gateway.post("/v2/cudasharedmemory/region/c/register", cuda)).status == 400


def _infers_through_memory(gateway: Gateway, times: int) -> None:
    name = f"tidegate-test-{uuid.uuid4().hex[:8]}"
    memory = shared_memory.create_shared_memory_region("io", f"/{name}", 128)
    try:
        for client_kind, port in ((triton_http, gateway.http), (triton_grpc, gateway.grpc)):
            with client_kind.InferenceServerClient(f"127.0.0.1:{port}") as client:
                client.register_system_shared_memory("io", f"/{name}", 128)
                for number in range(times // 2):
                    sent = np.arange(16, dtype=np.float32) + number
                    shared_memory.set_shared_memory_region(memory, [sent])
                    tensor = client_kind.InferInput("INPUT0", [16], "FP32")
                    tensor.set_shared_memory("io", 64)
                    output = client_kind.InferRequestedOutput("OUTPUT0")
                    output.set_shared_memory("io", 64, offset=64)
                    client.infer("ident", [tensor], outputs=[output])
                    answer = shared_memory.get_contents_as_numpy(memory, np.float32, [16], offset=64)
                    assert answer.tolist() == sent.tolist()
                client.unregister_system_shared_memory("io")
    finally:
        shared_memory.destroy_shared_memory_region(memory)


async def test_what_is_refused(valkey: RunningValkey, store: Store) -> None:
    """A-031: at once, where callers may be on another machine; operators' endpoints can be switched off."""
    async with running_gateway(store, "open", host="0.0.0.0") as gateway:
        refused = await gateway.post("/v2/systemsharedmemory/region/a/register", {"key": "/a", "byte_size": 1})
        assert (refused.status, refused.header(ERROR_KIND_HEADER)) == (501, "not_supported")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest())
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    key = ApiKeySettings(tenant="scans", sha256=digest(b"tidegate_known"), role=Role.CALLER)
    async with running_gateway(store, "keys", api_keys=(key,)) as gateway:
        load = "/v2/repository/models/ident/load"
        assert (await gateway.post(load)).status == 401
        known = await ask(gateway.http, post(load, b"", "Authorization: Bearer tidegate_known"))
        assert known.status == 403
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="ident"))
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    async with running_gateway(store, "closed", operator_endpoints=False) as gateway:
        for path in ("/v2/repository/models/ident/load", "/v2/repository/index", "/v2/logging"):
            assert (await gateway.post(path)).status == 501
        client = triton_grpc.InferenceServerClient(f"127.0.0.1:{gateway.grpc}")
        with pytest.raises(InferenceServerException, match="switched off"):
            await asyncio.to_thread(client.load_model, "ident")
        client.close()
