"""One answer out of those of several replicas, and what a call of an operator asks for."""

import asyncio
import json
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.at_zero import AtZero
from gateway.ingress.http_routes import route
from gateway.pool_wide import merging, messages, service
from gateway.pool_wide.from_grpc import can_be_asked, read_operation
from gateway.pool_wide.from_http import read_operation as read_http
from gateway.pool_wide.operations import Asked, Operation
from gateway.pool_wide.service import PoolWide, is_loopback
from gateway.routing.pool import Pool
from wire.changes import Call, CallAnswer, CallProtocol, Change, Numbered
from wire.errors import ErrorKind, TidegateError
from wire.membership import Catalogue, ModelCatalogue, ReplicaLease, ReplicaState
from wire.pools import ModelSettings, PoolSettings


def _duration(count: int) -> dict[str, int]:
    return {"count": count, "ns": count * 100}


def _model(name: str = "m", version: str = "1", count: int = 1, **more: Any) -> dict[str, Any]:
    durations = {"success": _duration(count), "fail": _duration(0), "queue": _duration(count)}
    return {
        "name": name,
        "version": version,
        "last_inference": count * 7,
        "inference_count": count,
        "execution_count": count,
        "inference_stats": durations,
        "response_stats": {},
        "batch_stats": [{"batch_size": count, "compute_input": _duration(1), "compute_infer": _duration(count)}],
        "memory_usage": [],
    } | more


def test_statistics_are_summed_by_model_and_version() -> None:
    one = {"model_stats": [_model(count=5), _model("other")]}
    two = {"model_stats": [_model(count=3), _model(version="2")]}
    merged = merging.statistics([one, two])["model_stats"]
    assert [(model["name"], model["version"]) for model in merged] == [("m", "1"), ("other", "1"), ("m", "2")]
    first = merged[0]
    assert (first["inference_count"], first["execution_count"], first["last_inference"]) == (8, 8, 35)
    assert first["inference_stats"]["success"] == {"count": 8, "ns": 800}
    assert [entry["batch_size"] for entry in first["batch_stats"]] == [3, 5]
    assert one["model_stats"][0]["inference_count"] == 5  # what was given is left as it is


def test_batches_of_one_size_and_responses_of_one_place_are_summed_memory_is_kept() -> None:
    usage = [{"type": "GPU", "id": 0, "byte_size": 10}]
    responses = {"0": {"success": _duration(2)}}
    one = _model(count=4, memory_usage=usage, response_stats=responses)
    two = _model(count=4, memory_usage=usage, response_stats={**responses, "1": {"success": _duration(1)}})
    [merged] = merging.statistics([{"model_stats": [one]}, {"model_stats": [two]}])["model_stats"]
    assert merged["batch_stats"] == [
        {"batch_size": 4, "compute_input": {"count": 2, "ns": 200}, "compute_infer": {"count": 8, "ns": 800}}
    ]
    assert merged["memory_usage"] == usage * 2
    assert merged["response_stats"] == {
        "0": {"success": {"count": 4, "ns": 400}},
        "1": {"success": {"count": 1, "ns": 100}},
    }


def test_an_index_is_united_the_best_state_wins() -> None:
    """A-064."""
    ready = {"name": "a", "version": "1", "state": "READY"}
    gone = {"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert merging.index([[gone, {"name": "b"}], [ready, {"name": "b"}]]) == [
        ready | {"reason": "unloaded"},
        {"name": "b"},
    ]
    assert merging.index([[{"name": "a"}], [gone]]) == [gone]
    assert merging.index([[{"name": "c", "state": "READY"}], []]) == [{"name": "c", "state": "READY"}]


def test_merged_answers_as_messages() -> None:
    usage = [{"type": "GPU", "id": 1, "byte_size": 10}]
    document = {"model_stats": [_model(count=300, memory_usage=usage, response_stats={"0": {"success": _duration(2)}})]}
    [model] = pb.ModelStatisticsResponse.FromString(
        messages.message(Operation.STATISTICS, "ModelStatistics", document)
    ).model_stats
    assert (model.name, model.version, model.last_inference, model.inference_count) == ("m", "1", 2100, 300)
    assert (model.inference_stats.success.count, model.inference_stats.queue.ns) == (300, 30000)
    assert [(each.batch_size, each.compute_infer.ns) for each in model.batch_stats] == [(300, 30000)]
    assert [(each.type, each.id, each.byte_size) for each in model.memory_usage] == [("GPU", 1, 10)]
    assert model.response_stats["0"].success.count == 2
    index = messages.message(
        Operation.INDEX, "RepositoryIndex", [{"name": "a", "state": "UNAVAILABLE", "reason": "unloaded"}]
    )
    same = pb.RepositoryIndexResponse.ModelIndex(name="a", state="UNAVAILABLE", reason="unloaded")
    assert index == pb.RepositoryIndexResponse(models=[same]).SerializeToString()
    regions = [{"name": "r", "device_id": 1, "byte_size": 8}]
    [region] = pb.CudaSharedMemoryStatusResponse.FromString(
        messages.message(Operation.REGIONS, "CudaSharedMemoryStatus", regions)
    ).regions.values()
    assert (region.name, region.device_id, region.byte_size) == ("r", 1, 8)


def _http(status: int, error: str = "") -> CallAnswer:
    return CallAnswer(replica="r", status=status, body=json.dumps({"error": error}).encode() if error else b"")


def test_what_replicas_agree_on_is_passed_on_a_single_failure_is_counted() -> None:
    bad = _http(400, "no room")
    assert merging.agreed([_http(200), _http(200)], CallProtocol.HTTP).status == 200
    assert merging.agreed([bad, bad], CallProtocol.HTTP) == bad
    mixed = merging.agreed([_http(200), bad, bad], CallProtocol.HTTP)
    assert (mixed.status, json.loads(mixed.body)) == (400, {"error": "no room (on 2 of 3 replicas)"})
    refused = CallAnswer(replica="r", status=3, details="no room")
    assert merging.agreed([CallAnswer(replica="r", status=0), refused], CallProtocol.GRPC).details == (
        "no room (on 1 of 2 replicas)"
    )
    lost = CallAnswer(replica="r", status=0, unreachable="gone")
    assert merging.agreed([_http(200), lost], CallProtocol.HTTP).unreachable == "gone (on 1 of 2 replicas)"


@pytest.mark.parametrize(
    ("method", "request_", "path", "raw", "same"),
    [
        (
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(
                model_name="m", parameters={"config": pb.ModelRepositoryParameter(string_param="{}")}
            ),
            "/v2/repository/models/m/load",
            b'{"parameters":{"config":"{}"}}',
            ("m", ("config",), "m"),
        ),
        (
            "TraceSetting",
            pb.TraceSettingRequest(settings={"trace_rate": {}, "log_frequency": {}}, model_name="m"),
            "/v2/models/m/trace/setting",
            b'{"trace_rate":null,"log_frequency":"1"}',
            ("m", ("log_frequency", "trace_rate"), "trace:m:log_frequency,trace_rate"),
        ),
        (
            "LogSettings",
            pb.LogSettingsRequest(settings={"log_info": {"bool_param": False}}),
            "/v2/logging",
            b'{"log_info":false}',
            (None, ("log_info",), "log::log_info"),
        ),
        (
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(name="r", key="/k", offset=1, byte_size=2),
            "/v2/systemsharedmemory/region/r/register",
            b'{"key":"/k","offset":1,"byte_size":2}',
            (None, (), "system/r"),
        ),
        (
            "CudaSharedMemoryUnregister",
            pb.CudaSharedMemoryUnregisterRequest(),
            "/v2/cudasharedmemory/unregister",
            b"",
            (None, (), "cuda/"),
        ),
    ],
)
def test_both_protocols_ask_for_the_same(method: str, request_: Any, path: str, raw: bytes, same: Any) -> None:
    asked = route(path.encode())
    assert asked is not None and asked.operation is not None and asked.for_operators
    for got in (
        read_operation(asked.operation, method, request_.SerializeToString()),
        read_http(asked.operation, asked.model, "POST", path, raw),
    ):
        assert (got.model, tuple(sorted(got.names)), got.about) == same
        assert got.changes


def test_what_is_read_over_grpc_is_asked_over_http() -> None:
    asked = read_operation(
        Operation.STATISTICS, "ModelStatistics", pb.ModelStatisticsRequest(name="m", version="3").SerializeToString()
    )
    assert (asked.method, asked.path, asked.changes) == ("GET", "/v2/models/m/versions/3/stats", False)
    index = read_operation(
        Operation.INDEX, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True).SerializeToString()
    )
    assert (index.method, json.loads(index.body)) == ("POST", {"ready": True})
    odd = pb.ModelStatisticsRequest(name="a b").SerializeToString()
    assert not can_be_asked(read_operation(Operation.STATISTICS, "ModelStatistics", odd))
    assert not read_operation(Operation.TRACE, "TraceSetting", b"").changes
    with pytest.raises(ValueError, match="protobuf"):
        read_operation(Operation.LOAD, "RepositoryModelLoad", b"\x0a\xff")


def test_a_body_that_makes_no_sense_is_left_to_triton() -> None:
    for raw in (b"{", b"3", b'{"parameters":3}'):
        asked = read_http(Operation.LOAD, "m", "POST", "/v2/repository/models/m/load", raw)
        assert asked.names and asked.call.body == raw


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.0.1", "localhost", "::1", "[::1]")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "", "gateway")),
    ],
)
def test_what_can_be_reached_from_this_machine_only(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


# -- over several pools -----------------------------------------------------------------------------------


class _Pools:
    """Pools ``a`` (one replica, models ``a1`` and ``ens``) and ``b`` (at zero, models ``b1`` and ``b2``)."""

    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.pools = {
            name: Pool(name, _settings(*models), clock=clock, on_wanted=lambda _: None)
            for name, models in (("a", ("a1", "ens")), ("b", ("b1", "b2")))
        }
        ready = ReplicaLease(id="r", pool="a", state=ReplicaState.READY, models=("a1",), http_address="127.0.0.1:1")
        self.pools["a"].update([ready])

    def pool_of(self, model: str) -> Pool:
        for pool in self.pools.values():
            if model in pool.settings.model_names:
                return pool
        raise TidegateError(ErrorKind.NOT_FOUND, "not found")

    async def refresh(self, pool: Pool) -> None: ...


def _settings(*models: str) -> PoolSettings:
    return PoolSettings(models=tuple(ModelSettings(name=model) for model in models))


class _Changes:
    """Keeps what is written down; every ready replica answers well."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Change]] = []

    async def append(self, pool: str, change: Change, call: Call) -> Numbered:
        self.kept.append((pool, change))
        return Numbered(id=f"1-{len(self.kept)}", change=change)

    async def next_answer(self, pool: str, token: str) -> CallAnswer:
        return _http(200)

    async def after(self, pool: str, last_id: str = "") -> list[Numbered]:
        return []

    async def forget(self, pool: str, changes: Any) -> None: ...


def _pool_wide(pools: _Pools, changes: _Changes) -> PoolWide:
    return PoolWide(pools, changes, AtZero(pools), host="127.0.0.1", operator_endpoints=True)  # type: ignore[arg-type]


def _asked(operation: Operation, path: str, raw: bytes = b"", model: str | None = None) -> Asked:
    return read_http(operation, model, "POST", path, raw)


async def test_an_index_has_the_pools_at_zero_too(monkeypatch: pytest.MonkeyPatch) -> None:
    index = [{"name": "a1", "version": "1", "state": "READY"}, {"name": "ens"}]

    async def ask(replica: ReplicaLease, method: str, path: str, body: bytes) -> CallAnswer:
        assert (replica.id, method, path) == ("r", "POST", "/v2/repository/index")
        return CallAnswer(replica="r", status=200, body=json.dumps(index).encode())

    monkeypatch.setattr(service, "ask", ask)
    pools = _Pools()
    pools.pools["b"].unloaded = frozenset(("b2",))
    pool_wide = _pool_wide(pools, _Changes())
    assert not pool_wide.is_for_one(Operation.INDEX, None, changes=False)
    answer = await pool_wide.answer(_asked(Operation.INDEX, "/v2/repository/index"), deadline=None)
    b1 = {"name": "b1", "state": "READY"}
    b2 = {"name": "b2", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert json.loads(answer.body) == [*index[:1], b1, b2, index[1]]
    ready = _asked(Operation.INDEX, "/v2/repository/index", b'{"ready":true}')
    assert b2 not in json.loads((await pool_wide.answer(ready, deadline=None)).body)


async def test_settings_go_to_all_pools_and_are_kept_for_those_at_zero() -> None:
    changes = _Changes()
    answer = await _pool_wide(_Pools(), changes).answer(
        _asked(Operation.LOG, "/v2/logging", b'{"log_info":false}'), deadline=None
    )
    assert answer.status == 200
    assert sorted(pool for pool, _ in changes.kept) == ["a", "b"]


async def test_an_ensemble_may_go_with_its_parts() -> None:
    pools, changes = _Pools(), _Changes()
    config = {"name": "ens", "ensemble_scheduling": {"step": [{"model_name": "a1"}, {"model_name": "a1"}]}}
    known = ModelCatalogue(metadata_http="{}", config_http=json.dumps(config), metadata_grpc="", config_grpc="")
    pools.pools["a"].catalogue = Catalogue(server_metadata_http="{}", server_metadata_grpc="", models={"ens": known})
    raw = b'{"parameters":{"unload_dependents":true}}'
    path = "/v2/repository/models/ens/unload"
    await _pool_wide(pools, changes).answer(_asked(Operation.UNLOAD, path, raw, "ens"), deadline=None)
    [(pool, change)] = changes.kept
    assert (pool, change.models) == ("a", ("ens", "a1"))


async def test_a_file_name_that_ends_triton_is_refused_and_no_other() -> None:
    pools, changes = _Pools(), _Changes()
    for name, refused in (("x" * 255, False), ("x" * 256, True), ("ü" * 128, True)):
        raw = json.dumps({"parameters": {"config": "{}", f"file:1/{name}/a": ""}}).encode()
        load = _asked(Operation.LOAD, "/v2/repository/models/a1/load", raw, "a1")
        try:
            await _pool_wide(pools, changes).answer(load, deadline=None)
        except TidegateError as error:
            assert refused and error.kind is ErrorKind.BAD_REQUEST
        else:
            assert not refused
    assert len(changes.kept) == 1
