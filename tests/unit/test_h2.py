"""HTTP/2 and gRPC framing without a socket: at any split of the bytes, and against the library ``hpack``."""

import contextlib
import gzip
import zlib

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ingress import h2_frames as frames
from gateway.ingress.h2_frames import Code, ConnectionFault, FrameReader
from gateway.ingress.h2_headers import HeaderBlocks, MalformedError, TooLongError, checked_request, encode
from gateway.ingress.h2_window import STREAM_WINDOW_LIMIT, ReceiveWindow, widened
from gateway.ingress.protobuf import bytes_field
from gateway.ingress.rpc_calls import AnswerHead, CallHead, error_fields, read_answer, read_call
from gateway.ingress.rpc_messages import FirstMessage, MessageMeter, framed, plain_name
from wire.errors import ErrorKind, TidegateError

FRAMES = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1), st.binary(max_size=60)), max_size=8
)
CALL = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/inference.GRPCInferenceService/ModelInfer")]
TYPE = (b"content-type", b"application/grpc")


@given(FRAMES, st.lists(st.integers(1, 20), min_size=1))
def test_frames_come_out_however_their_bytes_are_cut(given_frames: list[frames.Frame], sizes: list[int]) -> None:
    raw = b"".join(frames.frame(*each) for each in given_frames)
    reader, out, at, turn = FrameReader(), [], 0, 0
    while at < len(raw):
        size = sizes[turn % len(sizes)]
        out += reader.feed(raw[at : at + size])
        at, turn = at + size, turn + 1
    assert out == given_frames and not reader.oversize


def test_a_frame_over_the_announced_size_ends_the_reading() -> None:
    reader = FrameReader()
    good = frames.frame(frames.PING, 0, 0, bytes(8))
    assert len(reader.feed(good + frames.frame_head(frames.DATA, 0, 1, 16385))) == 1
    assert reader.oversize


@pytest.mark.parametrize("size", [1, 10, 16384, 16385, 40000])
def test_header_blocks_are_continued(size: int) -> None:
    block = bytes(size)
    cut = FrameReader().feed(frames.header_frames(7, block, end_stream=True, frame_size=16384))
    assert b"".join(payload for *_, payload in cut) == block
    assert cut[0][0] == frames.HEADERS and cut[0][1] & frames.END_STREAM
    assert [bool(flags & frames.END_HEADERS) for _, flags, _, _ in cut] == [False] * (len(cut) - 1) + [True]


@pytest.mark.parametrize(
    ("payload", "flags", "content"),
    [
        (b"\x02abc\0\0", frames.PADDED, b"abc"),
        (b"\0\0\0\0\x10abc", frames.HAS_PRIORITY, b"abc"),
        (b"\x01\0\0\0\0\x10abc\0", frames.PADDED | frames.HAS_PRIORITY, b"abc"),
        (b"\0", frames.PADDED, b""),
        (b"\x01", frames.PADDED, None),
        (b"", frames.PADDED, None),
    ],
)
def test_padding(payload: bytes, flags: int, content: bytes | None) -> None:
    if content is None:
        with pytest.raises(ConnectionFault):
            frames.unpadded(payload, flags)
    else:
        assert frames.unpadded(payload, flags) == content


# -- header blocks ----------------------------------------------------------------------------------------

TEXT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=300).map(str.encode)
NAME = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1, max_size=140).map(str.encode)


@given(st.lists(st.tuples(NAME, TEXT)))
def test_what_is_encoded_decodes_to_the_same(fields: list[tuple[bytes, bytes]]) -> None:
    decoder = hpack.Decoder(max_header_list_size=10**6)
    assert [(bytes(n), bytes(v)) for n, v in decoder.decode(encode(fields), raw=True)] == fields
    assert not decoder.header_table.dynamic_entries


def test_blocks_are_read_whatever_their_encoding() -> None:
    blocks: HeaderBlocks[CallHead] = HeaderBlocks(read_call, 65536)
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    fields = [
        *CALL,
        TYPE,
        (b"grpc-timeout", b"250m"),
        (b"tidegate-job", b"7"),
        (b"tidegate-class", b"batch"),
        (b"a-bin", b"AAE="),
        (b"x", b"y"),
    ]
    head = blocks.read(encoder.encode(fields))
    assert head is blocks.read(encode(fields)) or head.block == blocks.read(encode(fields)).block
    assert head.method is not None and head.method.name == "ModelInfer"
    assert (head.timeout_seconds, head.job, head.status) == (0.25, True, 200)
    passed = dict(hpack.Decoder().decode(head.block, raw=True))
    assert head.declared_class == b"batch"
    assert (
        not {b"tidegate-job", b"tidegate-class"} & set(passed) and passed[b"a-bin"] == b"AAE" and passed[b"x"] == b"y"
    )
    assert dict(hpack.Decoder().decode(head.block_with(1.5), raw=True))[b"grpc-timeout"] == b"1500000u"


def test_a_block_that_refers_to_a_table_or_does_not_end_is_a_fault() -> None:
    blocks: HeaderBlocks[CallHead] = HeaderBlocks(read_call, 65536)
    for block in (b"\xbe", b"\x3f\xe1\x1f", b"\x00\x05ab", b"\xff\xff\xff\xff", b"\x00"):
        with pytest.raises(ConnectionFault) as caught:
            blocks.read(block)
        assert caught.value.code is Code.COMPRESSION_ERROR
    with pytest.raises(TooLongError):
        blocks.read(encode([*CALL, TYPE, (b"x", bytes(b"y" * 65536))]))


@given(st.binary(max_size=80))
def test_no_block_raises_anything_else(block: bytes) -> None:
    for blocks in (HeaderBlocks(read_call, 4096), HeaderBlocks[AnswerHead](read_answer, 4096)):  # type: ignore[list-item]
        with contextlib.suppress(ConnectionFault, MalformedError, TooLongError):
            blocks.read(block)


@pytest.mark.parametrize(
    "more", [(b"Upper", b"a"), (b"te", b"gzip"), (b"x-bin", b"!"), (b"x", b"a\nb"), (b":path", b"/"), (b"", b"x")]
)
def test_fields_that_none_may_send(more: tuple[bytes, bytes]) -> None:
    with pytest.raises(MalformedError):
        checked_request([*CALL, more])


def test_errors_are_written_as_grpc_wants_them() -> None:
    error = TidegateError(ErrorKind.NO_REPLICA, "späť: 100%", retry_after_seconds=1.2)
    fields = dict(hpack.Decoder().decode(error_fields(error, started=False), raw=True))
    assert fields[b"grpc-message"] == b"sp%C3%A4%C5%A5: 100%25"
    assert (fields[b"grpc-status"], fields[b"retry-after"], fields[b":status"]) == (b"14", b"2", b"200")


# -- flow control -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 70000)))
def test_a_peer_never_gets_more_than_the_limit_and_never_stalls(sizes: list[int]) -> None:
    window, granted, received, taken = ReceiveWindow(), 65535, 0, 0
    for size in sizes:
        size = min(size, granted - received)
        assert size > 0  # whatever was received has been taken: the window must be open
        window.receive(size)
        received += size
        taken += size
        granted += window.take(size)
        assert granted - taken <= STREAM_WINDOW_LIMIT
    with pytest.raises(ConnectionFault):
        window.receive(granted - received + 1)


def test_windows_may_go_below_zero_but_not_over_the_top() -> None:
    assert widened(100, -500) == -400
    assert widened(2**31 - 2, 1) == 2**31 - 1
    with pytest.raises(ConnectionFault):
        widened(2**31 - 1, 1)


# -- messages ---------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 9), min_size=1))
def test_the_meter_knows_where_messages_end(messages: list[bytes], sizes: list[int]) -> None:
    raw = b"".join(framed(message) for message in messages)
    ends = {0}
    for message in messages:
        ends.add(max(ends) + 5 + len(message))
    meter, at, turn = MessageMeter(1000), 0, 0
    while at < len(raw):
        piece = raw[at : at + sizes[turn % len(sizes)]]
        until = meter.until_boundary(piece)
        if not meter.at_boundary:
            assert at + until <= min(end for end in ends if end > at)
        meter.feed(piece)
        at, turn = at + len(piece), turn + 1
        assert meter.at_boundary == (at in ends)
    assert meter.first_end == (5 + len(messages[0]) if messages else None)


def test_the_meter_refuses_what_is_over_the_limit() -> None:
    for sizes in ([105], [1] * 105):
        meter = MessageMeter(99)
        with pytest.raises(TidegateError):
            for _ in sizes:
                meter.feed(framed(bytes(100))[: sizes[0]] if sizes[0] > 1 else b"\0\0\0\0\x64"[:5])


REQUEST = bytes_field(1, b"ident") + bytes_field(2, b"3") + bytes_field(3, b"id") + bytes_field(5, bytes(100))


@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate"])
def test_names_are_found_as_soon_as_they_are_certain(encoding: str) -> None:
    """At every prefix: the right answer or none."""
    packed = {"identity": REQUEST, "gzip": gzip.compress(REQUEST), "deflate": zlib.compress(REQUEST)}[encoding]
    raw = (b"\0" if encoding == "identity" else b"\1") + len(packed).to_bytes(4) + packed
    answers = [FirstMessage(raw[:cut], encoding.encode(), last=False).strings(1) for cut in range(len(raw) + 1)]
    assert answers[-1] == {1: "ident"}
    assert all(answer in (None, {1: "ident"}) for answer in answers)
    assert answers[:6] == [None] * 6
    if encoding == "identity":
        assert [plain_name(raw[:cut]) for cut in range(13)] == [None] * 13
        assert all(plain_name(raw[:cut]) == "ident" for cut in range(13, len(raw)))
        assert answers[13] == {1: "ident"}


def test_the_last_name_wins_and_a_lone_one_needs_the_end() -> None:
    twice = framed(bytes_field(1, b"a") + bytes_field(1, b"b"))
    assert plain_name(twice) is None
    assert FirstMessage(twice, b"identity", last=False).strings(1) == {1: "b"}
    assert plain_name(framed(bytes_field(1, b"a"))) is None
    assert plain_name(framed(bytes_field(1, b"a")) + framed(b"x")) is None
    with pytest.raises(TidegateError):
        FirstMessage(b"\1\0\0\0\x05abcde", b"zstd", last=True)


@given(st.binary(max_size=60))
def test_the_glance_agrees_with_the_close_look(body: bytes) -> None:
    raw = framed(body)
    glance = plain_name(raw)
    assert glance is None or FirstMessage(raw, b"identity", last=True).strings(1) == {1: glance}
