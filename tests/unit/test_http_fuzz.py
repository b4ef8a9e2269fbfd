"""Hostile bytes against the HTTP door, without a socket.

The rule: a request is either answered with one 400 and its connection closed, or goes on as exactly one request with
exactly its body; nothing behind a refused request ever reaches a replica. However the bytes are cut, the same happens.
"""

import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.doors import running_door
from tests.memory_wires import Wire, WireLoop, run_on_wires, turns
from wire.membership import ReplicaLease, ReplicaState

INFER = b"/v2/models/ident/infer"
LEASE = ReplicaLease(
    id="r1", pool="vision", state=ReplicaState.READY, http_address="memory:1", models=("ident", "slow")
)
SMUGGLED = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nGRAIL"


# -- reading what the door wrote: as strictly as can be -----------------------------------------------------


@dataclass
class Message:
    first: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def status(self) -> int:
        return int(self.first.split(b" ")[1])

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+): ?([^\x00-\x08\x0a-\x1f\x7f]*)").fullmatch


def messages_in(raw: bytes) -> tuple[list[Message], bytes]:
    """Complete HTTP messages, and what is left. Anything that two readers could read differently fails."""
    found = []
    while (end := raw.find(b"\r\n\r\n")) >= 0:
        lines = raw[:end].split(b"\r\n")
        fields = [_FIELD(line) for line in lines[1:]]
        assert all(fields), lines
        message = Message(lines[0], [(match[1], match[2]) for match in fields if match], b"")
        lengths, codings = message.values(b"content-length"), message.values(b"transfer-encoding")
        assert len(lengths) + len(codings) <= 1, lines
        rest = raw[end + 4 :]
        if codings:
            assert codings == [b"chunked"]
            whole, message.body, rest = _dechunked(rest)
            if not whole:
                return found, raw
        else:
            size = int(lengths[0]) if lengths else 0
            if len(rest) < size:
                return found, raw
            message.body, rest = rest[:size], rest[size:]
        found.append(message)
        raw = rest
    return found, raw


_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


def _dechunked(raw: bytes) -> tuple[bool, bytes, bytes]:
    body = b""
    while match := _CHUNK.match(raw):
        size = int(match[1], 16)
        raw = raw[match.end() :]
        if not size:
            while (end := raw.find(b"\r\n")) > 0:
                raw = raw[end + 2 :]
            return end == 0, body, raw[2:]
        if len(raw) < size + 2:
            return False, b"", b""
        assert raw[size : size + 2] == b"\r\n"
        body, raw = body + raw[:size], raw[size + 2 :]
    return False, b"", b""


# -- a door between memory and memory -----------------------------------------------------------------------


@dataclass
class Scene:
    """One caller's connection and a replica that echoes every complete request."""

    caller: Wire
    dialled: list[Wire]
    failures: list[Any]
    answered: dict[int, int] = field(default_factory=dict)

    def watch(self, wire: Wire) -> None:
        wire.on_write = lambda: self._echo(wire)

    def _echo(self, wire: Wire) -> None:
        complete, _ = messages_in(bytes(wire.sent))
        before = self.answered.get(id(wire), 0)
        self.answered[id(wire)] = len(complete)
        assert len(complete) <= before + 1, "pipelined to a replica"
        for message in complete[before:]:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            wire.protocol._owner._loop.call_soon(wire.deliver, head % len(message.body) + message.body)

    @property
    def upstream(self) -> list[Message]:
        """Every complete request that a replica got."""
        return [message for wire in self.dialled for message in messages_in(bytes(wire.sent))[0]]

    @property
    def answers(self) -> list[Message]:
        complete, rest = messages_in(bytes(self.caller.sent))
        assert not rest
        return complete

    async def settle(self) -> None:
        """Until nothing moves."""
        before = None
        while before != (now := self._state()):
            before = now
            await turns(12)

    def _state(self) -> tuple[int, ...]:
        return (len(self.caller.sent), self.caller.delivered, *(len(wire.sent) for wire in self.dialled))


@asynccontextmanager
async def scene(loop: WireLoop, **given: Any) -> Any:
    failures: list[Any] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    async with running_door(LEASE, settings=given):
        caller = loop.dial()
        found = Scene(caller, loop.dialled, failures)
        loop.on_dialled = found.watch
        try:
            yield found
        finally:
            caller.abort()
            await turns()
    assert not failures


def outcome(raw: bytes, sizes: tuple[int, ...] = (), **given: Any) -> tuple[list[Message], list[Message], bool]:
    """Answers, requests that reached the replica, and whether the caller's connection has been ended."""
    out: list[Any] = []

    async def story(loop: WireLoop) -> None:
        async with scene(loop, **given) as it:
            it.caller.deliver(raw, sizes)
            await it.settle()
            out[:] = [it.answers, it.upstream, it.caller.ended or it.caller.over]

    run_on_wires(story)
    return out[0], out[1], out[2]


# -- requests as they should be -----------------------------------------------------------------------------

NAMES = st.text("ABCDEFabcdef0123456789-_.!#$%&'*+^`|~", min_size=1, max_size=20).map(lambda s: b"X-" + s.encode())
VALUES = st.one_of(
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=30).map(str.encode),
    st.just(b"a \t b"),
    st.just("ü€".encode()),
    st.just(b"\xff\xfe"),
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@dataclass
class Good:
    raw: bytes
    body: bytes


@st.composite
def good_requests(draw: Callable[..., Any]) -> Good:
    lines = [
        draw(NAMES) + draw(st.sampled_from((b": ", b":", b":  "))) + draw(VALUES)
        for _ in range(draw(st.integers(0, 3)))
    ]
    body: bytes = draw(st.binary(max_size=60))
    if draw(st.booleans()):
        lines.append(
            draw(st.sampled_from((b"Content-Length: %d", b"content-length:%d", b"CONTENT-LENGTH: 00%d "))) % len(body)
        )
        tail = body
    else:
        lines.append(draw(st.sampled_from((b"Transfer-Encoding: chunked", b"transfer-encoding:CHUNKED"))))
        tail, at = b"", 0
        while at < len(body):
            size = draw(st.integers(1, 20))
            piece = body[at : at + size]
            at += size
            extension = draw(st.sampled_from((b"", b";a", b'; a="b"', b" ;x=\x80")))
            tail += b"%x" % len(piece) + extension + b"\r\n" + piece + b"\r\n"
        tail += draw(st.sampled_from((b"0\r\n\r\n", b"000;last\r\nX-Trailer: 1\r\n\r\n")))
    order = draw(st.permutations(lines))
    before = draw(st.sampled_from((b"", b"\r\n", b"\r\n\r\n")))
    return Good(
        before + b"POST " + INFER + b" HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in order) + b"\r\n" + tail, body
    )


@given(st.lists(good_requests(), min_size=1, max_size=4), SIZES)
def test_good_requests_arrive_one_by_one_however_they_are_cut(requests: list[Good], sizes: tuple[int, ...]) -> None:
    answers, upstream, ended = outcome(b"".join(each.raw for each in requests), sizes)
    assert [message.body for message in upstream] == [each.body for each in requests]
    assert [(answer.status, answer.body) for answer in answers] == [(200, each.body) for each in requests]
    assert not ended


# -- requests as they must not be ---------------------------------------------------------------------------


def with_lines(*lines: bytes, tail: bytes = b"", first: bytes = b"POST " + INFER + b" HTTP/1.1") -> bytes:
    return first + b"\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + tail


CHUNKED = b"Transfer-Encoding: chunked"
BAD: dict[str, bytes] = {
    "two lengths": with_lines(b"Content-Length: 3", b"Content-Length: 4", tail=b"abcd"),
    "two lengths, listed": with_lines(b"Content-Length: 3, 4", tail=b"abcd"),
    "length zero and another": with_lines(b"Content-Length: 0", b"Content-Length: 4", tail=b"abcd"),
    "negative": with_lines(b"Content-Length: -3", tail=b"abc"),
    "plus": with_lines(b"Content-Length: +3", tail=b"abc"),
    "hexadecimal": with_lines(b"Content-Length: 0x3", tail=b"abc"),
    "underscore": with_lines(b"Content-Length: 1_0", tail=b"0123456789"),
    "spaced digits": with_lines(b"Content-Length: 1 0", tail=b"0123456789"),
    "no digits": with_lines(b"Content-Length:", tail=b""),
    "a blank": with_lines(b"Content-Length:  ", tail=b""),
    "fraction": with_lines(b"Content-Length: 3.0", tail=b"abc"),
    "a tab inside": with_lines(b"Content-Length: 1\t0", tail=b"0123456789"),
    "beyond 64 bits": with_lines(b"Content-Length: 18446744073709551619", tail=b"abc"),
    "other digits": with_lines("Content-Length: ３".encode(), tail=b"abc"),
    "length and chunked": with_lines(b"Content-Length: 3", CHUNKED, tail=b"0\r\n\r\n"),
    "chunked and length": with_lines(CHUNKED, b"Content-Length: 3", tail=b"0\r\n\r\n"),
    "length zero and chunked": with_lines(b"Content-Length: 0", CHUNKED, tail=b"0\r\n\r\n"),
    "chunked and length zero": with_lines(CHUNKED, b"Content-Length: 0", tail=b"0\r\n\r\n"),
    "chunked twice": with_lines(CHUNKED, CHUNKED, tail=b"0\r\n\r\n"),
    "chunked, chunked": with_lines(b"Transfer-Encoding: chunked, chunked", tail=b"0\r\n\r\n"),
    "gzip, chunked": with_lines(b"Transfer-Encoding: gzip, chunked", tail=b"0\r\n\r\n"),
    "chunked, gzip": with_lines(b"Transfer-Encoding: chunked, gzip", tail=b"0\r\n\r\n"),
    "identity": with_lines(b"Transfer-Encoding: identity", b"Content-Length: 3", tail=b"abc"),
    "chunked and identity": with_lines(CHUNKED, b"Transfer-Encoding: identity", tail=b"0\r\n\r\n"),
    "xchunked": with_lines(b"Transfer-Encoding: xchunked", tail=b"0\r\n\r\n"),
    "chunked;q": with_lines(b"Transfer-Encoding: chunked;q=1", tail=b"0\r\n\r\n"),
    "quoted chunked": with_lines(b'Transfer-Encoding: "chunked"', tail=b"0\r\n\r\n"),
    "vertical tab": with_lines(b"Transfer-Encoding: \x0bchunked", tail=b"0\r\n\r\n"),
    "empty coding": with_lines(b"Transfer-Encoding:", tail=b"0\r\n\r\n"),
    "chunked in HTTP/1.0": with_lines(CHUNKED, tail=b"0\r\n\r\n", first=b"POST " + INFER + b" HTTP/1.0"),
    "a space before the colon": with_lines(b"Content-Length : 3", tail=b"abc"),
    "a tab before the colon": with_lines(b"Transfer-Encoding\t: chunked", tail=b"0\r\n\r\n"),
    "a space before the name": with_lines(b" Content-Length: 3", tail=b"abc"),
    "folded": with_lines(b"X: a", b" Content-Length: 3", tail=b"abc"),
    "folded by a tab": with_lines(b"X: a", b"\tb"),
    "folded length": with_lines(b"Content-Length:", b" 3", tail=b"abc"),
    "no colon": with_lines(b"Content-Length 3", tail=b"abc"),
    "no name": with_lines(b": 3"),
    "NUL in a value": with_lines(b"X: a\0b"),
    "NUL in a name": with_lines(b"X\0: a"),
    "lone CR in a value": with_lines(b"X: a\rContent-Length: 3", tail=b"abc"),
    "lone LF in a value": with_lines(b"X: a\nContent-Length: 3", tail=b"abc"),
    "lone LF behind the first line": b"POST " + INFER + b" HTTP/1.1\nContent-Length: 3\r\n\r\nabc",
    "lone LFs": b"POST " + INFER + b" HTTP/1.1\nContent-Length: 3\n\nabc",
    "LF CRLF at the end": b"POST " + INFER + b" HTTP/1.1\r\nContent-Length: 0\n\r\n",
    "CRLF LF at the end": b"POST " + INFER + b" HTTP/1.1\r\nContent-Length: 0\r\n\n" + SMUGGLED,
    "CR CR LF": b"POST " + INFER + b" HTTP/1.1\r\r\nContent-Length: 0\r\n\r\n",
    "control character": with_lines(b"X: \x01"),
    "delete": with_lines(b"X: \x7f"),
    "a name with a space": with_lines(b"X Y: a"),
    "a name with a bracket": with_lines(b"X(: a"),
    "a name that is not ASCII": with_lines("Ü: a".encode()),
    "no target": b"POST  HTTP/1.1\r\n\r\n",
    "a space in the target": b"POST /a b HTTP/1.1\r\n\r\n",
    "a tab in the target": b"POST /a\tb HTTP/1.1\r\n\r\n",
    "NUL in the target": b"POST /a\0b HTTP/1.1\r\n\r\n",
    "CR in the target": b"POST /a\rb HTTP/1.1\r\n\r\n",
    "no version": b"POST " + INFER + b"\r\n\r\n",
    "HTTP/0.9": b"POST " + INFER + b" HTTP/0.9\r\n\r\n",
    "HTTP/1.2": b"POST " + INFER + b" HTTP/1.2\r\n\r\n",
    "HTTP/1.10": b"POST " + INFER + b" HTTP/1.10\r\n\r\n",
    "HTTP/01.1": b"POST " + INFER + b" HTTP/01.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http": b"POST " + INFER + b" http/1.1\r\n\r\n",
    "ICE": b"POST " + INFER + b" ICE/1.1\r\n\r\n",
    "RTSP": b"DESCRIBE " + INFER + b" RTSP/1.1\r\n\r\n",
    "POST over RTSP": b"POST " + INFER + b" RTSP/1.1\r\nContent-Length: 0\r\n\r\n",
    "SOURCE over ICE": b"SOURCE " + INFER + b" ICE/1.0\r\n\r\n",
    "more behind the version": b"POST " + INFER + b" HTTP/1.1 x\r\n\r\n",
    "lower case method": b"post " + INFER + b" HTTP/1.1\r\n\r\n",
    "unknown method": b"FETCH " + INFER + b" HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60) + b"\r\n\r\n",
    "chunk: negative": with_lines(CHUNKED, tail=b"-1\r\na\r\n0\r\n\r\n"),
    "chunk: plus": with_lines(CHUNKED, tail=b"+1\r\na\r\n0\r\n\r\n"),
    "chunk: 0x": with_lines(CHUNKED, tail=b"0x1\r\na\r\n0\r\n\r\n"),
    "chunk: underscore": with_lines(CHUNKED, tail=b"0_1\r\na\r\n0\r\n\r\n"),
    "chunk: a space first": with_lines(CHUNKED, tail=b" 1\r\na\r\n0\r\n\r\n"),
    "chunk: empty": with_lines(CHUNKED, tail=b"\r\n0\r\n\r\n"),
    "chunk: 64 bits": with_lines(CHUNKED, tail=b"10000000000000001\r\na\r\n0\r\n\r\n"),
    "chunk: lone LF": with_lines(CHUNKED, tail=b"1\na\r\n0\r\n\r\n"),
    "chunk: lone LF behind the data": with_lines(CHUNKED, tail=b"1\r\na\n0\r\n\r\n"),
    "chunk: lone CR in the extension": with_lines(CHUNKED, tail=b"1;a\rb\r\na\r\n0\r\n\r\n"),
    "chunk: lone LF in the extension": with_lines(CHUNKED, tail=b"1;a\nb\r\na\r\n0\r\n\r\n"),
    "chunk: more data than said": with_lines(CHUNKED, tail=b"1\r\nab\r\n0\r\n\r\n"),
    "chunk: less data than said": with_lines(CHUNKED, tail=b"3\r\na\r\n0\r\n\r\n"),
    "chunk: ends with LF": with_lines(CHUNKED, tail=b"1\r\na\r\n0\r\n\n"),
    "chunk: a trailer with a lone LF": with_lines(CHUNKED, tail=b"0\r\nA: b\n\r\n"),
    "chunk: a line without end": with_lines(CHUNKED, tail=b"1;" + b"a" * 5000),
    "chunk: endless trailers": with_lines(CHUNKED, tail=b"0\r\n" + b"A: b\r\n" * 4000),
    "a head over the limit": with_lines(*(b"X-%d: " % number + b"a" * 1000 for number in range(70))),
    "a line over the limit": with_lines(b"X: " + b"a" * 70_000),
    "a target over the limit": b"GET /" + b"a" * 70_000,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_one_400_and_what_is_behind_it_reaches_nobody(name: str) -> None:
    before = with_lines(b"Content-Length: 2", tail=b"ok")
    raw = before + BAD[name] + SMUGGLED * 2
    long = len(raw) > 3000
    for sizes in ((), (7,), (1,)) if not long else ((), (1000,), (977, 1)):
        answers, upstream, ended = outcome(raw, sizes)
        assert [answer.status for answer in answers] == [200, 400], sizes
        assert b'{"error":"' in answers[1].body and answers[1].values(b"connection") == [b"close"]
        assert [message.body for message in upstream] == [b"ok"]
        assert ended


@pytest.mark.parametrize(
    "name", ["two lengths", "chunk: more data than said", "lone LF in a value", "a head over the limit"]
)
def test_a_bad_request_is_refused_wherever_it_is_cut(name: str) -> None:
    raw = (BAD[name] + SMUGGLED)[:3000]
    for cut in range(1, len(raw), 1 if len(raw) < 300 else 131):
        answers, upstream, ended = outcome(raw, (cut, len(raw)), header_limit_bytes=2048)
        assert [answer.status for answer in answers] == [400]
        assert not upstream and ended


# -- bytes that nobody thought of ---------------------------------------------------------------------------

SEEDS = [
    with_lines(b"Host: x", b"Content-Length: 3", tail=b"abc"),
    with_lines(b"Host: x", CHUNKED, tail=b"3\r\nabc\r\n0\r\nT: a\r\n\r\n"),
    with_lines(b"Host: x", b"Connection: keep-alive, x-y", b"Expect: 100-continue", b"Content-Length: 3", tail=b"abc"),
    with_lines(b"Host: x", first=b"GET /v2/models/ident HTTP/1.0"),
]
PIECES = st.sampled_from(
    [
        b"\r",
        b"\n",
        b"\r\n",
        b"\0",
        b" ",
        b"\t",
        b":",
        b",",
        b";",
        b"0",
        b"1",
        b"-",
        b"+",
        b"\x80",
        b"Content-Length: 1\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"GET /v2 HTTP/1.1\r\n\r\n",
        b"HTTP/1.1",
        b"chunked",
    ]
)
EDITS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(("in", "out", "over")), PIECES), max_size=4
)


def edited(raw: bytes, edits: list[tuple[float, str, bytes]]) -> bytes:
    for place, how, piece in edits:
        at = int(place * (len(raw) + 1))
        raw = raw[:at] + (b"" if how == "out" else piece) + raw[at + (0 if how == "in" else max(1, len(piece))) :]
    return raw


@settings(max_examples=4 * settings.default.max_examples)
@given(st.lists(st.tuples(st.sampled_from(SEEDS), EDITS), min_size=1, max_size=2), SIZES)
@example([(SEEDS[0], [(0.0, "in", b"\r\n")])], (1,))
def test_any_edit_means_the_same_however_it_is_cut(parts: list[tuple[bytes, Any]], sizes: tuple[int, ...]) -> None:
    raw = b"".join(edited(seed, edits) for seed, edits in parts) + SMUGGLED
    whole, cut = outcome(raw), outcome(raw, sizes)
    for (answers, upstream, ended), statuses in ((whole, None), (cut, [answer.status for answer in whole[0]])):
        got = [answer.status for answer in answers]
        assert statuses in (None, got)
        assert set(got) <= {100, 200, 400, 404, 405, 413, 501}
        # Every complete request upstream was answered, and nothing was answered behind a refusal that ends it all.
        assert got.count(200) == len(upstream) + _own(answers)
        assert 400 not in got[:-1] or not ended or got[-1] != 200
    assert [(m.first, m.headers, m.body) for m in cut[1]] == [(m.first, m.headers, m.body) for m in whole[1]]
    assert cut[2] == whole[2]


def _own(answers: list[Message]) -> int:
    """Answers of 200 that the door gave itself."""
    return sum(answer.status == 200 and not answer.values(b"content-type") for answer in answers)


@given(st.binary(max_size=200), SIZES)
def test_noise_is_refused(raw: bytes, sizes: tuple[int, ...]) -> None:
    answers, upstream, _ = outcome(raw + b"\r\n\r\n" + SMUGGLED, sizes)
    assert not upstream or not raw.strip(b"\r\n")
    assert len(answers) <= 1


# -- what a replica may send --------------------------------------------------------------------------------

ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x\r\nde\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
]


def answered(raw: bytes, sizes: tuple[int, ...]) -> tuple[bytes, bool]:
    """What the caller got for one request that a replica answers with ``raw`` and the end of its connection, and
    whether the caller's connection was broken."""
    out: list[Any] = []

    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            loop.on_dialled = lambda wire: None
            it.caller.deliver(with_lines(b"Content-Length: 2", tail=b"{}"))
            await it.settle()
            it.dialled[0].deliver(raw, sizes)
            it.dialled[0].end()
            await it.settle()
            out[:] = [bytes(it.caller.sent), it.caller.aborted]

    run_on_wires(story)
    return out[0], out[1]


@settings(max_examples=2 * settings.default.max_examples)
@given(
    st.sampled_from(ANSWERS), EDITS, SIZES, st.sampled_from((b"", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL"))
)
def test_whatever_a_replica_answers_a_caller_gets_one_answer_or_a_broken_one(
    seed: bytes, edits: list[Any], sizes: tuple[int, ...], behind: bytes
) -> None:
    raw = edited(seed, edits) + behind
    outcomes = []
    for sent, broken in (answered(raw, ()), answered(raw, sizes)):
        head = sent[: sent.find(b"\r\n\r\n")].lower()
        own = b"tidegate-error" in head
        if own:
            assert messages_in(sent)[0][0].status == 502
        elif not broken and re.search(rb"\r\n(content-length|transfer-encoding):", head):
            assert _lenient(sent) == (True, b"")
        # Nobody takes a broken one for an answer; whether it could still be told depends on what had been sent.
        outcomes.append(None if own or broken else sent)
    assert outcomes[0] == outcomes[1]


def _lenient(sent: bytes) -> tuple[bool, bytes]:
    """Whether ``sent`` begins with a whole answer, and what is behind it. Reads any head: it is the replica's own."""
    head, _, rest = sent.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length:[ \t]*(\d+)", head.lower())
    if length is not None:
        return len(rest) >= int(length[1]), rest[int(length[1]) :]
    whole, _, rest = _dechunked(rest)
    return whole, rest


# -- bounds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
def test_a_replica_that_does_not_read_holds_its_caller_back(chunked: bool) -> None:
    """What was taken from the caller and not passed on stays small, however much he sends."""
    piece = b"x" * 60_000

    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            loop.on_dialled = lambda wire: setattr(wire, "takes", False)
            framing = CHUNKED if chunked else b"Content-Length: 60000000"
            it.caller.deliver(with_lines(framing))
            for _ in range(1000):
                it.caller.deliver(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                await turns(2)
            assert it.caller.delivered < 400_000
            assert not it.caller.reading

    run_on_wires(story)


@pytest.mark.parametrize("ready", [True, False])
def test_what_is_sent_ahead_of_its_turn_is_bounded(ready: bool) -> None:
    """Requests that are sent while the first one is under way, without a replica or with one that does not answer."""

    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            loop.on_dialled = lambda wire: None
            if not ready:
                it.caller.protocol._service._pools.pools["vision"].update([])
            for _ in range(2000):
                it.caller.deliver(with_lines(b"Content-Length: 1000", tail=b"y" * 1000))
            await it.settle()
            assert it.caller.delivered < 400_000

    run_on_wires(story)


def test_a_caller_who_does_not_read_holds_the_replica_back() -> None:
    async def story(loop: WireLoop) -> None:
        async with scene(loop) as it:
            loop.on_dialled = lambda wire: None
            it.caller.deliver(with_lines(b"Content-Length: 0"))
            await it.settle()
            it.caller.takes = False
            replica = it.dialled[0]
            replica.deliver(b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n")
            for _ in range(1000):
                replica.deliver(b"x" * 60_000)
                await turns(2)
            assert replica.delivered < 400_000

    run_on_wires(story)
