"""Sequences through both doors: in front of real Tritons, and of scripted ones (A-030)."""

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.at_zero import AtZero
from gateway.ingress.json_part import PART_LIMIT
from gateway.ingress.rpc_door import GrpcDoor
from gateway.settings import GatewaySettings
from tests.doors import Caller, Counted, RunningDoor, ask, post, running_door
from tests.triton import running_triton
from tests.unit.test_sequences import Store, catalogue, name_for
from tests.upstream import Reply, Seen, Upstream
from wire.membership import Catalogue, ModelCatalogue, ReplicaLease, ReplicaState

SERVICE = "/inference.GRPCInferenceService/"
IDS = ("a", "b", "c")

_SUM = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            name = request.correlation_id()
            step = int(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().ravel()[0])
            before = 0 if request.flags() & 1 else self.sums.get(name, -10**6)
            self.sums[name] = before + step
            told = np.array([[self.sums[name], os.getpid()]], dtype=np.int32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", told)]))
        return answers
"""
_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 2 ] } ]
sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 64 } }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with ``segmenter``: it answers the sum of a sequence's steps, and the process that adds them."""
    version = tmp_path_factory.mktemp("seq") / "models" / "segmenter" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_SUM)
    (version.parent / "config.pbtxt").write_text(_CONFIG)
    return version.parent.parent


class Instance:
    """A gateway instance: both doors, one table of sequences."""

    def __init__(self, http: RunningDoor, channel: Any) -> None:
        self.http = http
        self.pool = http.pool
        self._channel = channel

    async def over_http(self, parameters: dict[str, Any], step: int) -> tuple[int, int] | tuple[int, str]:
        body = {
            "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [step]}],
            "parameters": parameters,
        }
        answer = await ask(self.http.port, post("/v2/models/segmenter/infer", json.dumps(body).encode()))
        if answer.status != 200:
            return answer.status, json.loads(answer.body)["error"]
        told = json.loads(answer.body)["outputs"][0]["data"]
        return told[0], told[1]

    async def over_grpc(self, parameters: dict[str, Any], step: int) -> tuple[int, int] | tuple[Any, str]:
        try:
            answer = await self._channel.unary_unary(SERVICE + "ModelInfer")(message(parameters, step))
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()
        return told_by(pb.ModelInferResponse.FromString(answer))

    def stream(self) -> Any:
        return self._channel.stream_stream(SERVICE + "ModelStreamInfer")()


def message(parameters: dict[str, Any], step: int) -> bytes:
    request = pb.ModelInferRequest(model_name="segmenter", raw_input_contents=[step.to_bytes(4, "little")])
    request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 1])
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return bytes(request.SerializeToString())


def told_by(response: Any) -> tuple[int, int]:
    raw = response.raw_output_contents[0]
    return int.from_bytes(raw[:4], "little", signed=True), int.from_bytes(raw[4:], "little")


@asynccontextmanager
async def instance(store: Store, leases: list[ReplicaLease], known: Catalogue) -> AsyncIterator[Instance]:
    async with running_door(*leases, models=("segmenter",)) as http:
        pool = http.pool
        pool.sequences.places = store
        pool.sequences.on_catalogue(known)
        door = GrpcDoor(http.router, GatewaySettings(), AtZero(http.router), Counted())
        port = await door.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                yield Instance(http, channel)
            finally:
                await door.drain(0.2)


def parameters(name: int | str, number: int, last: int) -> dict[str, Any]:
    return {"sequence_id": name, "sequence_start": number == 1, "sequence_end": number == last}


async def test_sums_are_right_over_three_replicas_and_two_instances(repository: Path, tmp_path: Path) -> None:
    """A-030: 20 sequences of 10 steps, interleaved, by HTTP, gRPC and streams, numbers and texts. Then a drain in
    the middle of sequences, and a death."""
    async with AsyncExitStack() as stack:
        tritons = await asyncio.gather(
            *(stack.enter_async_context(running_triton(repository, ["segmenter"], tmp_path / each)) for each in IDS)
        )
        leases = [
            ReplicaLease(
                id=each,
                pool="vision",
                state=ReplicaState.READY,
                http_address=addresses.http,
                grpc_address=addresses.grpc,
                models=("segmenter",),
            )
            for each, addresses in zip(IDS, tritons, strict=True)
        ]
        config = await ask(int(tritons[0].http.rpartition(":")[2]), b"GET /v2/models/segmenter/config HTTP/1.1\r\n\r\n")
        model = ModelCatalogue(metadata_http="", config_http=config.body.decode(), metadata_grpc="", config_grpc="")
        known = Catalogue(server_metadata_http="", server_metadata_grpc="", models={"segmenter": model})
        store = Store()
        one = await stack.enter_async_context(instance(store, leases, known))
        two = await stack.enter_async_context(instance(store, leases[::-1], known))
        assert one.pool.sequences.models == {"segmenter": 60.0}
        ways = [one.over_http, one.over_grpc, two.over_http, two.over_grpc]
        dice = random.Random(7)

        async def sequence(name: int | str, last: int) -> set[int]:
            places = set()
            for number in range(1, last + 1):
                total, place = await dice.choice(ways)(parameters(name, number, last), number)
                assert total == number * (number + 1) // 2, (name, number, total, place)
                places.add(int(place))
            return places

        names = [*range(1, 11), *(f"text {number}" for number in range(10))]
        places = await asyncio.gather(*(sequence(name, 10) for name in names))
        assert all(len(each) == 1 for each in places)
        assert len(set().union(*places)) == 3
        assert not one.pool.in_flight and not two.pool.in_flight

        # Two sequences start on one stream and go on by any other way; what is not there is refused by Triton.
        stream = one.stream()
        for name in ("x", "y"):
            await stream.write(message(parameters(name, 1, 9), 1))
            answer = pb.ModelStreamInferResponse.FromString(await stream.read())
            assert told_by(answer.infer_response)[0] == 1
        assert [(await way(parameters("y", 2, 9), 2))[0] for way in ways] == [3, 5, 7, 9]
        await stream.write(message(parameters("nobody", 2, 9), 1))
        assert "START" in pb.ModelStreamInferResponse.FromString(await stream.read()).error_message
        status, text = await two.over_http(parameters("nobody", 2, 9), 1)
        assert (status, "must specify the START flag" in str(text)) == (400, True)

        # The replica of "x" and "y" drains: they go on there, the stream too; what starts goes elsewhere.
        home = store.there["s:x"]
        draining = [
            lease.model_copy(update={"state": ReplicaState.DRAINING}) if lease.id == home else lease for lease in leases
        ]
        for each in (one, two):
            each.pool.update(draining)
        assert (await two.over_http(parameters("y", 2, 9), 1))[0] == 10
        for number in range(100, 110):
            await one.over_grpc(parameters(number, 1, 2), 1)
            assert store.there[f"n:{number}"] != home
        await stream.write(message(parameters("y", 9, 9), 1))
        assert told_by(pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response)[0] == 11
        await stream.write(message(parameters("x", 9, 9), 1))
        assert told_by(pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response)[0] == 2
        with pytest.raises(grpc.aio.AioRpcError) as left:
            await stream.read()
        assert left.value.code() is grpc.StatusCode.UNAVAILABLE

        # The replicas of what runs now die: nothing is restarted in silence.
        for each in (one, two):
            each.pool.update([lease for lease in leases if lease.id == home])
        status, text = await one.over_http(parameters(100, 2, 2), 1)
        assert status == 409 and text == (
            "the replica that held sequence 100 of model 'segmenter' is gone, and the sequence's state with it; "
            "start the sequence again"
        )
        assert (await two.over_grpc(parameters(100, 2, 2), 1))[0] is grpc.StatusCode.ABORTED
        assert await one.over_grpc(parameters(100, 1, 2), 1) != (409, text)


# -- scripted replicas -------------------------------------------------------------------------------------


def body_of(name: str, *flags: str, filler: int = 0) -> bytes:
    said = {"sequence_id": name} | {f"sequence_{flag}": True for flag in flags}
    return json.dumps({"inputs": [{"name": "INPUT0", "data": [0] * filler}], "parameters": said}).encode()


@asynccontextmanager
async def two_replicas() -> AsyncIterator[tuple[RunningDoor, dict[str, Upstream]]]:
    """Scripted replicas ``a`` and ``b`` that say their name."""
    async with Upstream(lambda seen: Reply(body=b"a")) as a, Upstream(lambda seen: Reply(body=b"b")) as b:
        leases = [each.lease(name, models=("segmenter", "classifier")) for name, each in (("a", a), ("b", b))]
        async with running_door(*leases, models=("segmenter", "classifier")) as running:
            running.pool.sequences.on_catalogue(catalogue())
            yield running, {"a": a, "b": b}


INFER = "/v2/models/segmenter/infer"


async def test_a_body_is_looked_into_however_it_comes() -> None:
    name = name_for("b", "a", "b")[2:]
    plain = body_of(name, "start").replace(f'"{name}"'.encode(), name.encode())
    length = f"Inference-Header-Content-Length: {len(plain)}"
    packed = gzip.compress(plain + b"\x00{" * 50)
    async with two_replicas() as (running, _):
        chunks = b"".join(b"1\r\n%b\r\n" % plain[at : at + 1] for at in range(len(plain))) + b"0\r\n\r\n"
        head = f"POST {INFER} HTTP/1.1\r\nHost: t\r\n"
        for raw in (
            post(INFER, plain),
            post(INFER, plain + bytes(200000), length),
            post(INFER, packed, length, "Content-Encoding: gzip"),
            f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks,
        ):
            answer = await ask(running.port, raw)
            assert answer.body == b"b"
        async with await Caller.open(running.port) as caller:
            caller.send(f"{head}Expect: 100-continue\r\nContent-Length: {len(plain)}\r\n\r\n".encode())
            assert (await caller.answer()).status == 100
            caller.send(plain[:30])
            await asyncio.sleep(0.02)
            caller.send(plain[30:])
            assert (await caller.answer()).body == b"b"


async def test_a_json_part_that_is_too_long_to_be_looked_into_is_refused() -> None:
    """For a sequence model only: others' bodies are not looked into."""
    body = body_of("x", "start", filler=PART_LIMIT // 2)
    async with two_replicas() as (running, replicas):
        answer = await ask(running.port, post(INFER, body))
        assert answer.status == 413 and b"1048576" in answer.body
        assert not any(each.seen for each in replicas.values())
        assert (await ask(running.port, post("/v2/models/classifier/infer", body))).status == 200


async def test_a_draining_replica_keeps_one_connection_while_it_holds_a_sequence() -> None:
    """That is what it waits for (ADR 4), by whichever door the sequence came."""
    async with two_replicas() as (running, replicas):
        name = name_for("a", "a", "b")[2:]
        start = body_of(name, "start").replace(f'"{name}"'.encode(), name.encode())
        go_on = start.replace(b'"sequence_start": true', b'"x": 1')
        end = go_on.replace(b'"x": 1', b'"sequence_end": true')
        await asyncio.gather(*(ask(running.port, post(INFER, start)) for _ in range(5)))
        leaving = replicas["a"]
        away = {"state": ReplicaState.DRAINING}
        running.pool.update(
            [lease.model_copy(update=away) if lease.id == "a" else lease for lease in running.pool.replicas]
        )
        await _until(lambda: leaving.connections == 1)
        assert (await ask(running.port, post(INFER, go_on))).body == b"a"
        leaving.drop_connections()
        await _until(lambda: leaving.connections == 0)
        assert (await ask(running.port, post(INFER, go_on))).body == b"a"
        assert leaving.connections == 1
        assert (await ask(running.port, post(INFER, end))).body == b"a"
        await _until(lambda: leaving.connections == 0)
        assert (await ask(running.port, post(INFER, start))).body == b"b"


async def test_a_failed_end_ends_nothing() -> None:
    answers = iter([200, 500, 200, 200])

    def answer(seen: Seen) -> Reply:
        return Reply(status=next(answers))

    async with Upstream(answer) as only:
        async with running_door(only.lease("a", models=("segmenter",)), models=("segmenter",)) as running:
            running.pool.sequences.on_catalogue(catalogue())
            for flags, left in ((("start",), 1), (("end",), 1), (("end",), 0)):
                await ask(running.port, post(INFER, body_of("x", *flags)))
                assert len(running.pool.sequences) == left


async def _until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
