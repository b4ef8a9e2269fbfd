"""Members of a JSON part that may be cut off, chunked or compressed."""

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ingress.http_wire import read_request
from gateway.ingress.json_part import PART_LIMIT, JsonPart, may_name, members, sequence_of, timeout_of
from gateway.routing.sequences import SequencePart

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(
    st.dictionaries(st.sampled_from(["id", "inputs", "parameters", "x", 'q"uote', "a:b", "[{"]), VALUES), st.booleans()
)
def test_agrees_with_json(document: dict[str, Any], spaced: bool) -> None:
    text = json.dumps(document, indent=1 if spaced else None, ensure_ascii=False).encode("utf-8", "surrogatepass")
    names = ("id", "inputs", "parameters")
    try:
        expected = json.loads(text)
    except ValueError:
        expected = {}  # text that is no UTF-8
    found = members(text, *names)
    assert {name: found[name] for name in names if name in expected} == {
        name: expected[name] for name in names if name in expected
    }
    assert not found.keys() - document.keys()


@given(st.binary(max_size=200))
def test_whatever_bytes_come_it_answers(text: bytes) -> None:
    assert members(b'{"parameters":' + text, "parameters", "id").keys() <= {"parameters", "id"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"id":"7","parameters":{"a":1', {"id": "7"}),  # cut off
        (b'{"parameters":{"a":1},"parameters":{"a":2}}', {"parameters": {"a": 1}}),  # the first counts, as in Triton
        (b'{"parameters":{"a":1,"a":2}}', {"parameters": {"a": 1}}),
        (b'{"inputs":[{"parameters":{"a":1}}]}', {}),  # of an input
        (b'{"parameters":' + b"[" * 100000 + b"]" * 100000 + b"}", {"parameters": None}),
        (b'{"id":NaN,"parameters":oops}', {"parameters": None}),
        (b'{"id":"\xff"}', {"id": None}),
        (b"", {}),
        (b"[1]", {}),
    ],
)
def test_members(text: bytes, found: dict[str, Any]) -> None:
    got = members(text, "id", "parameters")
    assert {key: value for key, value in got.items() if value == value} == found


def head(*headers: str) -> bytes:
    return "".join(f"{line}\r\n" for line in ("POST /v2/models/seq/infer HTTP/1.1", "Host: t", *headers, "")).encode()


def read(raw_head: bytes, body: bytes, piece: int) -> JsonPart:
    found = read_request(raw_head, 65536)
    assert found is not None
    part = JsonPart(found[0])
    for at in range(0, len(body), piece):
        part.feed(body[at : at + piece])
    return part


TEXT = b'{"inputs":[],"parameters":{"sequence_id":5}}'
TENSOR = b"\x00\x01{}" * 100


@pytest.mark.parametrize("piece", [1, 7, 10**6])
@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate"])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_json_part_is_found(piece: int, encoding: str, chunked: bool) -> None:
    """However the body is framed and compressed, and wherever it is cut."""
    whole = TEXT + TENSOR
    body = {"identity": whole, "gzip": gzip.compress(whole), "deflate": zlib.compress(whole)}[encoding]
    framing = f"Content-Length: {len(body)}"
    if chunked:
        framing = "Transfer-Encoding: chunked"
        body = b"".join(b"%x\r\n%b\r\n" % (len(body[at : at + 9]), body[at : at + 9]) for at in range(0, len(body), 9))
        body += b"0\r\n\r\n"
    part = read(
        head(framing, f"Content-Encoding: {encoding}", f"inference-header-content-length: {len(TEXT)}"), body, piece
    )
    assert part.text == TEXT and part.complete and not part.cut


def test_without_a_length_the_whole_body_is_json_up_to_a_limit() -> None:
    body = b"x" * (PART_LIMIT + 1)
    assert read(head("Content-Length: 44"), TEXT, 10).text == TEXT
    assert read(head(f"Content-Length: {len(body)}"), body, 65536).cut
    squeezed = gzip.compress(body)
    part = read(head(f"Content-Length: {len(squeezed)}", "Content-Encoding: gzip"), squeezed, 65536)
    assert part.cut and len(part.text) == PART_LIMIT
    assert read(head("Content-Length: 9", "Content-Encoding: gzip"), b"no gzip!!", 4).complete


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"parameters":{"sequence_id":5,"sequence_start":true}}', SequencePart("seq", "n:5", True, False)),
        ('{"parameters":{"sequence_id":"5","sequence_end":true}}', SequencePart("seq", "s:5", False, True)),
        ('{"sequence_id":7,"text":"x"}', SequencePart("seq", "n:7", False, False)),  # as the generate endpoints take it
        ('{"parameters":{"sequence_id":0}}', None),
        ('{"parameters":{"sequence_id":true}}', None),
        ('{"parameters":{"sequence_id":""}}', None),
        ('{"parameters":[5]}', None),
        ("{}", None),
    ],
)
def test_the_sequence_of_a_request(text: str, part: SequencePart | None) -> None:
    assert sequence_of(text.encode(), "seq") == part


@pytest.mark.parametrize(
    ("parameters", "timeout"),
    [({"timeout": 5}, 5), ({"timeout": 0}, None), ({"timeout": -1}, None), ({"timeout": "5"}, None), ([5], None)],
)
def test_the_timeout_of_a_request(parameters: Any, timeout: int | None) -> None:
    assert timeout_of(json.dumps({"inputs": [{"timeout": 9}], "parameters": parameters}).encode()) == timeout


@pytest.mark.parametrize(
    ("header", "body", "may"),
    [
        ("Content-Length: 9", b'{"timeout":1}', True),
        ("Content-Length: 9", b'{"time":1}', False),
        ("Content-Length: 9\r\nContent-Encoding: gzip", b"", True),
        ("Transfer-Encoding: chunked", b"", True),
    ],
)
def test_a_quick_look_spares_most_requests_another(header: str, body: bytes, may: bool) -> None:
    found = read_request(head(header), 65536)
    assert found is not None and may_name(b"timeout", found[0], body) == may
