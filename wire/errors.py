"""The one table of errors: domain word -> HTTP status, gRPC code, retryable.

Processes raise :class:`TidegateError` with an :class:`ErrorKind`; doors turn it into their protocol
with :data:`ERRORS`, and callers of the gateway turn a status back into a kind with :func:`kind_of_http`.
Triton's own statuses and bodies never pass through here: they reach the caller untouched.
"""

from dataclasses import dataclass
from enum import StrEnum


class ErrorKind(StrEnum):
    """What went wrong, in the words of the domain."""

    BAD_REQUEST = "bad_request"
    """The request cannot be understood; sending it again cannot help."""
    UNAUTHENTICATED = "unauthenticated"
    """An API key is needed, and none that is known came."""
    FORBIDDEN = "forbidden"
    """The API key is known, and its role may not do this."""
    NOT_FOUND = "not_found"
    """No pool serves this model, or no such route or queue."""
    METHOD_NOT_ALLOWED = "method_not_allowed"
    """The route exists, the HTTP method does not."""
    TOO_LARGE = "too_large"
    """A body or header over a configured limit."""
    NOT_SUPPORTED = "not_supported"
    """Known to the protocol, refused by this gateway."""
    QUOTA = "quota"
    """The tenant has used up its own quota; others are served. Nothing was sent to a replica."""
    HOLD_LIMIT = "hold_limit"
    """The gateway holds as many requests as it may; nothing was sent to a replica."""
    NO_REPLICA = "no_replica"
    """No replica became ready within the hold limit; nothing was sent to a replica."""
    QUEUE_TIMEOUT = "queue_timeout"
    """The request's own ``timeout`` parameter passed while it was held; nothing was sent to a replica."""
    SLOW_CALLER = "slow_caller"
    """The request's body came too slowly; the model did not run."""
    DEADLINE = "deadline"
    """The caller's deadline passed."""
    REPLICA_UNREACHABLE = "replica_unreachable"
    """The replica could not be reached; the request provably did not reach the model."""
    REPLICA_LOST = "replica_lost"
    """The replica died or broke the transfer after the request was sent; it may have run."""
    SEQUENCE_LOST = "sequence_lost"
    """The replica that held the request's sequence is gone; nothing was sent. The sequence must be started again."""
    DRAINING = "draining"
    """This gateway instance is leaving; another one takes the request."""
    STORE_UNAVAILABLE = "store_unavailable"
    """The store does not answer."""
    INTERNAL = "internal"
    """A fault of ours."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one kind looks in each protocol. ``grpc`` is the numeric status code of the gRPC specification."""

    http: int
    grpc: int
    retryable: bool


ERRORS: dict[ErrorKind, ErrorRow] = {
    ErrorKind.BAD_REQUEST: ErrorRow(400, 3, retryable=False),
    ErrorKind.UNAUTHENTICATED: ErrorRow(401, 16, retryable=False),
    ErrorKind.FORBIDDEN: ErrorRow(403, 7, retryable=False),
    ErrorKind.NOT_FOUND: ErrorRow(404, 5, retryable=False),
    ErrorKind.METHOD_NOT_ALLOWED: ErrorRow(405, 12, retryable=False),
    ErrorKind.TOO_LARGE: ErrorRow(413, 8, retryable=False),
    ErrorKind.NOT_SUPPORTED: ErrorRow(501, 12, retryable=False),
    ErrorKind.QUOTA: ErrorRow(429, 8, retryable=True),
    ErrorKind.HOLD_LIMIT: ErrorRow(503, 14, retryable=True),
    ErrorKind.NO_REPLICA: ErrorRow(503, 14, retryable=True),
    ErrorKind.QUEUE_TIMEOUT: ErrorRow(503, 14, retryable=True),
    ErrorKind.SLOW_CALLER: ErrorRow(408, 10, retryable=False),
    ErrorKind.DEADLINE: ErrorRow(504, 4, retryable=False),
    ErrorKind.REPLICA_UNREACHABLE: ErrorRow(502, 14, retryable=True),
    ErrorKind.REPLICA_LOST: ErrorRow(502, 14, retryable=False),
    ErrorKind.SEQUENCE_LOST: ErrorRow(409, 10, retryable=False),
    ErrorKind.DRAINING: ErrorRow(503, 14, retryable=True),
    ErrorKind.STORE_UNAVAILABLE: ErrorRow(503, 14, retryable=True),
    ErrorKind.INTERNAL: ErrorRow(500, 13, retryable=False),
}

#: HTTP response header (and gRPC trailing metadata key) in which the gateway names the kind of its own errors.
#: An answer without it is Triton's.
ERROR_KIND_HEADER = "tidegate-error"


class TidegateError(Exception):
    """An error of ours, protocol-neutral.

    ``message`` is one clear sentence for the caller: no traceback, no file path.
    ``retry_after_seconds`` is set when a retry after that time is believed to succeed.
    """

    def __init__(self, kind: ErrorKind, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_seconds = retry_after_seconds

    @property
    def row(self) -> ErrorRow:
        return ERRORS[self.kind]


def kind_of_http(status: int, named: str | None) -> ErrorKind | None:
    """The kind behind an answer of the gateway: ``named`` is the value of :data:`ERROR_KIND_HEADER`, if any.

    None when the answer is Triton's own (no header), or the header names a kind this version does not know.
    """
    if named is None:
        return None
    try:
        kind = ErrorKind(named)
    except ValueError:
        return None
    return kind if ERRORS[kind].http == status else None
