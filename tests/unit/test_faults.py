"""What is done about faults of replicas, and about requests that would cause one."""

import gzip
import json

import pytest

from gateway.ingress.http_wire import Request, read_request
from gateway.ingress.shape_guard import check_shapes, deadly_shape, may_be_deadly
from gateway.routing.faults import Faults, RetryBudget, SentAway, sent_away
from wire.errors import ErrorKind, TidegateError
from wire.pools import ModelSettings, PoolSettings, RoutingSettings


def test_repeats_are_a_share_of_requests() -> None:
    budget = RetryBudget(0.1)
    while budget.spend():
        pass
    repeats = 0
    for _ in range(1000):
        budget.on_request()
        repeats += budget.spend()
    assert 95 <= repeats <= 101


def test_what_was_not_spent_is_not_saved_without_end() -> None:
    budget = RetryBudget(0.5)
    for _ in range(10000):
        budget.on_request()
    assert sum(budget.spend() for _ in range(1000)) == 10
    assert not RetryBudget(0.0).spend()


def test_only_models_declared_so_are_repeatable() -> None:
    models = (ModelSettings(name="a", repeatable=True), ModelSettings(name="b"))
    faults = Faults(PoolSettings(models=models, routing=RoutingSettings(first_byte_limit_seconds=2)))
    assert faults.repeatable == {"a"} and faults.first_byte_limit_seconds == 2


@pytest.mark.parametrize(
    ("unavailable", "message", "meaning"),
    [
        (True, b'{"error":"[request id: <id_unknown>] Exceeds maximum queue size"}', SentAway.QUEUE_FULL),
        (True, b"exceeds maximum queue size", SentAway.QUEUE_FULL),
        (True, b"Request timeout expired", None),
        (False, b"Request for unknown model: 'm' has no available versions", SentAway.NOT_LOADED),
        (False, b"Request for unknown model: 'm' is not found", SentAway.NOT_LOADED),
        (False, b"Request for unknown model: 'm' version 7 is not found", None),
        (False, b"Not Found", None),
    ],
)
def test_what_triton_means_by_sending_a_request_away(
    unavailable: bool, message: bytes, meaning: SentAway | None
) -> None:
    assert sent_away(unavailable=unavailable, message=message) is meaning


LARGEST = 2**63 - 1


def text(*shapes: object) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "shape": shape, "data": [1]} for shape in shapes]}).encode()


@pytest.mark.parametrize(
    "shape",
    [[1, LARGEST], [LARGEST], [LARGEST, 2], [2**34], [1000] * 7, [10**9] * 3, [99999] * 4, [2**32, 2**32]],
)
def test_shapes_that_end_a_triton(shape: list[int]) -> None:
    """All of these were tried: Triton 2.51 aborts, or the Python stub does."""
    assert deadly_shape(text([1], shape), 200) == json.dumps(shape)[1:-1]
    escaped = text(shape).replace(b"shape", b"sh\\u0061pe")
    assert json.loads(escaped)["inputs"][0]["shape"] == shape
    assert deadly_shape(escaped, 200) is not None


@pytest.mark.parametrize(
    "shape", [[], [1], [0, LARGEST], [4096, 4096], [-1], [10**30], ["x"], {}, None, [1.5e300], [[LARGEST]]]
)
def test_what_triton_answers_itself_is_let_through(shape: object) -> None:
    assert deadly_shape(text(shape), 200) is None


def test_a_large_body_may_have_large_shapes() -> None:
    assert deadly_shape(text([2**25]), 2**26) is None
    assert deadly_shape(text([2**25]), 2**20) is not None


def request(*headers: str) -> Request:
    lines = ("POST /v2/models/m/infer HTTP/1.1", "Host: t", *headers, "", "")
    found = read_request("\r\n".join(lines).encode(), 65536)
    assert found is not None
    return found[0]


def refused(asked: Request, body: bytes) -> bool:
    if not may_be_deadly(asked, body):
        return False
    try:
        check_shapes(asked, body)
    except TidegateError as error:
        assert error.kind is ErrorKind.BAD_REQUEST
        return True
    return False


def test_deadly_bodies_are_found_as_they_come_over_the_wire() -> None:
    """A-018."""
    body = text([1, LARGEST])
    assert refused(request(f"Content-Length: {len(body)}"), body)
    packed = gzip.compress(body)
    assert refused(request(f"Content-Length: {len(packed)}", "Content-Encoding: gzip"), packed)
    assert refused(request("Transfer-Encoding: chunked"), b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    nested = b'{"inputs":[{"name":"x","shape":[1],"data":' + b"[ " * 9000 + b"1" + b"]" * 9000 + b"}]}"
    assert refused(request(f"Content-Length: {len(nested)}"), nested)
    for other in (b"[" * 60_000, b'{"a":' * 10_000, b'{"text_input":' + b"[[{}," * 900):
        assert refused(request(f"Content-Length: {len(other)}"), other)
    unended = b"[]" * 600 + b'"\\' * 300_000  # looked at once, not once for each quote
    assert not refused(request(f"Content-Length: {len(unended)}"), unended)
    flat = json.dumps({"inputs": [{"name": "x", "shape": [2000], "data": [[1]] * 2000}]}).encode()
    assert not refused(request(f"Content-Length: {len(flat)}"), flat)
    binary = b'{"inputs":[{"name":"x","shape":[4],"parameters":{"binary_data_size":16}}]}' + bytes(16)
    assert not refused(request(f"Content-Length: {len(binary)}"), binary)
