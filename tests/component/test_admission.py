"""Who gets in, in what order, and what the others are told: through the HTTP door, with a scripted upstream."""

import asyncio

import pytest
import uvloop

from tests.component.test_rpc_relay import infer
from tests.component.test_rpc_relay import running_door as running_grpc_door
from tests.doors import Answer, Caller, ask, post, running_door
from tests.h2_peer import caller, replica
from tests.upstream import Reply, Seen, Upstream
from wire.errors import ERROR_KIND_HEADER

LOOP_FACTORY = uvloop.new_event_loop

INFER = "/v2/models/ident/infer"


def slowly(seconds: float) -> Reply:
    return Reply(delay_seconds=seconds)


async def test_classes_share_slots_by_weight_and_the_header_ends_here() -> None:
    """A declared class, and a job: both are batch."""
    async with Upstream() as upstream, running_door(max_in_flight_per_replica=1, interactive_weight=3.0) as door:
        kinds = {"declared": "tidegate-class: batch", "job": "tidegate-job: 7", "plain": "tidegate-class: interactive"}
        callers = [
            asyncio.create_task(ask(door.port, post(INFER, kind.encode(), header)))
            for kind, header in kinds.items()
            for _ in range(12 if kind == "plain" else 6)
        ]
        while door.pool.held < len(callers):
            await asyncio.sleep(0.001)
        door.pool.update([upstream.lease()])
        answers: list[Answer] = await asyncio.gather(*callers)
    assert {answer.status for answer in answers} == {200}
    assert [seen.body for seen in upstream.seen][:8].count(b"plain") == 6
    assert all(seen.header("tidegate-class") is None for seen in upstream.seen)


@pytest.mark.parametrize("value", ["urgent", "", "Batch"])
async def test_a_class_that_is_none_is_refused(value: str) -> None:
    async with Upstream() as upstream, running_door(upstream.lease()) as door:
        answer = await ask(door.port, post(INFER, b"{}", f"tidegate-class: {value}"))
        assert (answer.status, answer.header(ERROR_KIND_HEADER)) == (400, "bad_request")
        assert b"interactive or batch" in answer.body
        assert not upstream.seen


async def test_the_limit_on_waiting_fires_in_time() -> None:
    """A-027: one slot, which is taken for long; the second caller is told after its limit, not when the slot frees."""

    def answer(seen: Seen) -> Reply:
        return slowly(30)

    async with (
        Upstream(answer) as upstream,
        running_door(upstream.lease(), max_in_flight_per_replica=1, hold_limit_seconds=0.5) as door,
        await Caller.open(door.port) as first,
    ):
        first.send(post(INFER))
        while not door.pool.in_flight:
            await asyncio.sleep(0.001)
        loop = asyncio.get_running_loop()
        for headers, status, kind in (((), 503, "no_replica"), (("tidegate-timeout-ms: 300",), 504, "deadline")):
            began = loop.time()
            told = await ask(door.port, post(INFER, b"{}", *headers))
            assert (told.status, told.header(ERROR_KIND_HEADER)) == (status, kind)
            assert loop.time() - began < 5
        assert len(upstream.seen) == 1


async def test_a_tenant_over_its_quota_gets_429_and_the_others_their_answers() -> None:
    """The header names a tenant only where the settings list it."""
    tenants = {"scans": {"requests_per_second": 0.01}, "films": {"bytes_per_second": 0.1}}
    async with Upstream() as upstream, running_door(upstream.lease(), tenants=tenants) as door:
        named, sized = "tidegate-tenant: scans", "tidegate-tenant: films"
        for header in (named, sized):
            assert (await ask(door.port, post(INFER, b"{}", header))).status == 200
            told = await ask(door.port, post(INFER, b"{}", header))
            assert (told.status, told.header(ERROR_KIND_HEADER)) == (429, "quota")
            assert 10 < int(told.header("Retry-After") or "") <= 100
        for headers in ((), ("tidegate-tenant: nobody",)):
            for _ in range(3):
                assert (await ask(door.port, post(INFER, b"{}", *headers))).status == 200
    assert all(seen.header("tidegate-tenant") is None for seen in upstream.seen)


async def test_a_full_queue_of_a_replica_gets_a_retry_after_and_the_replica_stays_in_use() -> None:
    """A-021: Triton's own words, passed on."""
    full = Reply(503, body=b'{"error":"[request id: <id_unknown>] Exceeds maximum queue size"}')
    async with Upstream(lambda _: full) as upstream, running_door(upstream.lease()) as door:
        for _ in range(20):
            answer = await ask(door.port, post(INFER))
            assert (answer.status, answer.body, answer.header(ERROR_KIND_HEADER)) == (503, full.body, None)
            assert answer.header("Retry-After") == "1"
        assert len(upstream.seen) == 20
        full.headers.append(("retry-after", "7"))
        answer = await ask(door.port, post(INFER))
        assert [value for name, value in answer.headers if name.lower() == "retry-after"] == ["7"]


async def test_a_frozen_replica_fails_what_it_has_and_gets_nothing_more_until_it_answers() -> None:
    """A-035: connections are accepted, and nothing comes; callers have a patience of half a second."""
    frozen, patience = asyncio.Event(), "tidegate-timeout-ms: 500"

    async with Upstream() as well, Upstream() as ill:
        ill.answer = lambda seen: Reply(delay_seconds=3600 if frozen.is_set() else 0.0)
        async with running_door(well.lease("well"), ill.lease("ill"), max_in_flight_per_replica=4) as door:
            for _ in range(20):
                assert (await ask(door.port, post(INFER))).status == 200
            assert len(ill.seen) == 10
            frozen.set()
            first = await asyncio.gather(*(ask(door.port, post(INFER, b"{}", patience)) for _ in range(8)))
            assert 1 <= [answer.status for answer in first].count(504) <= 4
            async with asyncio.timeout(60):
                while not door.pool.health.ejected:
                    await asyncio.gather(*(ask(door.port, post(INFER, b"{}", patience)) for _ in range(8)))
            had = len(ill.seen)
            assert {(await ask(door.port, post(INFER))).status for _ in range(50)} == {200}
            frozen.clear()
            async with asyncio.timeout(30):
                while door.pool.health.ejected or len(ill.seen) == had:
                    await ask(door.port, post(INFER, b"{}", patience))
                    await asyncio.sleep(0.05)


async def test_one_connection_reaches_every_replica_and_a_new_one_at_once() -> None:
    """A-032: requests are balanced, not connections."""
    async with Upstream() as one, Upstream() as two, Upstream() as late:
        async with running_door(one.lease("one"), two.lease("two")) as door, await Caller.open(door.port) as caller:
            for _ in range(40):
                assert (await caller.ask(post(INFER))).status == 200
            assert (len(one.seen), len(two.seen)) == (20, 20)
            door.pool.update([one.lease("one"), two.lease("two"), late.lease("late")])
            for _ in range(60):
                assert (await caller.ask(post(INFER))).status == 200
            assert len(late.seen) == 20


async def test_over_grpc_quotas_bounds_and_limits_have_their_codes() -> None:
    """A-027, and the table of overload: the class and the tenant are metadata, and end here."""
    tenants = {"scans": {"requests_per_second": 0.01}}
    routing = {"tenants": tenants, "hold_limit_seconds": 0.5, "batch_hold_limit_requests": 0}
    async with (
        replica() as upstream,
        running_grpc_door(upstream.lease(), max_in_flight_per_replica=1, **routing) as door,
        caller(door.port) as peer,
    ):
        named = ("tidegate-tenant", "scans")
        assert (await peer.over(peer.call(infer(), named))).status == "0"
        told = await peer.over(peer.call(infer(), named))
        assert (told.status, told.headers[ERROR_KIND_HEADER]) == ("8", "quota")
        assert int(told.headers["retry-after"]) > 10
        upstream.script = lambda peer, event: None
        peer.call(infer(), ("tidegate-class", "batch"))
        while not door.pool.in_flight:
            await asyncio.sleep(0.001)
        full = await peer.over(peer.call(infer(), ("tidegate-class", "batch")))
        assert (full.status, full.headers[ERROR_KIND_HEADER]) == ("14", "hold_limit")
        late = await peer.over(peer.call(infer()), seconds=10.0)
        assert (late.status, late.headers[ERROR_KIND_HEADER]) == ("14", "no_replica")
        bad = await peer.over(peer.call(infer(), ("tidegate-class", "now")))
        assert (bad.status, bad.headers[ERROR_KIND_HEADER]) == ("3", "bad_request")
