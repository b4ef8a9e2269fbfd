"""HTTP heads and chunked bodies, as bytes."""

import random

import pytest

from gateway.ingress.http_body import CHUNKED, UNTIL_CLOSE, ChunkScanner, MalformedError, RequestBody
from gateway.ingress.http_routes import Endpoint, route
from gateway.ingress.http_wire import (
    AnswerHead,
    Request,
    RequestParser,
    read_request,
    render_answer,
)

HEAD = b"POST /v2/models/a/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nX-A:  b \r\n\r\n"


def read(raw: bytes) -> Request:
    found = read_request(raw, 65536)
    assert found is not None
    return found[0]


def test_a_head_is_read_whole_or_in_pieces_alike() -> None:
    found = read_request(HEAD + b"abc", 65536)
    assert found is not None
    whole, rest = found
    assert (whole.method, whole.target, whole.body_bytes, rest) == (b"POST", b"/v2/models/a/infer", 3, b"abc")
    for size in range(1, len(HEAD) + 3):
        parser = RequestParser(65536)
        pieces = [(HEAD + b"abc")[at : at + size] for at in range(0, len(HEAD) + 3, size)]
        for piece in pieces:
            got = parser.feed(piece)
            if got is not None:
                break
        assert got is not None
        assert got[0].upstream_head == whole.upstream_head
        assert b"abc".startswith(got[1])


def test_the_head_that_is_sent_on_has_its_framing_written_anew() -> None:
    raw = (
        b"POST /p?q HTTP/1.0\r\nHost: x\r\nConnection: keep-alive, x-secret , host\r\nX-Secret: 1\r\n"
        b"content-length: 03\r\nTIDEGATE-JOB: 9\r\nTidegate-Timeout-MS: 15\r\nexpect: 100-Continue\r\nX-Empty:\r\n\r\n"
    )
    request = read(raw)
    assert request.upstream_head == b"POST /p?q HTTP/1.1\r\nHost: x\r\nX-Empty: \r\nContent-Length: 3\r\n\r\n"
    assert (request.job, request.timeout_ms, request.expectation) == (True, b"15", b"")  # HTTP/1.0 has no 100
    assert (request.http_1_0, request.keep_alive) == (True, True)


@pytest.mark.parametrize(
    ("lines", "keep_alive"),
    [
        (b"HTTP/1.1\r\n", True),
        (b"HTTP/1.1\r\nConnection: close\r\n", False),
        (b"HTTP/1.1\r\nConnection: Keep-Alive, Close\r\n", False),
        (b"HTTP/1.0\r\n", False),
        (b"HTTP/1.0\r\nConnection: Keep-Alive\r\n", True),
    ],
)
def test_keep_alive(lines: bytes, keep_alive: bool) -> None:
    assert read(b"GET / " + lines + b"\r\n").keep_alive is keep_alive


def test_empty_lines_before_a_request_are_forgiven_and_an_offer_to_upgrade_is_ignored() -> None:
    assert read_request(b"\r\n\r\n" + HEAD, 65536) is None
    parser = RequestParser(65536)
    assert parser.feed(b"\r\n") is None
    assert parser.feed(b"\r\n" + HEAD) is not None
    upgraded = read(b"GET /v2 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert upgraded.upstream_head == b"GET /v2 HTTP/1.1\r\n\r\n"


def test_a_head_over_the_limit_is_refused_before_it_is_complete() -> None:
    parser = RequestParser(100)
    assert parser.feed(b"GET / HTTP/1.1\r\nA: " + b"a" * 60) is None
    with pytest.raises(MalformedError, match="longer than 100 bytes"):
        parser.feed(b"a" * 60)
    assert read_request(HEAD, 20) is None
    with pytest.raises(MalformedError, match="longer than 20 bytes"):
        RequestParser(20).feed(HEAD)


def answer(lines: str) -> AnswerHead:
    return AnswerHead(lines.replace("\n", "\r\n").encode() + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("lines", "body_bytes", "keep_alive"),
    [
        ("HTTP/1.1 200 OK\ncontent-LENGTH: 7", 7, True),
        ("HTTP/1.1 200 OK\nContent-Length: 7\nConnection: close", 7, False),
        ("HTTP/1.1 200 OK\nTransfer-Encoding: Chunked", CHUNKED, True),
        ("HTTP/1.1 200 OK", UNTIL_CLOSE, False),
        ("HTTP/1.0 200 OK\nContent-Length: 7", 7, False),
        ("HTTP/1.1 204 No Content", 0, True),
        ("HTTP/1.1 100 Continue", 0, True),
        ("HTTP/1.1 500", 0, False),
    ],
)
def test_where_an_answer_ends(lines: str, body_bytes: int, keep_alive: bool) -> None:
    if lines.endswith("500"):
        lines, body_bytes = "HTTP/1.1 500 ", UNTIL_CLOSE
    head = answer(lines)
    assert (head.body_bytes, head.keep_alive) == (body_bytes, keep_alive)


@pytest.mark.parametrize(
    "lines",
    [
        "220 ready",
        "HTTP/2 200 OK",
        "HTTP/1.1 abc OK",
        "HTTP/1.1 200 OK\nno colon",
        "HTTP/1.1 200 OK\nContent-Length: 1\r",
        "HTTP/1.1 200 OK\nA: a\rContent-Length: 1",
        "HTTP/1.1 200 OK\nA: \0",
        "HTTP/1.1 200 OK\nContent-Length: -1",
        "HTTP/1.1 200 OK\nContent-Length: 1_0",
        "HTTP/1.1 200 OK\nContent-Length: 1\nContent-Length: 2",
        "HTTP/1.1 200 OK\nContent-Length: 1\nTransfer-Encoding: chunked",
        "HTTP/1.1 200 OK\nTransfer-Encoding: gzip, chunked",
    ],
)
def test_answers_that_cannot_be_trusted(lines: str) -> None:
    with pytest.raises(MalformedError):
        answer(lines)


def test_an_answer_is_changed_only_where_the_connection_is_named() -> None:
    head = answer("HTTP/1.1 200 Fine\nA: b\nconnection: keep-alive\nTransfer-Encoding: chunked\nC: d")
    assert head.for_caller(http_1_0=False, keep_alive=False) == (
        b"HTTP/1.1 200 Fine\r\nA: b\r\nTransfer-Encoding: chunked\r\nC: d\r\nConnection: close\r\n\r\n"
    )
    assert head.for_caller(http_1_0=True, keep_alive=False) == b"HTTP/1.0 200 Fine\r\nA: b\r\nC: d\r\n\r\n"
    assert head.for_caller(http_1_0=True, keep_alive=True).endswith(b"C: d\r\nConnection: keep-alive\r\n\r\n")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_a_chunked_body_goes_on_without_extensions_and_trailers(size: int) -> None:
    raw = b"5;x=y\r\nhello\r\n00a ; z\r\n0123456789\r\n000;q\r\nTrailer: 1\r\n\r\nGET"
    body, sent, rest = RequestBody(CHUNKED, 1000), b"", b""
    for at in range(0, len(raw), size):
        piece = raw[at : at + size]
        part, more = (b"", piece) if body.complete else body.split(piece)
        sent, rest = sent + part, rest + more
    pieces: list[bytes] = []
    assert ChunkScanner().feed(sent, pieces) == len(sent)
    assert (b"".join(pieces), rest) == (b"hello0123456789", b"GET")
    assert b";" not in sent and b"Trailer" not in sent


def test_the_end_of_a_chunked_body_is_found_wherever_it_is_cut() -> None:
    body = b"5;x=y\r\nhello\r\n0A\r\n0123456789\r\n000\r\nTrailer: 1\r\n\r\n"
    rng = random.Random(5)
    for _ in range(500):
        data = body + b"GET / NEXT"
        scanner, pieces, passed = ChunkScanner(), [], 0
        while True:
            size = rng.randrange(1, 12)
            end = scanner.feed(data[:size], pieces)
            if end >= 0:
                passed += end
                break
            passed += len(data[:size])
            data = data[size:]
        assert passed == len(body)
        assert b"".join(pieces) == b"hello0123456789"
        assert scanner.body_bytes == 15


@pytest.mark.parametrize(
    "body",
    [
        b"5\nhello\r\n",
        b"5\r\nhelloX\n0\r\n\r\n",
        b"5\r\nhello\n\n",
        b"\r\n",
        b"0x5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"5_0\r\nhello\r\n",
        b"g\r\n",
        b"1" * 16 + b"\r\n",
        b"1;" + b"a" * 5000,
        b"1;a\rb\r\nx\r\n",
        b"0\r\n" + b"T: x\r\n" * 4000,
        b"0\r\n\n",
    ],
)
def test_chunked_bodies_that_two_readers_could_read_differently_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedError):
        ChunkScanner().feed(body)


def test_an_answer_of_our_own() -> None:
    headers = [(b"A", b"b")]
    raw = render_answer(503, headers, b"{}", None, keep_alive=False)
    assert raw == b"HTTP/1.1 503 Service Unavailable\r\nA: b\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    asked = read(b"HEAD / HTTP/1.0\r\n\r\n")
    assert (
        render_answer(405, [], b"{}", asked, keep_alive=False)
        == b"HTTP/1.0 405 Not Allowed\r\nContent-Length: 2\r\n\r\n"
    )
    text = [(b"Content-Type", b"text/plain")]
    assert render_answer(200, text, b"", asked, keep_alive=True).endswith(
        b"Content-Length: 0\r\nContent-Type: text/plain\r\nConnection: keep-alive\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("target", "endpoint", "model"),
    [
        (b"/v2/health/live", Endpoint.LIVE, None),
        (b"/v2/health/ready?now", Endpoint.READY, None),
        (b"/v2", Endpoint.SERVER_METADATA, None),
        (b"http://host:80/v2", Endpoint.SERVER_METADATA, None),
        (b"/v2/models/stats", Endpoint.ALL_STATS, None),
        (b"/v2/models/a", Endpoint.MODEL_METADATA, "a"),
        (b"/v2/models/a%2Fb", Endpoint.MODEL_METADATA, "a%2Fb"),
        (b"/v2/models/a/versions/01", Endpoint.MODEL_METADATA, "a"),
        (b"/v2/models/a/ready", Endpoint.MODEL_READY, "a"),
        (b"/v2/models/a/versions/9/config", Endpoint.MODEL_CONFIG, "a"),
        (b"/v2/models/a/infer", Endpoint.INFER, "a"),
        (b"/v2/models/a/versions/1/generate_stream", Endpoint.GENERATE, "a"),
        (b"/v2/models/a/trace/setting", Endpoint.SETTINGS, "a"),
        (b"/v2/logging", Endpoint.SETTINGS, None),
        (b"/v2/repository/index", Endpoint.INDEX, None),
        (b"/v2/repository/r/index", Endpoint.INDEX, None),
        (b"/v2/repository/models/a/load", Endpoint.REPOSITORY_CONTROL, "a"),
        (b"/v2/repository/r/models/a/unload", Endpoint.REPOSITORY_CONTROL, "a"),
        (b"/v2/cudasharedmemory/region/r/register", Endpoint.SHARED_MEMORY, None),
        (b"/v2/systemsharedmemory/status", Endpoint.SHARED_MEMORY, None),
    ],
)
def test_endpoints(target: bytes, endpoint: Endpoint, model: str | None) -> None:
    found = route(target)
    assert found is not None
    assert (found.endpoint, found.model) == (endpoint, model)


@pytest.mark.parametrize(
    "target",
    [
        b"/",
        b"*",
        b"/v2/",
        b"//v2",
        b"/v2/models",
        b"/v2/models/",
        b"/v2/models//infer",
        b"/v2/models/a/",
        b"/v2/models/a/infer/",
        b"/v2/models/a/nothing",
        b"/v2/models/a/versions/x",
        b"/v2/models/a/versions/-1/infer",
        b"/v2/models/a/versions/",
        b"/v2/models/a/versions/1/",
        b"/v2/models/a/versions/1/trace/setting",
        b"/v2/repository",
        b"/v2/repository//index",
        b"/v2/repository/models/a/reload",
        b"/v2/systemsharedmemory/region//status",
        b"/v2/systemsharedmemory/",
        b"/metrics",
    ],
)
def test_what_triton_does_not_know_is_no_endpoint(target: bytes) -> None:
    assert route(target) is None
