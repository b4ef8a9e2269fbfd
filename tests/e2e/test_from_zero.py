"""A pool at zero: callers notice nothing but the wait, and what comes back is Triton's own, byte for byte."""

import asyncio
import gzip
import json
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2

from stores.membership import ReplicaDirectory
from tests.e2e.calls import (
    CROP,
    MODEL,
    Answer,
    binary_request,
    infer_grpc,
    infer_http,
    json_request,
    raw_http,
)
from tests.e2e.system import System, running_system
from wire.membership import ReplicaState

#: Seconds between "the replica is ready" and the first byte of the answer of a request that waited for it.
READY_TO_FIRST_BYTE = 0.2
#: Headers that name a moment or a connection, not the answer.
CONNECTION_HEADERS = {"date", "connection", "keep-alive"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(
        tmp_path_factory.mktemp("zero"),
        settings={"workers": {"processes": 0}},
        pool={"scaling": {"scale_to_zero_delay_seconds": 2, "scale_down_delay_seconds": 1, "max_replicas": 1}},
    ) as running:
        yield running


async def _ready_moment(system: System, ready: list[float]) -> None:
    """Note the moment at which the lease of the coming replica says READY, as everybody else sees it."""
    async with system.store() as store:
        directory = ReplicaDirectory(store)
        async for _ in directory.changes(at_least_every_seconds=0.02):
            if any(lease.state is ReplicaState.READY for lease in await directory.list("vision")):
                ready.append(time.time())
                return


def _first_byte_after_ready(system: System, call: str) -> float:
    ready: list[float] = []
    watcher = threading.Thread(target=lambda: asyncio.run(_ready_moment(system, ready)))
    watcher.start()
    if call == "http":
        body, length = binary_request()
        answer = raw_http(
            system.http_address,
            "POST",
            f"/v2/models/{MODEL}/infer",
            body,
            {"Inference-Header-Content-Length": str(length)},
        )
        assert answer.status == 200
        answered = answer.first_byte_at
    else:
        infer_grpc(system.grpc_address)
        answered = time.time()
    watcher.join(10)
    return answered - ready[0]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_infer_from_zero_needs_no_retry(system: System, protocol: str) -> None:
    """A-039, A-040, A-047: one call is enough, and it is answered as soon as the replica is ready.

    Every wake-up must answer; on a busy machine one of three must show that nothing but the machine was slow.
    """
    waits: list[float] = []
    while len(waits) < 3 and min(waits, default=9.0) > READY_TO_FIRST_BYTE:
        system.wait_for_zero()
        waits.append(_first_byte_after_ready(system, protocol))
    assert min(waits) <= READY_TO_FIRST_BYTE, waits


def test_stock_clients_from_zero(system: System) -> None:
    """The stock clients, each from zero, without any retry; both say the same."""
    system.wait_for_zero()
    first = infer_http(system.http_address)
    system.wait_for_zero()
    second = infer_grpc(system.grpc_address)
    np.testing.assert_array_equal(first, second)


def test_questions_at_zero(system: System) -> None:
    """A-043: at zero every question has an answer, and asking does not wake the pool."""
    infer_http(system.http_address)  # a replica was there once, so its own words are known
    system.wait_for_zero()
    http = triton_http.InferenceServerClient(system.http_address)
    rpc = triton_grpc.InferenceServerClient(system.grpc_address)
    try:
        for client in (http, rpc):
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready(MODEL)
            assert not client.is_model_ready("nobody")
        assert http.get_server_metadata()["name"] == rpc.get_server_metadata().name == "triton"
        index = {row["name"] for row in http.get_model_repository_index()}
        assert index == {row.name for row in rpc.get_model_repository_index().models}
        assert index == {"segmenter", "classifier", "reader"}
        assert http.get_model_metadata(MODEL)["inputs"][0]["name"] == "x"
        assert rpc.get_model_metadata(MODEL).inputs[0].name == "x"
        assert http.get_model_config(MODEL)["backend"] == "onnxruntime"
        assert rpc.get_model_config(MODEL).config.backend == "onnxruntime"
    finally:
        http.close()
        rpc.close()
    assert not system.replica_pids()


def test_five_cycles(system: System) -> None:
    """A-043: from zero and back, five times."""
    for _ in range(5):
        system.wait_for_zero()
        infer_http(system.http_address)


@pytest.fixture(scope="module")
def replica(system: System) -> Iterator[dict[str, Any]]:
    """The lease of a replica that stays, because somebody calls it all the time."""
    enough = threading.Event()

    def call() -> None:
        while not enough.wait(0.3):
            infer_http(system.http_address)

    caller = threading.Thread(target=call)
    caller.start()
    (lease,) = system.wait_for_ready()
    yield lease
    enough.set()
    caller.join(130)


def _both(
    system: System, replica: dict[str, Any], method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[Answer, Answer]:
    """The same request to the gateway and to the Triton behind it."""
    through = raw_http(system.http_address, method, path, body, headers)
    direct = raw_http(replica["http_address"], method, path, body, headers)
    return through, direct


def _comparable(answer: Answer) -> tuple[int, list[tuple[str, str]], bytes]:
    headers = [(name, value) for name, value in answer.headers if name.lower() not in CONNECTION_HEADERS]
    return answer.status, headers, answer.body


INFER = f"/v2/models/{MODEL}/infer"
BINARY, BINARY_LENGTH = binary_request()
LENGTH = {"Inference-Header-Content-Length": str(BINARY_LENGTH)}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers"),
    [
        ("POST", INFER, json_request(), {}),
        ("POST", INFER, BINARY, LENGTH),
        ("POST", INFER, gzip.compress(json_request(), mtime=0), {"Content-Encoding": "gzip"}),
        ("POST", INFER, zlib.compress(BINARY), LENGTH | {"Content-Encoding": "deflate"}),
        ("POST", INFER, json_request(), {"Accept-Encoding": "gzip"}),
        ("POST", INFER, BINARY, LENGTH | {"Accept-Encoding": "deflate"}),
        ("POST", f"/v2/models/{MODEL}/versions/1/infer", json_request(), {}),
        ("POST", INFER, b"{", {}),
        ("POST", INFER, json_request().replace(b"FP32", b"INT8"), {}),
        ("POST", INFER, BINARY, {}),
        ("POST", f"/v2/models/{MODEL}/versions/9/infer", json_request(), {}),
        ("GET", f"/v2/models/{MODEL}", b"", {}),
        ("GET", f"/v2/models/{MODEL}/config", b"", {}),
        ("GET", f"/v2/models/{MODEL}/ready", b"", {}),
        ("GET", "/v2", b"", {}),
        ("POST", "/v2/repository/index", b"", {}),
    ],
)
def test_http_answers_are_tritons(
    system: System, replica: dict[str, Any], method: str, path: str, body: bytes, headers: dict[str, str]
) -> None:
    """Status, headers and body equal those of a direct call, compressed or not."""
    through, direct = _both(system, replica, method, path, body, headers)
    assert _comparable(through) == _comparable(direct)


@pytest.mark.parametrize(("method", "path"), [("POST", "/v2/models/nobody/infer"), ("GET", "/nowhere")])
def test_unknown_is_told_as_triton_does(system: System, replica: dict[str, Any], method: str, path: str) -> None:
    """A-020: what the gateway answers by itself has Triton's status and body, and is marked as the gateway's."""
    through, direct = _both(system, replica, method, path, b"", {})
    assert (through.status, through.body) == (direct.status, direct.body)
    assert ("tidegate-error", "not_found") in through.headers
    assert ("Content-Type", "application/json") in through.headers


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize("wrong", [False, True])
def test_grpc_answers_are_tritons(
    system: System, replica: dict[str, Any], compression: grpc.Compression, wrong: bool
) -> None:
    """The message, or the status with its words, equals that of a direct call."""
    request = service_pb2.ModelInferRequest(model_name=MODEL, id="7")
    request.inputs.add(name="x", datatype="INT8" if wrong else "FP32", shape=list(CROP.shape))
    request.raw_input_contents.append(CROP.tobytes())
    message = request.SerializeToString()

    def call(address: str) -> tuple[object, ...]:
        with grpc.insecure_channel(address) as channel:
            stub = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            try:
                return (stub(message, compression=compression, timeout=60),)
            except grpc.RpcError as error:
                return error.code(), error.details(), error.trailing_metadata()

    assert call(system.grpc_address) == call(replica["grpc_address"])


def test_json_and_binary_agree(system: System, replica: dict[str, Any]) -> None:
    """The same numbers by every way, so that equal bytes above are not equal errors."""
    through, _ = _both(system, replica, "POST", INFER, json_request(), {})
    data = json.loads(through.body)["outputs"][0]["data"]
    np.testing.assert_allclose(data, infer_grpc(system.grpc_address)[0], rtol=1e-6)
