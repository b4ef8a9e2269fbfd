"""The gRPC door as an HTTP/2 relay: scripted peers on both sides, at the level of frames."""

import asyncio
import random
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h2.events
import h2.settings
import pytest
import uvloop

from gateway.at_zero import AtZero
from gateway.ingress import h2_frames as frames
from gateway.ingress.h2_frames import Code
from gateway.ingress.h2_headers import encode
from gateway.ingress.protobuf import bytes_field
from gateway.ingress.rpc_door import GrpcDoor
from gateway.routing.pool import Pool
from gateway.settings import GatewaySettings
from tests.doors import Counted, HandRouter, pool_settings
from tests.h2_peer import STREAM, Peer, RawCaller, Replica, call_headers, caller, framed, replica
from wire.errors import ERROR_KIND_HEADER
from wire.membership import ReplicaLease, ReplicaState

LOOP_FACTORY = uvloop.new_event_loop

WINDOW = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
FRAME = h2.settings.SettingCodes.MAX_FRAME_SIZE
STREAMS = h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS


@dataclass
class Door:
    door: GrpcDoor
    pool: Pool
    counted: Counted
    port: int

    async def settled(self, seconds: float = 3.0) -> None:
        async with asyncio.timeout(seconds):
            while self.pool.in_flight or self.pool.held:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_door(
    *leases: ReplicaLease, settings: dict[str, Any] | None = None, **routing: Any
) -> AsyncIterator[Door]:
    router = HandRouter({"vision": pool_settings(**routing)})
    router.pools["vision"].update(leases)
    counted = Counted()
    door = GrpcDoor(router, GatewaySettings(**(settings or {})), AtZero(router), counted)
    port = await door.start("127.0.0.1", 0)
    try:
        yield Door(door, router.pools["vision"], counted, port)
    finally:
        await door.drain(0.1)


def infer(size: int = 0, model: bytes = b"ident") -> bytes:
    tail = b"" if not size else b"\x3a" + _varint(size) + bytes(size)
    return framed(bytes_field(1, model) + tail)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


# -- flow control -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "size"), [(1, 1500), (17, 1500), (1000, 1500), (64, 400_000)])
async def test_tiny_windows_both_ways(window: int, size: int) -> None:
    """The many acknowledgements that they take are no flood."""
    async with replica({WINDOW: window}) as upstream, running_door(upstream.lease()) as door:
        upstream.script = lambda peer, event: _echo_slowly(upstream, peer, event)
        async with caller(door.port, {WINDOW: window}) as peer:
            message = infer(size)
            call = peer.call(end=False)
            await peer.send(call, message, end=True)
            seen = await peer.over(call, 20)
            assert (seen.status, bytes(seen.data)) == ("0", message)
        await door.settled()


def _echo_slowly(upstream: Replica, peer: Peer, event: Any) -> None:
    """Echo, as far as the caller's windows allow at a time."""
    if not isinstance(event, h2.events.StreamEnded):
        return

    async def go() -> None:
        seen = peer.streams[event.stream_id]
        peer.h2.send_headers(event.stream_id, [(":status", "200"), ("content-type", "application/grpc")])
        await peer.send(event.stream_id, bytes(seen.data))
        peer.h2.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
        peer.flush()

    peer.echoing = asyncio.create_task(go())  # type: ignore[attr-defined]


async def test_a_slow_reader_does_not_make_the_gateway_keep_its_answer() -> None:
    """30 MB each way; while the caller does not read, the replica cannot send on."""
    size = 30_000_000
    async with replica({WINDOW: 1 << 20}) as upstream, running_door(upstream.lease()) as door:
        upstream.script = lambda peer, event: _echo_slowly(upstream, peer, event)
        async with caller(door.port) as peer:
            call = peer.call(end=False)
            message = infer(size)
            peer.reads = False
            await asyncio.wait_for(peer.send(call, message, end=True), 30)
            await peer.until(lambda: peer.streams[call].unacknowledged >= 65535)
            await asyncio.sleep(0.2)
            sender = upstream.connections[0]
            assert len(peer.streams[call].data) <= 65535 + 64
            assert sender.h2.local_flow_control_window(1) <= 0  # the replica has to wait
            await peer.read_all()
            seen = await peer.over(call, 60)
            assert seen.status == "0" and bytes(seen.data) == message


async def test_a_replica_that_does_not_read_holds_its_callers_back() -> None:
    """16 uploads to a stalled replica: each gets a window's worth of bytes off, and no more."""
    async with replica() as upstream, running_door(upstream.lease()) as door:
        upstream.script = lambda peer, event: setattr(peer, "reads", False)
        async with caller(door.port) as peer:
            calls = [peer.call(end=False) for _ in range(16)]
            sends = [asyncio.create_task(peer.send(call, infer(12_000_000), end=True)) for call in calls]
            await asyncio.sleep(0.5)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            await asyncio.sleep(0.5)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown < 16_000
            assert all(peer.h2.local_flow_control_window(call) <= 0 for call in calls)
            for send in sends:
                send.cancel()
            await asyncio.gather(*sends, return_exceptions=True)
            for call in calls:
                peer.h2.reset_stream(call, 8)
            peer.flush()
            await door.settled()


async def test_windows_shrunk_by_settings_go_below_zero_and_come_back() -> None:
    async with replica() as upstream, running_door(upstream.lease()) as door:
        upstream.script = lambda peer, event: _echo_slowly(upstream, peer, event)
        async with caller(door.port) as peer:
            peer.reads = False
            call = peer.call(end=False)
            await peer.send(call, infer(50_000), end=True)
            await peer.until(lambda: len(peer.streams[call].data) >= 50_000)
            peer.h2.update_settings({WINDOW: 10, FRAME: 20_000})
            peer.flush()
            other = peer.call(infer(3000))
            await asyncio.sleep(0.2)
            assert len(peer.streams[other].data) == 10
            peer.h2.update_settings({WINDOW: 5000})
            peer.flush()
            seen = await peer.over(other)
            assert len(seen.data) == len(infer(3000)) and seen.status == "0"


# -- framing ----------------------------------------------------------------------------------------------


async def test_every_split_of_the_bytes_means_the_same() -> None:
    """Padding, priority, CONTINUATION, and the name cut at every byte."""
    block = encode([(a.encode(), b.encode()) for a, b in call_headers()])
    message = infer(20)
    async with replica() as upstream, running_door(upstream.lease()) as door:
        async with await RawCaller.open(door.port) as peer:
            number = 1
            for cut in range(1, len(block)):
                raw = frames.frame(
                    frames.HEADERS,
                    frames.PADDED | frames.HAS_PRIORITY,
                    number,
                    bytes([3]) + b"\0\0\0\0\x10" + block[:cut] + b"\0\0\0",
                )
                raw += frames.frame(frames.CONTINUATION, 0, number, b"")
                raw += frames.frame(frames.CONTINUATION, frames.END_HEADERS, number, block[cut:])
                raw += frames.frame(frames.PRIORITY, 0, number, b"\0\0\0\0\x01")
                raw += frames.frame(
                    frames.DATA, frames.PADDED, number, b"\x05" + message[: cut % len(message)] + bytes(5)
                )
                raw += frames.frame(0x77, 0, number, b"unknown")
                raw += frames.frame(frames.DATA, frames.END_STREAM, number, message[cut % len(message) :])
                for at in range(0, len(raw), 1 + cut % 7):
                    peer.send(raw[at : at + 1 + cut % 7])
                number += 2
                if cut % 16 == 0:
                    await asyncio.sleep(0)
            await until(lambda: len(upstream.calls) == len(block) - 1 and door.pool.in_flight == 0)
            assert all(bytes(seen.data) == message for seen in upstream.calls)
            assert [told["status"] for told in door.counted.requests] == [0] * (len(block) - 1)


async def test_long_metadata_is_continued_and_passes() -> None:
    async with replica() as upstream, running_door(upstream.lease()) as door:
        async with caller(door.port) as peer:
            call = peer.call(infer(), ("x-long", "v" * 40_000))
            assert (await peer.over(call)).status == "0"
            assert upstream.calls[0].headers["x-long"] == "v" * 40_000
            call = peer.call(infer(), ("x-long", "v" * 66_000))
            assert (await peer.over(call)).status == "8"  # over header_limit_bytes: this call only
            assert (await peer.over(peer.call(infer()))).status == "0"


async def test_pings_are_answered_at_any_rate() -> None:
    """A-033."""
    async with running_door() as door, caller(door.port) as peer:
        for _ in range(200):
            peer.h2.ping(b"12345678")
        peer.flush()
        await peer.until(lambda: peer.pongs == 200)
        assert not peer.goaways


async def test_tables_before_our_settings_are_known() -> None:
    """A caller may use its dynamic table until it has our settings; h2 does, all the time."""
    async with replica() as upstream, running_door(upstream.lease()) as door:
        async with caller(door.port) as peer:
            early = [peer.call(infer(), ("x-mark", "same")) for _ in range(3)]
            for call in early:
                assert (await peer.over(call)).status == "0"
            for call in [peer.call(infer(), ("x-mark", "same")) for _ in range(3)]:
                assert (await peer.over(call)).status == "0"
            assert [seen.headers["x-mark"] for seen in upstream.calls] == ["same"] * 6


# -- who is served where ----------------------------------------------------------------------------------


async def test_one_connection_of_a_caller_reaches_all_replicas() -> None:
    """A-032."""
    async with replica() as one, replica() as two, running_door(one.lease("a"), two.lease("b")) as door:
        async with caller(door.port) as peer:
            calls = [peer.call(infer()) for _ in range(60)]
            for call in calls:
                assert (await peer.over(call)).status == "0"
            assert len(one.calls) == len(two.calls) == 30


async def test_streams_are_bounded_by_what_the_replica_allows() -> None:
    async with replica({STREAMS: 2}) as upstream, running_door(upstream.lease()) as door:
        upstream.script = lambda peer, event: None
        async with caller(door.port) as peer:
            for _ in range(7):
                peer.call(infer())
            await until(lambda: len(upstream.calls) == 7)
            assert len(upstream.connections) == 4
            upstream.script = upstream.echo
            for connection in upstream.connections:
                for stream_id in [key for key in connection.streams if key]:
                    upstream.answer(connection, stream_id, infer())
            await door.settled()


async def test_interleaved_messages_of_two_streams() -> None:
    async with replica() as upstream, running_door(upstream.lease()) as door:

        def each(peer: Peer, event: Any) -> None:
            if isinstance(event, h2.events.RequestReceived):
                peer.h2.send_headers(event.stream_id, [(":status", "200"), ("content-type", "application/grpc")])
            elif isinstance(event, h2.events.DataReceived) and event.data:
                peer.h2.send_data(event.stream_id, event.data)
            elif isinstance(event, h2.events.StreamEnded):
                peer.h2.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)

        upstream.script = each
        async with caller(door.port) as peer:
            one, two = (peer.call(path=STREAM, end=False) for _ in range(2))
            for number in range(20):
                await peer.send(one, infer(10 + number))
                await peer.send(two, infer(50 + number))
            await peer.send(one, infer(), end=True)
            await peer.send(two, infer(), end=True)
            assert bytes((await peer.over(one)).data) == b"".join(infer(10 + n) for n in range(20)) + infer()
            assert bytes((await peer.over(two)).data) == b"".join(infer(50 + n) for n in range(20)) + infer()
            await door.settled()


# -- cancels, losses, goodbyes ----------------------------------------------------------------------------


async def test_random_cancels_leave_no_slot_taken() -> None:
    rng = random.Random(7)
    async with replica() as one, replica() as two, running_door(one.lease("a"), two.lease("b")) as door:

        def sometimes(peer: Peer, event: Any) -> None:
            if rng.random() < 0.5:
                one.echo(peer, event)

        one.script = two.script = sometimes
        async with caller(door.port) as peer:
            for number in range(300):
                whole = rng.random() < 0.5
                call = peer.call(infer(rng.choice((0, 100, 5000))), end=whole) if whole else peer.call(end=False)
                if not whole and rng.random() < 0.5:
                    await peer.send(call, infer(20000)[: rng.randrange(20000)])
                if number % 3 == 0:
                    await asyncio.sleep(0)
                if not peer.streams[call].over:
                    peer.h2.reset_stream(call, 8)
                    peer.flush()
            await door.settled()
            await until(lambda: len(door.counted.requests) == 300)
            one.script = two.script = one.echo
            assert (await peer.over(peer.call(infer()))).status == "0"


async def test_a_caller_that_vanishes_frees_everything() -> None:
    async with replica() as upstream, running_door(upstream.lease(), max_in_flight_per_replica=3) as door:
        upstream.script = lambda peer, event: None
        async with caller(door.port) as peer:
            for _ in range(8):
                peer.call(infer())
            await until(lambda: door.pool.in_flight == 3 and door.pool.held == 5)
        await door.settled()
        await until(lambda: all(seen.reset == 8 for seen in upstream.calls))


async def test_a_replica_killed_in_mid_answer_is_told() -> None:
    async with replica() as upstream, running_door(upstream.lease()) as door:

        def half(peer: Peer, event: Any) -> None:
            if isinstance(event, h2.events.StreamEnded):
                peer.h2.send_headers(event.stream_id, [(":status", "200"), ("content-type", "application/grpc")])
                peer.h2.send_data(event.stream_id, infer(100)[:50])
                peer.flush()

        upstream.script = half
        async with caller(door.port) as peer:
            call = peer.call(infer())
            await peer.until(lambda: len(peer.streams[call].data) == 50)
            await upstream.connections[0].close()
            seen = await peer.over(call)
            assert (seen.status, seen.trailers[ERROR_KIND_HEADER]) == ("14", "replica_lost")
        await door.settled()


async def test_a_request_lost_before_it_was_whole_goes_to_another() -> None:
    async with replica() as one, replica() as two, running_door(one.lease("a")) as door:
        one.script = lambda peer, event: None
        async with caller(door.port) as peer:
            message = infer(3000)
            call = peer.call(message[:1000], end=False)
            await until(lambda: one.calls and len(one.calls[0].data) == 1000)
            door.pool.update([one.lease("a"), two.lease("b")])
            one.refuse()
            await one.connections[0].close()
            await until(lambda: bool(two.calls))
            await peer.send(call, message[1000:], end=True)
            seen = await peer.over(call)
            assert (seen.status, bytes(seen.data)) == ("0", message)


@pytest.mark.parametrize("how", ["refused", "goaway"])
async def test_what_provably_did_not_run_is_sent_elsewhere(how: str) -> None:
    async with replica() as one, replica() as two, running_door(one.lease("a"), two.lease("b")) as door:

        def decline(peer: Peer, event: Any) -> None:
            if isinstance(event, h2.events.StreamEnded):
                if how == "refused":
                    peer.h2.reset_stream(event.stream_id, Code.REFUSED_STREAM)
                else:
                    peer.raw(frames.goaway(max(0, event.stream_id - 2), 0))
                peer.flush()

        one.script = decline
        async with caller(door.port) as peer:
            for _ in range(8):
                assert (await peer.over(peer.call(infer(500)))).status == "0"
            assert one.calls and len(two.calls) == 8
        await door.settled()


async def test_goaway_of_a_replica_lets_its_calls_finish() -> None:
    async with replica() as upstream, running_door(upstream.lease()) as door:

        def goodbye(peer: Peer, event: Any) -> None:
            if isinstance(event, h2.events.StreamEnded):
                peer.raw(frames.goaway(frames.LARGEST_STREAM_ID, 0))
                upstream.echo(peer, event)

        upstream.script = goodbye
        async with caller(door.port) as peer:
            for _ in range(3):
                assert (await peer.over(peer.call(infer()))).status == "0"
            assert len(upstream.connections) == 3
            await until(lambda: upstream.open == 0)


async def test_a_draining_door_says_goodbye_and_finishes() -> None:
    """Also a call that crosses the first goodbye on the wire is served; the idle connection closes."""
    async with replica() as upstream, running_door(upstream.lease()) as door:
        upstream.script = lambda peer, event: None
        async with await RawCaller.open(door.port) as busy, await RawCaller.open(door.port) as idle:
            busy.send(_open(1) + frames.frame(frames.DATA, 1, 1, infer()))
            await until(lambda: bool(upstream.calls) and upstream.calls[0].ended and idle.got)
            busy.send(_open(3) + frames.frame(frames.DATA, 1, 3, infer()))
            drain = asyncio.create_task(door.door.drain(5))
            await until(lambda: len(busy.of(frames.GOAWAY)) == 2)
            assert [frames.word(payload) for payload in busy.of(frames.GOAWAY)] == [frames.LARGEST_STREAM_ID, 3]
            busy.send(_open(5) + frames.frame(frames.DATA, 1, 5, infer()))  # too late, and ignored
            await until(lambda: idle.closed)
            for number in (1, 3):
                await until(lambda: len(upstream.calls) == 2)
                upstream.answer(upstream.connections[0], number, infer())
            await drain
            await until(lambda: upstream.open == 0 and busy.closed)
            assert [busy.headers(number).get("grpc-status") for number in (1, 3, 5)] == ["0", "0", None]


async def test_the_drain_limit_ends_what_does_not_end() -> None:
    async with replica() as upstream, running_door(upstream.lease()) as door:
        upstream.script = lambda peer, event: None
        async with await RawCaller.open(door.port) as peer:
            peer.send(_open(1) + frames.frame(frames.DATA, 1, 1, infer()))
            await until(lambda: door.pool.in_flight == 1)
            await door.door.drain(0.3)
            await until(lambda: peer.closed)
            headers = peer.headers(1)
            assert (headers["grpc-status"], headers[ERROR_KIND_HEADER]) == ("14", "draining")


async def test_a_stream_on_a_leaving_replica_ends_at_a_message() -> None:
    """The message under way is completed first."""
    async with replica() as upstream, running_door(upstream.lease()) as door:
        async with caller(door.port) as peer:
            message = infer(100)
            call = peer.call(message + message[:30], path=STREAM, end=False)
            await until(lambda: upstream.calls and len(upstream.calls[0].data) == len(message) + 30)
            door.pool.update([upstream.lease().model_copy(update={"state": ReplicaState.DRAINING})])
            await peer.send(call, message[30:] + message)
            seen = await peer.over(call)
            assert bytes(upstream.calls[0].data) == message * 2 and upstream.calls[0].ended
            assert bytes(seen.data) == message * 2
            assert (seen.status, seen.trailers[ERROR_KIND_HEADER]) == ("14", "draining")
            await until(lambda: upstream.open == 0)


async def test_a_replica_that_accepts_and_says_nothing_is_unreached() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with replica() as two:
        stalled = two.lease("a").model_copy(update={"grpc_address": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"})
        async with running_door(stalled, settings={"connect_timeout_seconds": 0.3}) as door:
            async with caller(door.port) as peer:
                call = peer.call(infer())
                await until(lambda: door.pool.in_flight == 1)
                door.pool.update([stalled, two.lease("b")])
                assert (await peer.over(call)).status == "0"
    server.close()


async def test_deadlines() -> None:
    """A held call and one on a replica; what is left travels."""
    async with replica() as upstream, running_door() as door:
        upstream.script = lambda peer, event: None
        async with caller(door.port) as peer:
            held = await peer.over(peer.call(infer(), ("grpc-timeout", "200m")))
            assert (held.status, held.headers[ERROR_KIND_HEADER]) == ("4", "deadline")
            call = peer.call(infer(), ("grpc-timeout", "500m"))
            await until(lambda: door.pool.held == 1)
            await asyncio.sleep(0.1)
            door.pool.update([upstream.lease()])
            seen = await peer.over(call)
            assert (seen.status, seen.headers[ERROR_KIND_HEADER]) == ("4", "deadline")
            assert 100_000 < int(upstream.calls[0].headers["grpc-timeout"][:-1]) < 410_000
            await until(lambda: upstream.calls[0].reset == Code.CANCEL)
        await door.settled()


async def test_connections_to_replicas_close_when_idle() -> None:
    async with replica() as upstream, running_door(upstream.lease(), settings={"idle_upstream_seconds": 0.5}) as door:
        async with caller(door.port) as peer:
            assert (await peer.over(peer.call(infer()))).status == "0"
            assert upstream.open == 1
            await until(lambda: upstream.open == 0)
            assert (await peer.over(peer.call(infer()))).status == "0"


# -- what is no gRPC, and what is too much ----------------------------------------------------------------


async def test_other_protocols_are_turned_away() -> None:
    async with running_door() as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 415 ")
        writer.close()
        async with caller(door.port) as peer:
            stream_id = peer.h2.get_next_available_stream_id()
            peer.h2.send_headers(
                stream_id,
                [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "a")],
                end_stream=True,
            )
            peer.flush()
            await peer.until(lambda: stream_id in peer.streams and peer.streams[stream_id].ended)
            assert peer.streams[stream_id].headers[":status"] == "405"


BLOCK = encode([(a.encode(), b.encode()) for a, b in call_headers()])
BAD_BLOCKS = [
    [(":method", "POST")],
    [*call_headers(), (":path", "/again")],
    [*call_headers(), ("connection", "close")],
    [*call_headers(), ("X-Upper", "a")],
    [*call_headers(), ("x-bin", "!!!")],
    [*call_headers(), ("x", "a\r\nb: c")],
    [(name, value) for name, value in call_headers() if name != "te"] + [("te", "gzip")],
]


@pytest.mark.parametrize("fields", BAD_BLOCKS)
async def test_malformed_heads_reset_their_stream_only(fields: list[tuple[str, str]]) -> None:
    async with replica() as upstream, running_door(upstream.lease()) as door, caller(door.port) as peer:
        await peer.until(lambda: peer.h2.remote_settings.get(STREAMS, 0) == 1000)
        assert (await peer.over(peer.call(infer()))).status == "0"
        bad = encode([(a.encode(), b.encode()) for a, b in fields])
        call = peer.h2.get_next_available_stream_id()
        peer.h2.send_headers(call, call_headers())
        peer.h2.data_to_send()
        peer.raw(frames.header_frames(call, bad, end_stream=True, frame_size=16384))
        seen = await peer.over(call) if call in peer.streams else None
        await peer.until(lambda: call in peer.streams and peer.streams[call].reset is not None)
        assert peer.streams[call].reset == Code.PROTOCOL_ERROR or seen
        assert (await peer.over(peer.call(infer()))).status == "0"
        assert len(upstream.connections) == 1


def _open(stream_id: int, flags: int = 0) -> bytes:
    return frames.frame(frames.HEADERS, frames.END_HEADERS | flags, stream_id, BLOCK)


FAULTS: dict[str, tuple[bytes, Code]] = {
    "even stream": (_open(2), Code.PROTOCOL_ERROR),
    "stream zero": (_open(0), Code.PROTOCOL_ERROR),
    "data on an idle stream": (frames.frame(frames.DATA, 0, 5, b"x"), Code.PROTOCOL_ERROR),
    "data behind the end": (
        _open(1) + frames.frame(frames.DATA, 1, 1, infer()) + frames.frame(frames.DATA, 0, 1, b"x"),
        Code.STREAM_CLOSED,
    ),
    "too long a frame": (frames.frame_head(frames.DATA, 0, 1, 16385), Code.FRAME_SIZE_ERROR),
    "window to nowhere": (frames.window_update(0, 0), Code.PROTOCOL_ERROR),
    "window overflow": (frames.window_update(0, 2**31 - 1), Code.FLOW_CONTROL_ERROR),
    "interrupted block": (
        frames.frame(frames.HEADERS, 0, 1, BLOCK[:5]) + frames.frame(frames.PING, 0, 0, bytes(8)),
        Code.PROTOCOL_ERROR,
    ),
    "lone continuation": (frames.frame(frames.CONTINUATION, 4, 1, b""), Code.PROTOCOL_ERROR),
    "continuation flood": (
        frames.frame(frames.HEADERS, 0, 1, b"") + frames.frame(frames.CONTINUATION, 0, 1, b"") * 200,
        Code.ENHANCE_YOUR_CALM,
    ),
    "endless block": (
        frames.frame(frames.HEADERS, 0, 1, b"") + frames.frame(frames.CONTINUATION, 0, 1, bytes(16000)) * 20,
        Code.ENHANCE_YOUR_CALM,
    ),
    "no header block": (frames.frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\x0f"), Code.COMPRESSION_ERROR),
    "settings of seven bytes": (frames.frame(frames.SETTINGS, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "settings on a stream": (frames.frame(frames.SETTINGS, 0, 1, b""), Code.PROTOCOL_ERROR),
    "a huge initial window": (frames.settings_frame({4: 2**31}), Code.FLOW_CONTROL_ERROR),
    "a tiny frame size": (frames.settings_frame({5: 100}), Code.PROTOCOL_ERROR),
    "push": (frames.frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), Code.PROTOCOL_ERROR),
    "short ping": (frames.frame(frames.PING, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "all padding": (_open(1) + frames.frame(frames.DATA, frames.PADDED, 1, b"\x09abc"), Code.PROTOCOL_ERROR),
    "more data than the window": (
        _open(1)
        + frames.frame(frames.DATA, 0, 1, infer(10**6)[:16384])
        + frames.frame(frames.DATA, 0, 1, bytes(16384)) * 4,
        Code.FLOW_CONTROL_ERROR,
    ),
    "reset of an idle stream": (frames.rst_stream(9, 8), Code.PROTOCOL_ERROR),
    "ping flood": (frames.frame(frames.PING, 0, 0, bytes(8)) * 9000, Code.ENHANCE_YOUR_CALM),
    "settings flood": (frames.settings_frame({}) * 9000, Code.ENHANCE_YOUR_CALM),
    "empty data flood": (_open(1) + frames.frame(frames.DATA, 0, 1) * 9000, Code.ENHANCE_YOUR_CALM),
    "priority flood": (frames.frame(frames.PRIORITY, 0, 1, bytes(5)) * 9000, Code.ENHANCE_YOUR_CALM),
    "rapid reset": (
        b"".join(_open(number) + frames.rst_stream(number, 8) for number in range(1, 12001, 2)),
        Code.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_faults_end_the_connection_and_nothing_else(name: str) -> None:
    raw, code = FAULTS[name]
    async with running_door() as door, caller(door.port) as good:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(frames.PREFACE + frames.settings_frame({}) + frames.frame(frames.SETTINGS, frames.ACK, 0) + raw)
        reader_of = frames.FrameReader()
        got: list[frames.Frame] = []
        async with asyncio.timeout(10):
            try:
                while data := await reader.read(65536):
                    got += reader_of.feed(data)
            except ConnectionError:
                pass
        writer.transport.abort()
        goodbye = [payload for kind, _, _, payload in got if kind == frames.GOAWAY]
        assert goodbye and frames.word(goodbye[-1], 4) == code, got[-3:]
        await door.settled()
        seen = await good.over(good.call(b"\0\0\0\0\0", path="/inference.GRPCInferenceService/ServerLive"))
        assert seen.status == "0"


async def test_noise_never_breaks_the_door(caplog: pytest.LogCaptureFixture) -> None:
    """Frames with random content, of all types, whole and cut."""
    rng = random.Random(3)
    async with replica() as upstream, running_door(upstream.lease()) as door:
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", door.port)
            raw = frames.PREFACE + frames.settings_frame({})
            for _ in range(rng.randrange(1, 30)):
                kind = rng.randrange(11)
                payload = BLOCK if kind == 1 and rng.random() < 0.7 else rng.randbytes(rng.choice((0, 4, 5, 6, 8, 50)))
                if kind == 0 and rng.random() < 0.5:
                    payload = infer(20)
                raw += frames.frame(kind, rng.choice((0, 1, 4, 5, 8, 0x20, 0xFF)), rng.choice((0, 1, 3, 5)), payload)
            writer.write(raw[: rng.randrange(len(raw)) + 1])
            await asyncio.sleep(0)
            writer.close()
        await door.settled()
        async with caller(door.port) as peer:
            assert (await peer.over(peer.call(infer()))).status == "0"
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


async def test_noise_from_a_replica_never_breaks_the_door(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(4)

    async def noisy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.settings_frame({}))
        await reader.read(4096)
        for _ in range(rng.randrange(1, 10)):
            writer.write(
                frames.frame(
                    rng.randrange(11),
                    rng.choice((0, 1, 4, 5, 8)),
                    rng.choice((0, 1, 3)),
                    rng.randbytes(rng.choice((0, 4, 8))),
                )
            )
        writer.close()

    server = await asyncio.start_server(noisy, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    lease = ReplicaLease(id="r1", pool="vision", state=ReplicaState.READY, grpc_address=address, models=("ident",))
    try:
        async with running_door(lease, hold_limit_seconds=0.3) as door:
            for _ in range(12):
                door.pool.update([])
                door.pool.update([lease])
                async with caller(door.port) as peer:
                    for call in [peer.call(infer()) for _ in range(3)]:
                        seen = await peer.over(call)
                        assert seen.over, seen
            await door.settled()
    finally:
        server.close()
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
