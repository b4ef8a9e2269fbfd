"""Jobs and outcomes as stream fields and JSON."""

import pytest

from wire.jobs import DecodeError, Job, Outcome, OutcomeStatus, QueueBacklog, decode_job


def _fields(job: Job) -> dict[bytes, bytes]:
    """What Redis gives back for what ``encode`` gave it."""
    encoded = job.encode().items()
    return {name.encode(): value if isinstance(value, bytes) else value.encode() for name, value in encoded}


@pytest.mark.parametrize(
    "job",
    [
        Job(queue="q", payload=b"\x00\xff", id="1-0"),
        Job(queue="q", payload=b"", name="Größe.png", content_type="image/png", timeout_ms=5, id="1-1"),
    ],
)
def test_a_job_survives_the_stream(job: Job) -> None:
    assert decode_job("q", job.id, _fields(job)) == job


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({b"schema": b"2"}, "schema version '2'"),
        ({b"schema": b""}, "missing"),
        ({b"timeout_ms": b"soon"}, "cannot be read"),
        ({b"name": b"\xff"}, "cannot be read"),
    ],
)
def test_what_cannot_be_read_keeps_its_bytes(change: dict[bytes, bytes], word: str) -> None:
    fields = _fields(Job(queue="q", payload=b"x")) | change
    with pytest.raises(DecodeError, match=word) as caught:
        decode_job("q", "1-0", fields)
    assert caught.value.fields == fields


def test_a_job_needs_a_payload() -> None:
    with pytest.raises(DecodeError, match="payload"):
        decode_job("q", "1-0", {b"schema": b"1"})


def test_an_outcome_survives_json_and_later_fields() -> None:
    outcome = Outcome(job_id="1-0", queue="q", status=OutcomeStatus.SUCCEEDED, result={"text": "ä"}, deliveries=2)
    assert Outcome.model_validate_json(outcome.model_dump_json()) == outcome
    assert Outcome.model_validate_json('{"job_id":"1-0","queue":"q","status":"lost","later":1}').status == "lost"


def test_an_unknown_lag_makes_the_backlog_unknown() -> None:
    assert QueueBacklog(queue="q", lag=None, pending=3).backlog is None
    assert QueueBacklog(queue="q", lag=2, pending=3).backlog == 5
