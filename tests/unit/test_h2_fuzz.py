"""The gRPC door between two peers that speak HTTP/2 by the library ``h2``, without a socket: whatever windows they
grant and however their bytes are cut, each call's bytes come through; and what a hostile peer may cost is bounded."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.at_zero import AtZero
from gateway.ingress import h2_frames as frames
from gateway.ingress import rpc_messages
from gateway.ingress.h2_frames import Code
from gateway.ingress.h2_headers import encode
from gateway.ingress.h2_leg import Leg
from gateway.ingress.protobuf import bytes_field
from gateway.ingress.rpc_door import GrpcDoor
from gateway.routing.pool import Pool
from gateway.settings import GatewaySettings
from tests.doors import Counted, HandRouter, pool_settings
from tests.h2_peer import STREAM, call_headers, framed
from tests.memory_wires import Wire, WireLoop, run_on_wires, turns
from wire.membership import ReplicaLease, ReplicaState

WINDOW = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
FRAME = h2.settings.SettingCodes.MAX_FRAME_SIZE
LEASE = ReplicaLease(
    id="r1", pool="vision", state=ReplicaState.READY, grpc_address="memory:1", models=("ident", "slow")
)
BLOCK = encode([(a.encode(), b.encode()) for a, b in call_headers()])


def infer(content: bytes = b"", model: bytes = b"ident") -> bytes:
    return framed(bytes_field(1, model) + (bytes_field(7, content) if content else b""))


@dataclass
class Stream:
    data: bytearray = field(default_factory=bytearray)
    fields: dict[str, str] = field(default_factory=dict)
    to_send: bytearray = field(default_factory=bytearray)
    ends: bool = False
    over: bool = False
    reset: int | None = None


class Peer:
    """One end of a wire, by ``h2``; ``sizes`` is how the bytes it sends are cut."""

    def __init__(self, wire: Wire, sizes: tuple[int, ...], window: int, *, client: bool, padding: int = 0) -> None:
        config = h2.config.H2Configuration(client_side=client, header_encoding="utf-8", validate_inbound_headers=False)
        self.h2 = h2.connection.H2Connection(config)
        self.h2.local_settings = h2.settings.Settings(client=client, initial_values={WINDOW: window})
        self.wire, self._sizes, self._padding = wire, sizes, padding
        self.streams: dict[int, Stream] = {}
        self.faults: list[int] = []
        self._read = 0
        self.on_end: Callable[[Peer, int], None] = lambda peer, stream_id: None
        self.h2.initiate_connection()

    def move(self) -> None:
        """Read what came, send what may be sent."""
        data, self._read = bytes(self.wire.sent[self._read :]), len(self.wire.sent)
        for event in self.h2.receive_data(data) if data else ():
            self._note(event)
        for stream_id, stream in self.streams.items():
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self._send_on(stream_id, stream)
        out = self.h2.data_to_send()
        if out and not self.wire.over:
            self.wire.deliver(out, self._sizes)

    def _send_on(self, stream_id: int, stream: Stream) -> None:
        while stream.to_send:
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            padding = min(self._padding, room - 2) if room > 2 and self._padding else None
            size = min(room - (padding + 1 if padding is not None else 0), len(stream.to_send))
            if size <= 0:
                return
            piece = bytes(stream.to_send[:size])
            del stream.to_send[:size]
            self.h2.send_data(stream_id, piece, pad_length=padding)
        if stream.ends:
            stream.ends = False
            if self.h2.config.client_side:
                self.h2.end_stream(stream_id)
            else:
                self.h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)

    def call(self, data: bytes, path: str = "/inference.GRPCInferenceService/ModelInfer") -> int:
        stream_id: int = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, call_headers(path))
        self.streams[stream_id] = Stream(to_send=bytearray(data), ends=True)
        return stream_id

    def _note(self, event: Any) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.faults.append(int(event.error_code))
        stream_id = getattr(event, "stream_id", None)
        if not stream_id:
            return
        stream = self.streams.setdefault(stream_id, Stream())
        if isinstance(event, h2.events.DataReceived):
            stream.data += event.data
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self.h2.acknowledge_received_data(event.flow_controlled_length, stream_id)
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived | h2.events.RequestReceived):
            stream.fields |= dict(event.headers)
        elif isinstance(event, h2.events.StreamReset):
            stream.over, stream.reset = True, int(event.error_code)
        elif isinstance(event, h2.events.StreamEnded):
            stream.over = True
            self.on_end(self, stream_id)


def echo(peer: Peer, stream_id: int) -> None:
    peer.h2.send_headers(stream_id, [(":status", "200"), ("content-type", "application/grpc")])
    stream = peer.streams[stream_id]
    stream.to_send, stream.ends = bytearray(stream.data), True


@dataclass
class Scene:
    loop: WireLoop
    pool: Pool
    caller_wire: Wire
    replicas: list[Peer]
    counted: Counted

    async def until(self, condition: Callable[[], Any], *peers: Peer, rounds: int = 20_000) -> None:
        for _ in range(rounds):
            for peer in (*peers, *self.replicas):
                peer.move()
            if condition():
                return
            await turns(2)
        raise AssertionError("stalled")


@asynccontextmanager
async def scene(
    loop: WireLoop, *, sizes: tuple[int, ...] = (1 << 20,), window: int = 65535, padding: int = 0, **given: Any
) -> AsyncIterator[Scene]:
    failures: list[Any] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    router, counted, replicas = HandRouter({"vision": pool_settings()}), Counted(), list[Peer]()
    router.pools["vision"].update([LEASE])
    door = GrpcDoor(router, GatewaySettings(**given), AtZero(router), counted)
    await door.start("memory", 1)

    def accept(wire: Wire) -> None:
        peer = Peer(wire, sizes, window, client=False, padding=padding)
        peer.on_end = echo
        replicas.append(peer)

    loop.on_dialled = accept
    wire = loop.dial()
    try:
        yield Scene(loop, router.pools["vision"], wire, replicas, counted)
    finally:
        wire.abort()
        await turns()
        await door.drain(0.0)
        await turns()
    assert not failures
    assert router.pools["vision"].in_flight == 0


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.lists(st.binary(max_size=300), min_size=1, max_size=5),
    *(st.sampled_from((1, 2, 7, 100, 16384, 65535)),) * 2,
    *(SIZES,) * 2,
    *(st.sampled_from((0, 1, 30)),) * 2,
)
def test_calls_come_through_any_windows_and_any_cuts(
    contents: list[bytes], window: int, other: int, sizes: Any, cuts: Any, padding: int, filling: int
) -> None:
    async def story(loop: WireLoop) -> None:
        async with scene(loop, sizes=cuts, window=other, padding=filling) as it:
            caller = Peer(it.caller_wire, sizes, window, client=True, padding=padding)
            calls = {caller.call(infer(content)): infer(content) for content in contents}
            await it.until(lambda: all(caller.streams[call].over for call in calls), caller)
            for call, sent in calls.items():
                stream = caller.streams[call]
                assert (bytes(stream.data), stream.fields["grpc-status"], stream.reset) == (sent, "0", None)
            assert not caller.faults and not any(replica.faults for replica in it.replicas)

    run_on_wires(story)


class Carrier:
    """A connection that keeps what its stream writes."""

    def __init__(self) -> None:
        self.send_window, self.frame_size, self.writable, self.credit = 65535, 16384, True, 0
        self.out = b""

    def put(self, data: bytes) -> None:
        self.out += data
        assert len(self.out) < 1000

    def put_headers(self, stream_id: int, block: bytes, *, end_stream: bool) -> None: ...
    def block(self, leg: Leg) -> None: ...
    def forget(self, leg: Leg) -> None: ...
    def taken(self, count: int) -> None: ...


def test_the_end_of_a_request_passes_a_window_below_zero() -> None:
    """A peer may shrink its windows while data is on its way; an empty end needs no room."""
    carrier = Carrier()
    leg = Leg(carrier, 1, -5)
    leg.send(b"", end=True)
    assert carrier.out == frames.frame(frames.DATA, frames.END_STREAM, 1)
    carrier = Carrier()
    leg = Leg(carrier, 1, -5)
    leg.send(b"abc", end=True)
    assert carrier.out == b""
    leg.window = 3
    leg.pump()
    assert carrier.out == frames.frame(frames.DATA, frames.END_STREAM, 1, b"abc")


def raw_head(stream_id: int, flags: int = 0) -> bytes:
    return frames.frame(frames.HEADERS, frames.END_HEADERS | flags, stream_id, BLOCK)


PREFACE = frames.PREFACE + frames.settings_frame({}) + frames.frame(frames.SETTINGS, frames.ACK, 0)


def goodbye(wire: Wire) -> list[int]:
    """The codes of the GOAWAY frames."""
    got = frames.FrameReader().feed(bytes(wire.sent))
    return [frames.word(payload, 4) for kind, _, _, payload in got if kind == frames.GOAWAY]


def test_streams_share_a_small_connection_window() -> None:
    """One that has always more to say does not keep the others waiting."""

    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            wire = it.caller_wire
            wire.deliver(
                frames.PREFACE + frames.settings_frame({4: 1 << 20}) + frames.frame(frames.SETTINGS, frames.ACK, 0)
            )
            # The first fills the connection's 64 KiB and has more; the second comes behind it.
            for number, size in ((1, 300_000), (3, 5_000)):
                raw = infer(bytes(size))
                wire.deliver(raw_head(number))
                for at in range(0, len(raw), 16_000):
                    end = frames.END_STREAM if at + 16_000 >= len(raw) else 0
                    wire.deliver(frames.frame(frames.DATA, end, number, raw[at : at + 16_000]))
                    for _ in range(4):
                        await turns(2)
                        for replica in it.replicas:
                            replica.move()
            for _ in range(40):
                for replica in it.replicas:
                    replica.move()
                await turns(3)
            for _ in range(12):
                wire.deliver(frames.window_update(0, 1_000))
                await turns(3)
            got = frames.FrameReader().feed(bytes(wire.sent))
            assert sum(len(payload) for kind, _, i, payload in got if (kind, i) == (frames.DATA, 3)) >= 4_000

    run_on_wires(story)


def test_moving_the_windows_of_many_streams_over_and_over_is_a_flood() -> None:
    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            it.caller_wire.deliver(PREFACE + b"".join(raw_head(number) for number in range(1, 2000, 2)))
            flood = frames.settings_frame({4: 1}) + frames.settings_frame({4: 70_000})
            for _ in range(400):
                it.caller_wire.deliver(flood)
            assert goodbye(it.caller_wire) == [Code.ENHANCE_YOUR_CALM]

    run_on_wires(story)


def test_a_setting_that_comes_many_times_in_one_frame_is_set_once() -> None:
    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            settings_payload = b"".join(b"\0\4" + (70_000 + n % 2).to_bytes(4) for n in range(2700))
            it.caller_wire.deliver(PREFACE + raw_head(1) + frames.frame(frames.SETTINGS, 0, 0, settings_payload))
            connection = it.caller_wire.protocol
            assert connection.legs[1].window == 70_001

    run_on_wires(story)


def test_errors_inside_a_stream_that_nobody_reads_are_bounded() -> None:
    """A caller who asks for unknown models, takes no answer, and asks on."""

    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            wire = it.caller_wire
            wire.deliver(frames.PREFACE + frames.settings_frame({4: 0}) + frames.frame(frames.SETTINGS, frames.ACK, 0))
            path = [(a.encode(), b.encode()) for a, b in call_headers(STREAM)]
            wire.deliver(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, encode(path)))
            message = infer(model=b"x" * 900)
            window, asked = 65535, 0
            while asked < 5_000_000 and not wire.over:
                if window < len(message):
                    await turns(2)
                    opened = _opened(wire, 1)
                    if opened + 65535 - asked < len(message):
                        break
                    window = opened + 65535 - asked
                wire.deliver(frames.frame(frames.DATA, 0, 1, message))
                window -= len(message)
                asked += len(message)
            assert asked < 1_000_000

    run_on_wires(story)


def _opened(wire: Wire, stream_id: int) -> int:
    got = frames.FrameReader().feed(bytes(wire.sent))
    return sum(frames.word(payload) for kind, _, i, payload in got if (kind, i) == (frames.WINDOW_UPDATE, stream_id))


@pytest.mark.parametrize("name", ["a name that does not come", "fields without an end"])
def test_a_request_in_crumbs_is_looked_at_now_and_then(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every crumb: that would cost the square of what was sent."""
    looks = 0
    real = rpc_messages.strings_in_prefix

    def counting(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return real(*given)

    monkeypatch.setattr(rpc_messages, "strings_in_prefix", counting)
    body = b"\x0a\x82\x80\x02" if name == "a name that does not come" else b""

    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            it.caller_wire.deliver(PREFACE + raw_head(1) + frames.frame(frames.DATA, 0, 1, b"\0\0\1\0\0" + body))
            crumb = b"a" if body else b"\x08\x05"
            for _ in range(4000):
                it.caller_wire.deliver(frames.frame(frames.DATA, 0, 1, crumb))
            assert looks < 40

    run_on_wires(story)


# -- frames that nobody should send -------------------------------------------------------------------------

PAYLOADS = st.one_of(
    st.sampled_from(
        [b"", bytes(4), bytes(5), bytes(6), bytes(8), b"\0\0\0\x08", b"\0\4\0\0\0\0", BLOCK, infer(b"x" * 30)]
    ),
    st.binary(max_size=40),
)
FRAMES = st.lists(
    st.tuples(
        st.integers(0, 11),
        st.sampled_from((0, 1, 4, 5, 8, 0x20, 0x2D, 0xFF)),
        st.sampled_from((0, 1, 2, 3, 5)),
        PAYLOADS,
    ),
    max_size=25,
)


@given(FRAMES, SIZES)
def test_whatever_frames_a_caller_sends_the_door_lives(sent: list[frames.Frame], sizes: tuple[int, ...]) -> None:
    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            it.caller_wire.deliver(PREFACE + b"".join(frames.frame(*each) for each in sent), sizes)
            for _ in range(4):
                await turns(4)
                for replica in it.replicas:
                    replica.move()

    with no_failures():
        run_on_wires(story)


@given(FRAMES, SIZES)
def test_whatever_frames_a_replica_sends_the_call_ends_with_its_connection(
    sent: list[frames.Frame], sizes: tuple[int, ...]
) -> None:
    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            wires: list[Wire] = []
            loop.on_dialled = wires.append
            it.caller_wire.deliver(PREFACE + raw_head(1) + frames.frame(frames.DATA, frames.END_STREAM, 1, infer()))
            await turns(6)
            wires[0].deliver(frames.settings_frame({}))
            await turns(6)
            wires[0].deliver(b"".join(frames.frame(*each) for each in sent), sizes)
            await turns(6)
            it.pool.update([])
            for wire in wires:
                wire.end()
            await turns(6)
            got = frames.FrameReader().feed(bytes(it.caller_wire.sent))
            assert any(
                i == 1 and (kind == frames.RST_STREAM or flags & frames.END_STREAM) for kind, flags, i, _ in got
            ) or (it.pool.held)

    with no_failures():
        run_on_wires(story)


@contextlib.contextmanager
def no_failures() -> Iterator[None]:
    """A connection that runs into an error of its own logs it, and goes."""
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logging.getLogger("gateway").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("gateway").removeHandler(handler)
    assert not [record for record in seen if record.levelno >= logging.ERROR]
