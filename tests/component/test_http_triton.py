"""The HTTP door in front of a real Triton: every answer equals that of a direct call."""

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop

from tests.doors import Answer, Caller, get, post, running_door
from tests.triton import running_triton
from wire.errors import ERROR_KIND_HEADER
from wire.membership import ReplicaLease, ReplicaState

LOOP_FACTORY = uvloop.new_event_loop

MODEL = "/v2/models/ident"
JSON = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "FP32", "data": [0.1, 2, -3, 4e9]}]}
).encode()
MIXED_HEAD = json.dumps(
    {
        "id": "a/ü 1",
        "inputs": [{"name": "INPUT0", "shape": [4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}],
        "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
    }
).encode()
MIXED = MIXED_HEAD + bytes(range(16))
LENGTH = f"Inference-Header-Content-Length: {len(MIXED_HEAD)}"

SAME = {
    "json": post(f"{MODEL}/infer", JSON),
    "binary": post(f"{MODEL}/infer", MIXED, LENGTH),
    "version": post(f"{MODEL}/versions/1/infer", JSON),
    "gzip in": post(f"{MODEL}/infer", gzip.compress(JSON), "Content-Encoding: gzip"),
    "gzip out": post(f"{MODEL}/infer", JSON, "Accept-Encoding: gzip"),
    "deflate both": post(
        f"{MODEL}/infer", zlib.compress(MIXED), LENGTH, "Content-Encoding: deflate", "Accept-Encoding: deflate"
    ),
    "identity": post(f"{MODEL}/infer", JSON, "Accept-Encoding: identity"),
    "A-001 no length": post(f"{MODEL}/infer", MIXED),
    "A-001 length too large": post(f"{MODEL}/infer", MIXED, f"Inference-Header-Content-Length: {len(MIXED) + 1}"),
    "A-001 length is no number": post(f"{MODEL}/infer", MIXED, "Inference-Header-Content-Length: abc"),
    "empty body": post(f"{MODEL}/infer", b""),
    "broken json": post(f"{MODEL}/infer", b"{"),
    "unknown encoding": post(f"{MODEL}/infer", JSON, "Content-Encoding: br"),
    "server": get("/v2"),
    "metadata": get(MODEL),
    "metadata with a query": get(f"{MODEL}?a=b"),
    "config": get(f"{MODEL}/config"),
    "ready": get(f"{MODEL}/ready"),
    "ready, version": get(f"{MODEL}/versions/01/ready"),
    "ready, no such version": get(f"{MODEL}/versions/7/ready"),
    "no such version": post(f"{MODEL}/versions/99/infer", JSON),
    "version over int64": get(f"{MODEL}/versions/99999999999999999999"),
    "index": post("/v2/repository/index"),
    "index, named": post("/v2/repository/any/index", b'{"ready":true}'),
    "trace": get(f"{MODEL}/trace/setting"),
    "logging": get("/v2/logging"),
    "absolute": get(MODEL).replace(b"GET ", b"GET http://host"),
}

#: A-016: answered by the gateway itself where Triton answers without a model; status and body are the same.
ALIKE = {
    "health": get("/v2/health/live"),
    "ready": get("/v2/health/ready"),
    "trailing slash": get(f"{MODEL}/"),
    "trailing slash, infer": post(f"{MODEL}/infer/", JSON),
    "double slash": get("//v2/models/ident"),
    "double slash inside": get("/v2//models/ident"),
    "encoded name": get("/v2/models/i%64ent"),
    "HEAD": get(MODEL, method="HEAD"),
    "PUT": get(MODEL, method="PUT"),
    "OPTIONS": get(MODEL, method="OPTIONS"),
    "GET infer": get(f"{MODEL}/infer"),
    "POST metadata": post(MODEL),
    "version 1.0.0": post(f"{MODEL}/versions/1.0.0/infer", JSON),
    "version -1": post(f"{MODEL}/versions/-1/infer", JSON),
    "unknown model": post("/v2/models/nope/infer", JSON),
    "unknown model, config": get("/v2/models/nope/config"),
    "unknown model, ready": get("/v2/models/nope/ready"),
    "unknown model, stats": get("/v2/models/nope/stats"),
    "no such path": get("/"),
    "metrics": get("/metrics"),
}


@dataclass
class Pair:
    direct: int
    routed: int

    async def ask(self, raw: bytes) -> tuple[Answer, Answer]:
        answers = []
        for port in (self.direct, self.routed):
            async with await Caller.open(port) as caller:
                caller.send(raw)
                answers.append(await caller.answer(head_only=raw.startswith(b"HEAD")))
        return answers[0], answers[1]


@pytest.fixture
async def pair(echo_repository: Path, tmp_path: Path) -> AsyncIterator[Pair]:
    async with running_triton(echo_repository, ["ident"], tmp_path) as triton:
        lease = ReplicaLease(
            id="r", pool="vision", state=ReplicaState.READY, http_address=triton.http, models=("ident",)
        )
        async with running_door(lease) as door:
            yield Pair(int(triton.http.rpartition(":")[2]), door.port)


async def test_answers_equal_those_of_a_direct_call(pair: Pair) -> None:
    """A-001, A-002, A-016."""
    for name, raw in SAME.items():
        direct, routed = await pair.ask(raw)
        assert routed.raw == direct.raw, name
        assert routed.header(ERROR_KIND_HEADER) is None
    for name, raw in ALIKE.items():
        direct, routed = await pair.ask(raw)
        assert (routed.status, routed.body) == (direct.status, direct.body), name


async def test_one_connection_carries_good_and_bad_requests(pair: Pair) -> None:
    """A-001: the same socket stays usable."""
    async with await Caller.open(pair.routed) as caller:
        statuses = [(await caller.ask(raw)).status for name, raw in SAME.items() if "A-001" in name or name == "binary"]
        assert statuses == [200, 400, 400, 400]
        assert (await caller.ask(SAME["binary"])).status == 200
        compressed = await caller.ask(SAME["gzip out"])
        assert compressed.header("content-encoding") == "gzip"
        assert json.loads(gzip.decompress(compressed.body))["model_name"] == "ident"
        plain = await caller.ask(SAME["identity"])
        assert plain.header("content-encoding") is None
        assert json.loads(plain.body)["model_name"] == "ident"


async def test_a_chunked_body_and_one_that_was_asked_for(pair: Pair) -> None:
    """A-004 against the real thing."""
    async with await Caller.open(pair.routed) as caller:
        head = f"POST {MODEL}/infer HTTP/1.1\r\nHost: x\r\n".encode()
        chunks = b"".join(
            b"%x\r\n%b\r\n" % (len(JSON[at : at + 7]), JSON[at : at + 7]) for at in range(0, len(JSON), 7)
        )
        chunked = await caller.ask(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert (
            await caller.ask(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(JSON))
        ).status == 100
        asked_for = await caller.ask(JSON)
        assert chunked.status == asked_for.status == 200
        assert chunked.body == asked_for.body
