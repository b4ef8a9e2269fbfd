"""Replicas that fail, or send requests away: what goes elsewhere, what is repeated, what the caller is told."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.component.test_rpc_door import infer, until
from tests.component.test_rpc_door import running_door as rpc_door
from tests.doors import RunningDoor, ask, post, running_door
from tests.h2_peer import replica
from tests.triton import running_triton
from tests.upstream import Reply, Seen, Upstream, echo
from tests.upstream_grpc import running_upstream
from wire.errors import ERROR_KIND_HEADER
from wire.membership import ReplicaLease, ReplicaState
from wire.pools import ModelSettings, PoolSettings, RoutingSettings

INFER = "/v2/models/ident/infer"
FULL = Reply(status=503, body=b'{"error":"[request id: <id_unknown>] Exceeds maximum queue size"}')
UNLOADED = Reply(status=404, body=b'{"error":"Request for unknown model: \'ident\' has no available versions"}')


def pools(*, repeatable: bool, **routing: Any) -> dict[str, PoolSettings]:
    models = (ModelSettings(name="ident", repeatable=repeatable), ModelSettings(name="slow"))
    return {"vision": PoolSettings(models=models, routing=RoutingSettings(**routing))}


# -- sent away ---------------------------------------------------------------------------------------------


async def test_a_full_queue_is_told_with_a_time_to_come_back_and_ejects_nobody() -> None:
    """A-021: a whole number of seconds; what Triton says stays as it is."""
    async with Upstream(lambda seen: FULL) as upstream, running_door(upstream.lease()) as door:
        for _ in range(5):
            answer = await ask(door.port, post(INFER))
            assert (answer.status, answer.body, answer.header(ERROR_KIND_HEADER)) == (503, FULL.body, None)
            assert int(answer.header("retry-after") or 0) >= 1
        upstream.answer = echo
        assert (await ask(door.port, post(INFER))).status == 200
        assert len(upstream.seen) == 6


@pytest.mark.parametrize("reply", [FULL, UNLOADED])
async def test_what_one_replica_sends_away_another_takes(reply: Reply) -> None:
    """A-021; a replica that unloads the model is not ill, and its caller need not know."""
    async with Upstream(lambda seen: reply) as away, Upstream() as there:
        async with running_door(away.lease("a"), there.lease("b")) as door:
            for number in range(6):
                body = b'{"n":%d}' % number
                answer = await ask(door.port, post(INFER, body))
                assert (answer.status, answer.body) == (200, body)
            assert len(there.seen) == 6 and 1 <= len(away.seen) <= 6
            await door.settled()
            assert away.connections == 1  # the answer was whole: its connection is good


async def test_a_request_without_another_replica_gets_tritons_words() -> None:
    async with Upstream(lambda seen: UNLOADED) as upstream, running_door(upstream.lease()) as door:
        answer = await ask(door.port, post(INFER))
        assert (answer.status, answer.body) == (404, UNLOADED.body)
        assert answer.header("retry-after") is None and len(upstream.seen) == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [("14", "Exceeds maximum queue size"), ("5", "Request for unknown model: 'ident' has no available versions")],
)
async def test_a_call_that_one_replica_sends_away_another_takes(status: str, message: str) -> None:
    """A-021, over gRPC: elsewhere if there is a replica, else Triton's words, and when to come back."""
    async with replica() as away, replica() as there:

        def refuse(peer: Any, event: Any) -> None:
            if type(event).__name__ == "StreamEnded":
                fields = [(":status", "200"), ("content-type", "application/grpc")]
                fields += [("grpc-status", status), ("grpc-message", message)]
                peer.h2.send_headers(event.stream_id, fields, end_stream=True)
                peer.flush()

        away.script = refuse
        async with rpc_door(away.lease("a"), there.lease("b")) as door:
            for number in range(4):
                request = infer(id=str(number))
                assert await door.call("ModelInfer", request) == request
            assert len(there.calls) == 4 and away.calls
            door.pool.update([away.lease("a")])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await door.call("ModelInfer", infer())
            assert refused.value.code().value[0] == int(status) and refused.value.details() == message
            told = dict(refused.value.trailing_metadata() or ())
            assert ("retry-after" in told) == (status == "14") and ERROR_KIND_HEADER not in told
            assert door.pool.in_flight == 0


async def test_a_refusal_of_triton_is_not_repeated() -> None:
    """A-029: UNIMPLEMENTED for a model of many answers passes through, after one try, repeatable or not."""
    async with running_upstream() as upstream:
        words = "ModelInfer RPC doesn't support models with decoupled transaction policy"

        async def refuse(message: bytes, context: Any) -> bytes:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, words)
            return b""

        upstream.unary = refuse
        async with rpc_door(upstream.lease()) as door:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await door.call("ModelInfer", infer())
            assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, words)
        assert len(upstream.seen) == 1
    said = Reply(status=501, body=b'{"error":"HTTP end point doesn\'t support models with decoupled policy"}')
    async with Upstream(lambda seen: said) as one:
        async with running_door(one.lease(), pools=pools(repeatable=True)) as door_:
            assert (await ask(door_.port, post(INFER))).status == 501
        assert len(one.seen) == 1


# -- connections that break --------------------------------------------------------------------------------


def hang_up(seen: Seen) -> Reply:
    """The whole request is there, and the connection goes."""
    raise ConnectionResetError


async def test_what_may_have_run_is_repeated_only_where_that_is_declared() -> None:
    """A-023: read whole, counted, dropped. Not declared: as many runs as calls. Declared: up to three repeats each,
    and the budget's share in all."""
    async with Upstream(hang_up) as upstream:
        async with running_door(upstream.lease(), pools=pools(repeatable=False)) as door:
            answers = [await ask(door.port, post(INFER)) for _ in range(20)]
            assert {(a.status, a.header(ERROR_KIND_HEADER)) for a in answers} == {(502, "replica_lost")}
            assert len(upstream.seen) == 20
        upstream.seen.clear()
        async with running_door(upstream.lease(), pools=pools(repeatable=True)) as door:
            answers = await asyncio.gather(*(ask(door.port, post(INFER)) for _ in range(20)))
            assert {a.status for a in answers} == {502}
            assert 20 < len(upstream.seen) <= 20 + 10 + 2
            await door.settled()


async def test_a_repeat_succeeds_and_is_seen_by_nobody() -> None:
    """A-023: the connection broke once."""
    left = [1]

    def answer(seen: Seen) -> Reply:
        if left:
            left.pop()
            raise ConnectionResetError
        return echo(seen)

    async with Upstream(answer) as upstream:
        async with running_door(upstream.lease(), pools=pools(repeatable=True)) as door:
            body = b"x" * 3000
            answer_ = await ask(door.port, post(INFER, body))
            assert (answer_.status, answer_.body) == (200, body)
            assert [told["status"] for told in door.counted.requests] == [200]


async def test_nothing_is_repeated_after_a_replica_has_died() -> None:
    """It may have died of the request: a second replica is not risked, whatever is declared."""
    async with Upstream(lambda seen: Reply(delay_seconds=10)) as dying, Upstream() as other:
        async with running_door(dying.lease("a"), pools=pools(repeatable=True)) as door:
            calls = [asyncio.create_task(ask(door.port, post(INFER))) for _ in range(3)]
            await until(lambda: dying.running == 3)
            door.pool.update([dying.lease("a"), other.lease("b")])
            await dying.stop()
            answers = await asyncio.gather(*calls)
            assert {(a.status, a.header(ERROR_KIND_HEADER)) for a in answers} == {(502, "replica_lost")}
            assert not other.seen
            assert (await ask(door.port, post(INFER))).status == 200


async def test_calls_are_repeated_by_the_same_rules() -> None:
    """A-023, over gRPC: dropped when whole, and alive: repeated where declared; dead: never."""
    async with running_upstream() as upstream:
        began = asyncio.Event()

        async def hang_once(message: bytes, context: Any) -> bytes:
            if not began.is_set():
                began.set()
                await asyncio.sleep(60)
            return message

        upstream.unary = hang_once
        for repeatable, survives in ((False, True), (True, True), (True, False)):
            began.clear()
            async with rpc_door(upstream.lease(), settings={"connect_timeout_seconds": 1.0}) as door:
                door.pool.faults.repeatable = frozenset(("ident",)) if repeatable else frozenset()
                call = asyncio.ensure_future(_outcome(door.call("ModelInfer", infer())))
                await began.wait()
                if not survives:
                    upstream.wire.refuse()
                upstream.wire.cut()
                good = repeatable and survives
                assert await call == (infer() if good else (grpc.StatusCode.UNAVAILABLE, "replica_lost"))
                await until(lambda door=door: door.pool.in_flight == 0)  # type: ignore[misc]


async def _outcome(call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error.code(), dict(error.trailing_metadata() or ()).get(ERROR_KIND_HEADER)


async def test_connections_that_went_stale_cost_nobody_anything() -> None:
    """A-034: the replica closes what is idle, at any moment; nothing fails."""
    async with Upstream() as upstream, running_door(upstream.lease()) as door:
        for pause in (0.0, 0.001, 0.02) * 10:
            assert (await ask(door.port, post(INFER))).status == 200
            upstream.drop_connections()
            await asyncio.sleep(pause)


# -- replicas that say nothing -----------------------------------------------------------------------------


async def test_a_frozen_replica_holds_requests_for_no_longer_than_the_limit() -> None:
    """A-035: those on it fail at the limit, or are repeated where that is declared; it is left alone for a moment."""
    async with Upstream(lambda seen: Reply(delay_seconds=30)) as frozen, Upstream() as well:
        limited = {"first_byte_limit_seconds": 0.3}
        async with running_door(frozen.lease("a"), pools=pools(repeatable=False, **limited)) as door:
            began = time.monotonic()
            answer = await ask(door.port, post(INFER))
            assert (answer.status, answer.header(ERROR_KIND_HEADER)) == (502, "replica_lost")
            assert time.monotonic() - began > 0.29 and b"first_byte_limit_seconds" in answer.body
            await until(lambda: frozen.seen[0].left_early)
            door.pool.update([frozen.lease("a"), well.lease("b")])
            assert [(await ask(door.port, post(INFER))).status for _ in range(4)] == [200] * 4
        async with running_door(frozen.lease("a"), pools=pools(repeatable=True, **limited)) as door:
            call = asyncio.create_task(ask(door.port, post(INFER)))
            await until(lambda: door.pool.in_flight == 1)
            door.pool.update([frozen.lease("a"), well.lease("b")])
            assert (await call).status == 200


async def test_the_limit_counts_from_the_whole_request_and_not_for_streams() -> None:
    """A-035, over gRPC."""
    async with running_upstream() as upstream:

        async def hang(message: bytes, context: Any) -> bytes:
            await asyncio.sleep(60)
            return message

        upstream.unary = hang
        async with rpc_door(upstream.lease(), first_byte_limit_seconds=0.3) as door:
            stream = door.stream()
            assert await _outcome(door.call("ModelInfer", infer())) == (grpc.StatusCode.UNAVAILABLE, "replica_lost")
            await until(lambda: upstream.seen[0].cancelled)
            await asyncio.sleep(1.1)
            await stream.write(infer())
            assert await stream.read() == infer()
            await asyncio.sleep(0.5)
            await stream.write(infer(id="2"))
            assert await stream.read() == infer(id="2")
            stream.cancel()


# -- requests that end a Triton ----------------------------------------------------------------------------

LARGEST = 2**63 - 1
INPUT = {"name": "INPUT0", "shape": [1], "datatype": "FP32", "data": [1]}


def with_input(**changed: Any) -> bytes:
    return json.dumps({"inputs": [INPUT | changed]}).encode()


MALFORMED = {
    "shape as text": with_input(shape="x"),
    "negative shape": with_input(shape=[-1]),
    "overflowing shape": with_input(shape=[1, LARGEST]),
    "huge shape": with_input(shape=[1000] * 7),
    "shape over 64 bits": with_input(shape=[2**64]),
    "no data": json.dumps({"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "FP32"}]}).encode(),
    "nested wrongly": with_input(data=[[1], 2, [[]]]),
    "inputs as object": b'{"inputs":{}}',
    "twice": json.dumps({"inputs": [INPUT, INPUT]}).encode(),
    "parameters as list": json.dumps({"inputs": [INPUT], "parameters": [1]}).encode(),
    "deep": b'{"inputs":' + b"[" * 10000 + b"]" * 10000 + b"}",
    "deep data": b'{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":'
    + b"[" * 30000
    + b"]" * 30000
    + b"}]}",
    "lone surrogate": b'{"id":"\\ud800","inputs":[]}',
    "binary size -1": with_input(parameters={"binary_data_size": -1}),
    "binary size huge": with_input(parameters={"binary_data_size": LARGEST}),
    "binary size text": with_input(parameters={"binary_data_size": "4"}),
    "no json": b"\x00\xff",
    "open": b'{"inputs":[',
    "null": b"null",
}


@asynccontextmanager
async def before_triton(repository: Path, run_dir: Path) -> AsyncIterator[RunningDoor]:
    async with running_triton(repository, ["ident"], run_dir) as addresses:
        lease = ReplicaLease(
            id="r1", pool="vision", state=ReplicaState.READY, http_address=addresses.http, models=("ident",)
        )
        async with running_door(lease) as door:
            yield door


async def test_malformed_bodies_are_errors_and_everything_stays_up(echo_repository: Path, tmp_path: Path) -> None:
    """A-018: each is a 400, or Triton's own 500 for JSON it cannot read, and a good request is answered after it."""
    async with before_triton(echo_repository, tmp_path) as door:
        for name, body in MALFORMED.items():
            answer = await ask(door.port, post(INFER, body))
            assert answer.status in (400, 500) and json.loads(answer.body)["error"], name
            good = await ask(door.port, post(INFER, with_input()))
            assert good.status == 200, (name, good.body)
