"""The wire format of jobs and outcomes: plain Redis stream fields, so that any language can take part.

A job is one entry of the stream :func:`stream_key`, made with one XADD; the entry id that XADD returns is
the job id. Fields (all bytes): ``schema`` = "1", ``payload`` = the input, and optionally ``name`` (shown to
people), ``content_type`` and ``timeout_ms`` (milliseconds from submission after which the result is worthless).

An outcome is the JSON document of :class:`Outcome` under :func:`outcome_key`; when it is written, its
job id is published on :func:`outcome_channel`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wire.membership import Record

SCHEMA = "1"
#: The one consumer group of every queue.
GROUP = "workers"


def stream_key(prefix: str, queue: str) -> str:
    return f"{prefix}:{{{queue}}}:jobs"


def outcome_key(prefix: str, queue: str, job_id: str) -> str:
    return f"{prefix}:{{{queue}}}:outcome:{job_id}"


def outcome_channel(prefix: str, queue: str) -> str:
    return f"{prefix}:{{{queue}}}:outcomes"


def dead_letter_key(prefix: str, queue: str) -> str:
    """Stream of jobs given up on: the job's fields plus ``job_id``, ``reason`` and ``deliveries``."""
    return f"{prefix}:{{{queue}}}:dead"


def submission_key(prefix: str, queue: str, token: str) -> str:
    """The job id that one submission got, kept for a minute; only clients that may send a command twice need it."""
    return f"{prefix}:{{{queue}}}:submission:{token}"


class DecodeError(Exception):
    """An entry that this version cannot read; ``fields`` keeps its raw bytes."""

    def __init__(self, message: str, fields: Mapping[bytes, bytes]) -> None:
        super().__init__(message)
        self.fields = fields


@dataclass(frozen=True, slots=True)
class Job:
    """One unit of queued work. ``id`` is empty until the stream has given it one."""

    queue: str
    payload: bytes
    name: str = ""
    content_type: str = "application/octet-stream"
    timeout_ms: int | None = None
    id: str = ""

    def encode(self) -> dict[str, bytes | str]:
        """The stream fields of this job."""
        fields: dict[str, bytes | str] = {
            "schema": SCHEMA,
            "payload": self.payload,
            "name": self.name,
            "content_type": self.content_type,
        }
        if self.timeout_ms is not None:
            fields["timeout_ms"] = str(self.timeout_ms)
        return fields


def decode_job(queue: str, job_id: str, fields: Mapping[bytes, bytes]) -> Job:
    """The job in a stream entry.

    Raises:
        DecodeError: no payload, another schema version, or a field that is not what it should be.
    """
    schema = fields.get(b"schema", b"").decode("utf-8", "replace")
    if schema != SCHEMA:
        raise DecodeError(f"schema version {schema or 'missing'!r} is not known here (known: {SCHEMA!r})", fields)
    if b"payload" not in fields:
        raise DecodeError("the job has no payload field", fields)
    try:
        timeout = fields.get(b"timeout_ms")
        return Job(
            queue=queue,
            payload=fields[b"payload"],
            name=fields.get(b"name", b"").decode(),
            content_type=fields.get(b"content_type", b"application/octet-stream").decode(),
            timeout_ms=None if timeout is None else int(timeout),
            id=job_id,
        )
    except ValueError as error:
        raise DecodeError(f"a field of the job cannot be read: {error}", fields) from error


class OutcomeStatus(StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The job itself was at fault, or its tries ran out: ``error`` says why."""
    LOST = "lost"
    """Its entry vanished from the stream (trimmed or deleted) before it was done."""


class Outcome(Record):
    """Result or typed failure of one job."""

    job_id: str
    queue: str
    status: OutcomeStatus
    result: dict[str, Any] | None = None
    """What the handler returned; JSON."""
    error: str | None = None
    """One clear sentence when it did not succeed."""
    error_kind: str | None = None
    """A word for programs: ``bad_input``, ``deadline``, ``poison``, ``lost``, or a kind of wire.errors."""
    worker: str | None = None
    deliveries: int = 1
    """How often the job was handed to a worker."""
    waited_seconds: float | None = None
    """Store time from submission to the claim."""
    worked_seconds: float | None = None
    """Elapsed time from the claim to the outcome."""


class QueueBacklog(Record):
    """The unfinished jobs of one queue at one moment. Ages are differences of times of the store's own clock."""

    queue: str
    lag: int | None
    """Jobs not yet delivered to any worker; None when it cannot be told."""
    pending: int
    """Jobs delivered and not finished."""
    oldest_undelivered_seconds: float | None = None
    """Age of the oldest job not yet delivered; None when there is none."""
    oldest_pending_seconds: float | None = None
    """Time since the submission of the oldest job that is delivered and not finished; None when there is none."""
    consumers: int = 0
    """Workers known to the consumer group, living or not."""

    @property
    def backlog(self) -> int | None:
        """Lag plus pending; None when the lag is unknown."""
        return None if self.lag is None else self.lag + self.pending
