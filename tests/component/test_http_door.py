"""The HTTP door against a scripted upstream, over real sockets."""

import asyncio
import gzip
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tests.doors import Answer, BrokenTransferError, Caller, ask, get, post, running_door
from tests.upstream import Reply, Seen, Upstream, echo
from wire.errors import ERROR_KIND_HEADER
from wire.membership import ReplicaState

#: As in production.
LOOP_FACTORY = uvloop.new_event_loop

INFER = "/v2/models/ident/infer"
SLOW = "/v2/models/slow/infer"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    random.seed(11)
    yield


def kind(answer: Answer) -> str | None:
    return answer.header(ERROR_KIND_HEADER)


def slowly(seconds: float) -> Callable[[Seen], Reply]:
    def answer(seen: Seen) -> Reply:
        return Reply(body=b'{"done":true}', delay_seconds=seconds if "slow" in seen.path else 0.0)

    return answer


# -- bytes there and back ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        post(INFER, b'{"inputs":[]}', "Content-Type: application/json"),
        post(INFER, b'{"a":1}\x00\xff\x80\x00' * 9, "Inference-Header-Content-Length: 7", "X-Odd:  a  b "),
        post(INFER, gzip.compress(b"x" * 100_000), "Content-Encoding: gzip", "Accept-Encoding: gzip"),
        post("/v2/models/ident/versions/1/generate?q=%20", bytes(range(256)) * 2000),
        post(INFER, b""),
        get("/v2/models/ident"),
        get("/v2/models/ident/config", "Accept: */*"),
    ],
)
async def test_what_the_caller_gets_and_what_the_replica_gets_equals_a_direct_call(raw: bytes) -> None:
    async with Upstream() as upstream, running_door(upstream.lease()) as door:
        direct = await ask(upstream.port, raw)
        routed = await ask(door.port, raw)
        assert routed.raw == direct.raw
        assert upstream.seen[1].body == upstream.seen[0].body
        assert upstream.seen[1].path == upstream.seen[0].path
        assert {(n.lower(), v.strip()) for n, v in upstream.seen[1].headers} == {
            (n.lower(), v.strip()) for n, v in upstream.seen[0].headers
        }


@pytest.mark.parametrize("size", [2048, 2_000_000])
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("chunk_bytes", [None, 5000])
async def test_compressed_answers_arrive_as_they_were_sent(size: int, status: int, chunk_bytes: int | None) -> None:
    """A-003: nothing is unzipped on the way, whatever the size, the status and the framing."""
    plain = random.randbytes(size // 2) * 2
    packed = gzip.compress(plain)
    headers = [("Content-Type", "application/octet-stream"), ("Content-Encoding", "gzip")]
    async with Upstream(lambda _: Reply(status, headers, packed, chunk_bytes)) as upstream:
        async with running_door(upstream.lease()) as door:
            direct, routed = await ask(upstream.port, post(INFER)), await ask(door.port, post(INFER))
    assert routed.raw == direct.raw
    assert gzip.decompress(routed.body) == plain


async def test_chunked_requests_pass_and_their_end_is_found_wherever_they_are_cut() -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    body = b"5\r\nhello\r\n6;note=1\r\n world\r\n0\r\nX-Trailer: a\r\n\r\n"
    async with Upstream() as upstream, running_door(upstream.lease()) as door, await Caller.open(door.port) as caller:
        for cut in range(1, len(head + body), 3):
            caller.send((head + body)[:cut])
            await asyncio.sleep(0.001)
            answer = await caller.ask((head + body)[cut:])
            assert answer.body == b"hello world"
        assert len(upstream.seen) == len(range(1, len(head + body), 3))
        assert upstream.connections_opened == 1


async def test_a_head_in_many_pieces_reaches_the_replica_whole() -> None:
    """Triton 2.51 misreads a request line that comes in two pieces."""
    async with Upstream() as upstream, running_door(upstream.lease()) as door, await Caller.open(door.port) as caller:
        for byte in post(INFER, b"abc"):
            caller.send(bytes((byte,)))
            await asyncio.sleep(0)
        assert (await caller.answer()).body == b"abc"
        assert upstream.seen[0].raw_head.startswith(b"POST /v2/models/ident/infer HTTP/1.1\r\n")


async def test_interim_answers_of_the_replica_end_at_the_gateway() -> None:
    reply = Reply(before_head=b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n", body=b"x" * 10)
    async with Upstream(lambda _: reply) as upstream, running_door(upstream.lease()) as door:
        answer = await ask(door.port, post(INFER))
    assert (answer.status, answer.body) == (200, b"x" * 10)


async def test_our_own_and_hop_by_hop_headers_stay_here() -> None:
    extra = ("Tidegate-Timeout-Ms: 5000", "tidegate-job: 1-0", "Connection: keep-alive, X-Mine, host", "X-Mine: 1")
    async with Upstream() as upstream, running_door(upstream.lease()) as door:
        await ask(door.port, post(INFER, b"{}", *extra, "Keep-Alive: 5", "TE: trailers", "Upgrade: h2c", "X-Kept: 2"))
        names = {name.lower() for name, _ in upstream.seen[0].headers}
    assert names == {"host", "x-kept", "content-length"}


async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    async with Upstream() as upstream, running_door(upstream.lease()) as door, await Caller.open(door.port) as caller:
        bodies = [b'{"n":%d}' % n for n in range(60)]
        requests = [post(INFER, body) + get("/v2/health/live") for body in bodies]
        caller.send(b"".join(requests))
        for body in bodies:
            assert (await caller.answer()).body == body
            assert (await caller.answer()).body == b""
        assert upstream.most_running == 1


async def test_http_1_0_callers_are_served_without_chunks() -> None:
    replies = [Reply(body=b"a" * 5000, chunk_bytes=700), Reply(body=b"plain")]
    async with Upstream(lambda _: replies.pop(0)) as upstream, running_door(upstream.lease()) as door:
        old = post(INFER).replace(b"HTTP/1.1", b"HTTP/1.0")
        async with await Caller.open(door.port) as caller:
            answer = await caller.ask(old)
            assert answer.body == b"a" * 5000
            assert answer.raw.startswith(b"HTTP/1.0 200 ")
            assert answer.header("transfer-encoding") is None
            assert answer.header("connection") is None
        async with await Caller.open(door.port) as caller:
            answer = await caller.ask(old.replace(b"Host: test", b"Connection: keep-alive"))
            assert (answer.body, answer.header("connection")) == (b"plain", "keep-alive")
            assert (await caller.ask(get("/v2/health/live"))).status == 200


async def test_connection_close_is_kept() -> None:
    async with Upstream() as upstream, running_door(upstream.lease()) as door, await Caller.open(door.port) as caller:
        answer = await caller.ask(post(INFER, b"{}", "Connection: close"))
        assert answer.header("connection") == "close"
        assert await caller.at_end()
        assert door.door.upstreams.idle_of("r1") == 1


# -- 100-continue and limits ------------------------------------------------------------------------------


async def test_expect_continue_is_answered_at_once() -> None:
    """A-004, first half."""
    body = random.randbytes(2_000_000)
    async with Upstream() as upstream, running_door(upstream.lease()) as door, await Caller.open(door.port) as caller:
        raw = post(INFER, body, "Expect: 100-continue")
        started = time.monotonic()
        assert (await caller.ask(raw[: -len(body)])).status == 100
        assert (await caller.ask(body)).body == body
        assert time.monotonic() - started < 0.5
        assert upstream.seen[0].header("expect") is None


async def test_a_refusal_comes_instead_of_100_and_before_the_body() -> None:
    """A-004, second half: too large, and a model that nobody serves."""
    async with Upstream() as upstream, running_door(upstream.lease(), settings={"body_limit_bytes": 1000}) as door:
        for path, status, word in ((INFER, 413, "too_large"), ("/v2/models/nope/infer", 404, "not_found")):
            size = 2000 if status == 413 else 500
            async with await Caller.open(door.port) as caller:
                head = post(path, b"x" * size, "Expect: 100-continue")[:-size]
                answer = await caller.ask(head)
                assert (answer.status, kind(answer)) == (status, word)
                assert await caller.at_end()
        assert not upstream.seen


async def test_a_chunked_body_over_the_limit_is_refused_midway() -> None:
    async with Upstream() as upstream, running_door(upstream.lease(), settings={"body_limit_bytes": 1000}) as door:
        async with await Caller.open(door.port) as caller:
            caller.send(f"POST {INFER} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for _ in range(5):
                caller.send(b"100\r\n" + b"x" * 256 + b"\r\n")
            answer = await caller.answer()
            assert (answer.status, kind(answer)) == (413, "too_large")
        await door.settled()


async def test_a_refused_body_is_skipped_and_the_connection_stays() -> None:
    async with Upstream() as upstream, running_door(upstream.lease()) as door, await Caller.open(door.port) as caller:
        caller.send(post("/v2/models/nope/infer", b"x" * 300_000) + post(INFER, b"next"))
        assert (await caller.answer()).status == 404
        assert (await caller.answer()).body == b"next"


async def test_a_body_far_too_large_is_refused_without_being_read() -> None:
    async with Upstream() as upstream, running_door(upstream.lease(), settings={"body_limit_bytes": 10**6}) as door:
        async with await Caller.open(door.port) as caller:
            caller.send(f"POST {INFER} HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n".encode())
            answer = await caller.answer()
            assert answer.status == 413
            assert "1000000" in answer.body.decode()


MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /v2 HTTP/2.0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"get /v2 HTTP/1.1\r\n\r\n",
    b"NOPE /v2 HTTP/1.1\r\n\r\n",
    b"GET /v2\r\n\r\n",
    b"GET /a b HTTP/1.1\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nA : b\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nA: b\r\n folded\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nA: \x00\r\n\r\n",
    b"GET /v2 HTTP/1.1\nA: b\n\n",
    b"POST %b HTTP/1.1\r\nContent-Length: -1\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcX\r\n0\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nExpect: miracles\r\nContent-Length: 1\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nTidegate-Timeout-Ms: soon\r\nContent-Length: 0\r\n\r\n" % INFER.encode(),
    b"POST %b HTTP/1.1\r\nTidegate-Timeout-Ms: 0\r\nContent-Length: 0\r\n\r\n" % INFER.encode(),
    b"GET /v2 HTTP/1.1\r\nA: " + b"b" * 70_000,
    b"GET /" + b"a" * 70_000,
]


async def test_malformed_requests_get_400_and_disturb_nobody() -> None:
    async with Upstream() as upstream, running_door(upstream.lease()) as door, await Caller.open(door.port) as other:
        for raw in MALFORMED:
            async with await Caller.open(door.port) as caller:
                async with asyncio.timeout(2):
                    answer = await caller.ask(raw)
                assert (answer.status, kind(answer)) == (400, "bad_request"), raw
                assert answer.body.startswith(b'{"error":"')
            assert (await other.ask(post(INFER, b"fine"))).body == b"fine"
        await door.settled()
        assert all(seen.body == b"fine" for seen in upstream.seen if not seen.left_early)


async def test_a_slow_head_takes_no_slot_and_ends() -> None:
    settings = {"idle_client_seconds": 0.3}
    async with Upstream() as upstream, running_door(upstream.lease(), settings=settings) as door:
        async with await Caller.open(door.port) as silent, await Caller.open(door.port) as slow:
            slow.send(post(INFER)[:20])
            assert await slow.at_end()
            assert await silent.at_end()
        assert not upstream.seen
        assert door.pool.in_flight == 0


async def test_a_small_body_that_is_not_here_yet_takes_no_slot() -> None:
    request = post(INFER, b"x" * 1000)
    async with Upstream() as upstream, running_door(upstream.lease(), max_in_flight_per_replica=1) as door:
        async with await Caller.open(door.port) as slow, await Caller.open(door.port) as quick:
            slow.send(request[:-1])
            await asyncio.sleep(0.1)
            assert (door.pool.in_flight, door.pool.held) == (0, 0)
            quick.send(post(INFER))
            assert (await quick.answer()).status == 200
            slow.send(request[-1:])
            assert (await slow.answer()).status == 200


async def test_a_body_that_stalls_gives_its_slot_back() -> None:
    """The caller is told, the model did not run, and others go on."""
    head = post(INFER, b"x" * 200_000)[:1000]
    settings = {"body_stall_seconds": 0.4}
    async with Upstream() as upstream, running_door(upstream.lease(), settings=settings) as door:
        async with await Caller.open(door.port) as slow:
            slow.send(head)
            await asyncio.sleep(0.1)
            assert door.pool.in_flight == 1
            answer = await slow.answer()
            assert answer.status == 408
            assert ("tidegate-error", "slow_caller") in [(name.lower(), value) for name, value in answer.headers]
            assert await slow.at_end()
        await door.settled()


async def test_an_answer_that_is_not_read_gives_its_slot_back() -> None:
    settings = {"body_stall_seconds": 0.4}
    async with Upstream(lambda _: Reply(body=b"\x5a" * 2**20, repeat=100, chunk_bytes=None)) as upstream:
        async with running_door(upstream.lease(), settings=settings) as door, await Caller.open(door.port) as caller:
            caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
            caller.send(post(INFER))
            await asyncio.sleep(0.2)
            assert door.pool.in_flight == 1
            await door.settled(4.0)


# -- when the replica fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [None, 250])
async def test_a_cut_answer_never_looks_whole(chunk_bytes: int | None) -> None:
    """A-005."""
    reply = Reply(body=b"x" * 1000, cut_after=500, chunk_bytes=chunk_bytes)
    async with Upstream(lambda _: reply) as upstream:
        async with running_door(upstream.lease()) as door:
            for http in (b"HTTP/1.1", b"HTTP/1.0"):
                with pytest.raises(BrokenTransferError):
                    await ask(door.port, post(INFER).replace(b"HTTP/1.1", http))
            await door.settled()
            assert [told["own_error"] for told in door.counted.requests] == ["replica_lost", "replica_lost"]


async def test_a_replica_killed_in_flight_gives_502() -> None:
    async with Upstream(slowly(30)) as upstream, running_door(upstream.lease()) as door:
        calls = [asyncio.create_task(ask(door.port, post(SLOW))) for _ in range(5)]
        while upstream.running < 5:
            await asyncio.sleep(0.005)
        await upstream.stop()
        for answer in await asyncio.gather(*calls):
            assert (answer.status, kind(answer)) == (502, "replica_lost")
        await door.settled()


async def test_a_replica_that_refuses_is_passed_over() -> None:
    async with Upstream() as gone, Upstream() as upstream:
        await gone.stop()
        async with running_door(gone.lease("gone"), upstream.lease("here")) as door:
            for n in range(20):
                assert (await ask(door.port, post(INFER, b"%d" % n))).body == b"%d" % n
            assert len(upstream.seen) == 20


async def test_with_only_a_refusing_replica_the_request_waits_for_another() -> None:
    async with Upstream() as gone, Upstream() as upstream:
        await gone.stop()
        async with running_door(gone.lease("gone")) as door:
            call = asyncio.create_task(ask(door.port, post(INFER, b"late")))
            await asyncio.sleep(0.1)
            assert (door.pool.held, door.pool.in_flight) == (1, 0)
            door.pool.update([gone.lease("gone"), upstream.lease("new")])
            assert (await call).body == b"late"
            assert door.pool.load().requests_total == 1


async def test_a_replica_that_never_accepts_is_passed_over_within_the_connect_timeout() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        filler = [socket.socket() for _ in range(4)]
        for sock in filler:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        async with Upstream() as upstream:
            stuck = upstream.lease("stuck").model_copy(update={"http_address": f"127.0.0.1:{full.getsockname()[1]}"})
            settings = {"connect_timeout_seconds": 0.2}
            async with running_door(stuck, upstream.lease("here"), settings=settings) as door:
                started = time.monotonic()
                for _ in range(4):
                    assert (await ask(door.port, post(INFER))).status == 200
                assert time.monotonic() - started < 1.0
        for sock in filler:
            sock.close()


async def test_stale_connections_are_not_used() -> None:
    async with Upstream() as upstream, running_door(upstream.lease()) as door, await Caller.open(door.port) as caller:
        for _ in range(30):
            assert (await caller.ask(post(INFER))).status == 200
            upstream.drop_connections()
            await asyncio.sleep(random.choice((0, 0, 0.002)))
        assert [told["status"] for told in door.counted.requests] == [200] * 30


async def test_a_request_whose_body_was_not_complete_is_sent_again() -> None:
    """The connection dies while the body is still coming: the model cannot have run."""
    async with Upstream() as upstream, running_door(upstream.lease()) as door, await Caller.open(door.port) as caller:
        upstream.read_limit = 3
        body = b"abc" + b"d" * 70_000  # a small one would be waited for
        raw = post(INFER, body)
        caller.send(raw[:-70_000])
        while len(upstream.seen) < 1 or upstream.read_limit is not None:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert (await caller.ask(raw[-70_000:])).body == body
        assert len(upstream.seen) == 2


async def test_reading_metadata_is_sent_again() -> None:
    replies = [Reply(), Reply(cut_after=0, headers=[], before_head=b""), Reply(body=b"meta")]
    async with Upstream(lambda _: replies.pop(0)) as upstream, running_door(upstream.lease()) as door:
        assert (await ask(door.port, get("/v2/models/ident"))).status == 200
        assert upstream.connections == 1


async def test_bytes_behind_an_answer_reach_nobody() -> None:
    evil = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL"
    for chunk_bytes in (None, 2):
        reply = Reply(body=b"good", after_body=evil, chunk_bytes=chunk_bytes)
        async with Upstream(lambda _, reply=reply: reply) as upstream, running_door(upstream.lease()) as door:
            async with await Caller.open(door.port) as caller:
                for _ in range(3):
                    assert (await caller.ask(post(INFER))).body == b"good"
                assert (await caller.ask(get("/v2/health/live"))).body == b""


async def test_an_answer_that_is_no_http_gives_502() -> None:
    async with Upstream(lambda _: Reply(before_head=b"220 smtp ready\r\n")) as upstream:
        async with running_door(upstream.lease()) as door:
            answer = await ask(door.port, post(INFER))
            assert (answer.status, kind(answer)) == (502, "replica_lost")


async def test_connections_to_a_draining_replica_end_at_once() -> None:
    async with Upstream(slowly(0.3)) as upstream, running_door(upstream.lease()) as door:
        busy = asyncio.create_task(ask(door.port, post(SLOW)))
        await ask(door.port, post(INFER))
        await asyncio.sleep(0.05)
        assert upstream.connections == 2
        door.pool.update([upstream.lease().model_copy(update={"state": ReplicaState.DRAINING})])
        await asyncio.sleep(0.05)
        assert upstream.connections == 1
        assert (await busy).status == 200
        await asyncio.sleep(0.05)
        assert upstream.connections == 0


async def test_idle_upstream_connections_end_after_their_time() -> None:
    async with Upstream() as upstream, running_door(upstream.lease(), settings={"idle_upstream_seconds": 0.1}) as door:
        await ask(door.port, post(INFER))
        assert upstream.connections == 1
        await asyncio.sleep(1.0)
        assert upstream.connections == 0
        assert (await ask(door.port, post(INFER))).status == 200


# -- when the caller leaves -------------------------------------------------------------------------------


async def test_hanging_up_cancels_what_is_held_and_what_runs() -> None:
    """A-025: twenty callers leave after a moment; two were running, and both are closed early."""
    async with Upstream(slowly(10)) as upstream, running_door(upstream.lease(), max_in_flight_per_replica=2) as door:

        async def impatient() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(door.port, post(SLOW)), 0.5 + random.random() * 0.05)

        await asyncio.gather(*(impatient() for _ in range(20)))
        await door.settled()
        await asyncio.sleep(0.1)
        assert len(upstream.seen) == 2
        assert [seen.left_early for seen in upstream.seen] == [True, True]
        assert [told["status"] for told in door.counted.requests] == [499] * 20


async def test_hanging_up_with_an_unread_body_is_noticed() -> None:
    """A held request's body is not read, so the end of its connection hides behind it."""
    async with Upstream() as upstream, running_door() as door:
        caller = await Caller.open(door.port)
        caller.send(post(INFER, b"x" * 150_000))
        await asyncio.sleep(0.1)
        assert door.pool.held == 1
        caller.writer.transport.abort()
        await door.settled()
        assert not upstream.seen


async def test_slots_come_back_whatever_the_moment_of_hanging_up() -> None:
    """A-026: capacity 1, callers that leave within 0-5 ms; then normal calls at normal speed."""
    async with Upstream(slowly(0.002)) as upstream, running_door(upstream.lease(), max_in_flight_per_replica=1) as door:

        async def fleeting(delay: float) -> None:
            async with await Caller.open(door.port) as caller:
                caller.send(post(random.choice((SLOW, INFER)), b"{}", *random.choice(((), ("Expect: 100-continue",)))))
                await asyncio.sleep(delay)

        for _ in range(100):
            await asyncio.gather(*(fleeting(random.random() * 0.005) for _ in range(3)))
        started = time.monotonic()
        for _ in range(20):
            assert (await ask(door.port, post(INFER))).status == 200
        assert time.monotonic() - started < 1.0
        await door.settled()
        assert upstream.most_running <= 2  # one abandoned, one new


# -- holding ----------------------------------------------------------------------------------------------


async def test_a_request_at_zero_waits_for_a_replica() -> None:
    """A-039 with holding on; the body is taken only when there is somebody to take it."""
    async with Upstream() as upstream, running_door() as door, await Caller.open(door.port) as caller:
        body = random.randbytes(20_000_000)
        sending = asyncio.create_task(_send_slowly(caller, post(INFER, body)))
        await asyncio.sleep(0.2)
        assert door.router.wanted == ["vision"]
        assert (door.pool.held, sending.done()) == (1, False)
        door.pool.update([upstream.lease()])
        answer = await caller.answer()
        await sending
        assert answer.body == body
        assert door.counted.requests[-1]["held_seconds"] > 0.15


async def _send_slowly(caller: Caller, raw: bytes) -> None:
    caller.send(raw)
    await caller.writer.drain()


async def test_without_holding_a_request_at_zero_is_refused() -> None:
    """A-039 with holding off."""
    async with Upstream() as upstream, running_door(hold_limit_seconds=0) as door:
        async with await Caller.open(door.port) as caller:
            answer = await caller.ask(post(INFER))
            assert (answer.status, kind(answer)) == (503, "no_replica")
            assert int(answer.header("retry-after") or 0) >= 1
            assert door.router.wanted == ["vision"]
            door.pool.update([upstream.lease()])
            assert (await caller.ask(post(INFER))).status == 200


async def test_a_burst_at_zero_is_held_up_to_the_limit_and_released_at_the_replicas_pace() -> None:
    """A-041."""
    async with Upstream(slowly(0.02)) as upstream:
        async with running_door(hold_limit_requests=100, max_in_flight_per_replica=8) as door:

            async def call() -> tuple[Answer, float]:
                started = time.monotonic()
                answer = await ask(door.port, post(SLOW))
                return answer, time.monotonic() - started

            calls = [asyncio.create_task(call()) for _ in range(200)]
            await asyncio.sleep(1.2)
            door.pool.update([upstream.lease()])
            results = await asyncio.gather(*calls)
        served = [answer for answer, _ in results if answer.status == 200]
        refused = [(answer, seconds) for answer, seconds in results if answer.status == 503]
        assert (len(served), len(refused)) == (100, 100)
        assert all(kind(a) == "hold_limit" and a.header("retry-after") and s < 1.0 for a, s in refused)
        assert upstream.most_running <= 8
        assert set(door.router.wanted) == {"vision"}


@pytest.mark.parametrize("ready", [False, True])
async def test_a_deadline_ends_holding_and_running(ready: bool) -> None:
    async with Upstream(slowly(10)) as upstream, running_door(*([upstream.lease()] if ready else [])) as door:
        started = time.monotonic()
        answer = await ask(door.port, post(SLOW, b"{}", "Tidegate-Timeout-Ms: 150"))
        assert (answer.status, kind(answer)) == (504, "deadline")
        assert 0.14 < time.monotonic() - started < 0.6
        await door.settled()
        await asyncio.sleep(0.05)
        assert [seen.left_early for seen in upstream.seen] == [True] * ready


async def test_the_hold_limit_ends_holding() -> None:
    async with running_door(hold_limit_seconds=0.1) as door:
        answer = await ask(door.port, post(INFER))
        assert (answer.status, kind(answer)) == (503, "no_replica")
        assert door.counted.requests[-1]["held_seconds"] == pytest.approx(0.1, abs=0.05)


async def test_jobs_are_told_apart() -> None:
    async with Upstream(slowly(0.2)) as upstream, running_door(upstream.lease()) as door:
        calls = [asyncio.create_task(ask(door.port, post(SLOW, b"{}", *extra))) for extra in ((), ("tidegate-job: 7",))]
        await asyncio.sleep(0.1)
        load = door.pool.load()
        assert (load.in_flight_interactive, load.in_flight_job) == (1, 1)
        await asyncio.gather(*calls)


# -- who answers what -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (get("/v2/health/live"), 200, b""),
        (get("/v2/health/ready"), 200, b""),
        (get("/v2/nothing"), 404, b'{"error":"Not Found"}'),
        (get("/v2/"), 404, b'{"error":"Not Found"}'),
        (get("/v2/models/ident/"), 404, b'{"error":"Not Found"}'),
        (get("/v2/models/ident/versions/x/config"), 404, b'{"error":"Not Found"}'),
        (get(INFER), 405, b'{"error":"Method Not Allowed"}'),
        (post("/v2/models/nope/infer"), 404, b'{"error":"Request for unknown model: \'nope\' is not found"}'),
        (get("/v2/models/i%64ent"), 404, b'{"error":"Request for unknown model: \'i%64ent\' is not found"}'),
        (get("/v2/models/nope/ready"), 400, b'{"error":"Model version not ready"}'),
        (get("/v2/models/nope/stats"), 400, b'{"error":"requested model \'nope\' is not available"}'),
    ],
)
async def test_own_answers_are_worded_as_triton_words_them(raw: bytes, status: int, body: bytes) -> None:
    async with running_door() as door:
        answer = await ask(door.port, raw)
        assert (answer.status, answer.body) == (status, body)
        assert door.router.wanted == []


async def test_the_repository_and_shared_memory_are_not_the_callers() -> None:
    async with Upstream() as upstream, running_door(upstream.lease()) as door:
        for path in ("/v2/repository/models/ident/load", "/v2/systemsharedmemory/region/a/register"):
            answer = await ask(door.port, post(path))
            assert (answer.status, kind(answer)) == (501, "not_supported")
        assert not upstream.seen


async def test_head_requests_get_no_body() -> None:
    async with running_door() as door, await Caller.open(door.port) as caller:
        caller.send(get("/v2", method="HEAD") + get("/v2/health/live"))
        assert (await caller.answer(head_only=True)).status == 405
        assert (await caller.answer()).status == 200


async def test_metadata_at_zero_comes_from_memory_and_wakes_nothing() -> None:
    async with Upstream() as upstream, running_door() as door:
        door.memory.answers["/v2/models/ident"] = (200, [(b"Content-Type", b"application/json")], b'{"name":"ident"}')
        assert (await ask(door.port, get("/v2/models/ident?x=1"))).body == b'{"name":"ident"}'
        assert (await ask(door.port, get("/v2/models/ident/ready"))).status == 200
        assert (await ask(door.port, get("/v2/models/ident/versions/9/ready"))).status == 400
        assert door.router.wanted == []
        unknown = asyncio.create_task(ask(door.port, get("/v2/models/ident/config")))
        await asyncio.sleep(0.05)
        assert door.router.wanted == ["vision"]
        door.pool.update([upstream.lease()])
        assert (await unknown).status == 200


# -- leaving ----------------------------------------------------------------------------------------------


async def test_draining_finishes_what_is_under_way() -> None:
    async with Upstream(slowly(0.3)) as upstream, running_door(upstream.lease()) as door:
        idle, between, busy = [await Caller.open(door.port) for _ in range(3)]
        for caller in (idle, between):
            await caller.ask(get("/v2/health/live"))
        busy.send(post(SLOW))
        await asyncio.sleep(0.1)
        draining = asyncio.create_task(door.door.drain(5.0))
        await asyncio.sleep(0.05)
        # This one's next request may have been on the wire when the drain began: it is told with its answer.
        for caller in (busy, between):
            answer = await (caller.answer() if caller is busy else caller.ask(post(INFER)))
            assert (answer.status, answer.header("connection")) == (200, "close")
            assert await caller.at_end()
        assert await idle.at_end(3.0)
        await asyncio.wait_for(draining, 2.0)
        with pytest.raises(OSError):
            await Caller.open(door.port)
        for caller in (idle, between, busy):
            caller.writer.close()


async def test_draining_gives_up_at_its_limit() -> None:
    async with Upstream(slowly(30)) as upstream, running_door(upstream.lease(), max_in_flight_per_replica=1) as door:
        calls = [asyncio.create_task(ask(door.port, post(SLOW))) for _ in range(2)]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(door.door.drain(0.2), 2.0)
        assert [(kind(answer), answer.status) for answer in await asyncio.gather(*calls)] == [("draining", 503)] * 2
        assert len(door.door.callers) == 0


# -- large bodies -----------------------------------------------------------------------------------------


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


async def _upload(port: int, megabytes: int, peak: list[int]) -> float:
    """Seconds to send that much and read as much back, with nothing of it kept here."""
    piece = b"\xa5" * 2**20
    started = time.monotonic()
    async with await Caller.open(port) as caller:
        caller.send(f"POST {INFER} HTTP/1.1\r\nContent-Length: {megabytes * 2**20}\r\n\r\n".encode())
        for _ in range(megabytes):
            caller.send(piece)
            await caller.writer.drain()
            peak[0] = max(peak[0], _resident_bytes())
        await caller.reader.readuntil(b"\r\n\r\n")
        left = megabytes * 2**20
        while left:
            got = len(await caller.reader.read(2**20))
            assert got
            left -= got
            peak[0] = max(peak[0], _resident_bytes())
    return time.monotonic() - started


async def test_large_bodies_take_linear_time_and_bounded_memory() -> None:
    """A-008."""
    async with Upstream(lambda seen: Reply(body=b"\x5a" * 2**20, repeat=seen.body_bytes // 2**20)) as upstream:
        upstream.keep_bodies = False
        async with running_door(upstream.lease()) as door:
            gaps: list[float] = []
            poller = asyncio.create_task(_poll(door.port, gaps))
            peak = [0]
            await _upload(door.port, 1, peak)
            before = _resident_bytes()
            ten, hundred = await _upload(door.port, 10, peak), await _upload(door.port, 100, peak)
            poller.cancel()
            direct = await _upload(upstream.port, 100, [0])
            assert hundred < 15 * ten
            assert hundred < 3 * direct + 0.2
            assert peak[0] - before < 60 * 2**20
            assert max(gaps) < 1.0


async def _poll(port: int, gaps: list[float]) -> None:
    async with await Caller.open(port) as caller:
        while True:
            started = time.monotonic()
            assert (await caller.ask(get("/v2/health/live"))).status == 200
            gaps.append(time.monotonic() - started)
            await asyncio.sleep(0.1)


async def test_a_caller_that_does_not_read_slows_the_replica_and_fills_no_memory() -> None:
    async with Upstream(lambda _: Reply(body=b"\x5a" * 2**20, repeat=100, chunk_bytes=None)) as upstream:
        async with running_door(upstream.lease()) as door, await Caller.open(door.port) as caller:
            caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
            before = _resident_bytes()
            caller.send(post(INFER))
            await asyncio.sleep(0.5)
            assert _resident_bytes() - before < 40 * 2**20
            assert door.pool.in_flight == 1
            caller.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len((await caller.answer()).body) == 100 * 2**20


# -- readiness of a model that no ready replica has -------------------------------------------------------


async def test_asking_whether_a_model_is_ready_is_never_held() -> None:
    async with Upstream(lambda _: Reply(400, body=b'{"error":"Model version not ready"}')) as upstream:
        async with running_door(upstream.lease(models=("slow",))) as door:
            assert (await ask(door.port, get("/v2/models/ident/ready"))).status == 400
            assert door.pool.held == 0


# -- everything at once -----------------------------------------------------------------------------------


def _moody(chance: random.Random) -> Callable[[Seen], Reply]:
    def answer(seen: Seen) -> Reply:
        reply = echo(seen)
        reply.delay_seconds = chance.choice((0, 0, 0, 0.001, 0.01))
        reply.chunk_bytes = chance.choice((None, None, 1000))
        if chance.random() < 0.05:
            reply.cut_after = chance.randrange(len(reply.body) + 1)
        reply.close = chance.random() < 0.05
        return reply

    return answer


class _Moods:
    """Callers that do what callers do."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self.port = port
        self.chance = chance
        self.outcomes: Counter[int | str] = Counter()

    async def one(self) -> None:
        chance = self.chance
        async with await Caller.open(self.port) as caller:
            for _ in range(chance.randrange(1, 6)):
                body = chance.randbytes(chance.choice((0, 10, 3000, 200_000)))
                raw = post(chance.choice((INFER, SLOW)), body, *chance.choice(((), ("Tidegate-Timeout-Ms: 20",))))
                cut = chance.randrange(len(raw) + 1)
                caller.send(raw[:cut])
                await asyncio.sleep(chance.choice((0, 0, 0.002)))
                if chance.random() < 0.1:
                    self.outcomes["left"] += 1
                    return
                caller.send(raw[cut:])
                try:
                    answer = await caller.answer()
                except BrokenTransferError:
                    self.outcomes["broken"] += 1
                    return
                self.outcomes[answer.status] += 1
                assert answer.status != 200 or answer.body == body
                assert answer.status == 200 or kind(answer) in ("replica_lost", "replica_unreachable", "deadline")
                if answer.header("connection") == "close":
                    return


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_callers_and_replicas_do_every_slot_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with Upstream(_moody(chance)) as one, Upstream(_moody(chance)) as two:
        async with running_door(one.lease("one"), two.lease("two"), max_in_flight_per_replica=4) as door:
            moods = _Moods(door.port, chance)

            async def keep_going() -> None:
                for _ in range(15):
                    await moods.one()

            async def shuffle() -> None:
                while True:
                    await asyncio.sleep(0.02)
                    leases = [one.lease("one"), two.lease("two")]
                    if chance.random() < 0.3:
                        leases[chance.randrange(2)] = leases[0].model_copy(update={"state": ReplicaState.DRAINING})
                    door.pool.update({lease.id: lease for lease in leases}.values())
                    if chance.random() < 0.1:
                        one.drop_connections()

            shuffling = asyncio.create_task(shuffle())
            await asyncio.gather(*(keep_going() for _ in range(20)))
            shuffling.cancel()
            await door.settled()
            assert moods.outcomes[200] > 100
            load = door.pool.load()
            assert (load.in_flight_by_replica, load.held_interactive) == ({}, 0)
    assert faults == []
