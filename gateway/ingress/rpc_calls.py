"""What the head of a gRPC call says, which methods there are, and how answers of ours begin and end."""

import math
import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote_from_bytes

from gateway.access import is_own_key
from gateway.ingress.h2_headers import Fields, check_answer, checked_request, encode
from gateway.pool_wide.operations import Operation
from wire.errors import ERROR_KIND_HEADER, TidegateError
from wire.membership import CLASS_HEADER, JOB_HEADER, TENANT_HEADER

_SERVICE = "/inference.GRPCInferenceService/"
_HEALTH = "/grpc.health.v1.Health/Check"

#: {live: true}, {ready: true} and {status: SERVING} are the same two bytes.
YES = b"\x08\x01"
#: A deadline further away than this is none. Seconds.
_NEVER = 1e8
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])").fullmatch
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONTENT_TYPE = (b"content-type", b"application/grpc")
_OF_HEAD = frozenset((b":status", b"content-type"))
_JOB = JOB_HEADER.encode()
_CLASS = CLASS_HEADER.encode()
_TENANT = TENANT_HEADER.encode()
_OWN = frozenset((_JOB, _CLASS, _TENANT))

UNIMPLEMENTED = 12
UNKNOWN = 2


class Kind(Enum):
    """Who answers a method."""

    OWN = "the gateway, always the same"
    REFUSED = "nobody"
    REPLICA = "a replica, for one message"
    STREAM = "a replica, for as long as the stream lasts"


@dataclass(frozen=True, slots=True)
class Method:
    """One method. ``field`` is the number of the field that names the model; None: it is for the server as a whole."""

    name: str
    kind: Kind
    field: int | None = None
    at_zero: bool = False
    """Answered from memory while no replica is ready, so that asking for it does not wake a pool."""
    refusal: str = ""
    operation: Operation | None = None
    """It may concern more than one replica."""

    @property
    def for_operators(self) -> bool:
        """Whether it changes or watches the server: where API keys are known, that takes an operator's."""
        return self.operation is not None and self.operation.for_operators

    @property
    def has_parameters(self) -> bool:
        """Whether its requests are ModelInferRequests, which may belong to sequences."""
        return self.name in ("ModelInfer", "ModelStreamInfer")


_CONTROL = "models are loaded and unloaded by their pool's settings, not through the gateway"
_SHARED_MEMORY = "shared memory is not supported: a caller and a replica need not be on one machine"
_ALL = (
    Method("ServerLive", Kind.OWN),
    Method("ServerReady", Kind.OWN),
    Method("ModelInfer", Kind.REPLICA, 1),
    Method("ModelStreamInfer", Kind.STREAM, 1),
    Method("ModelReady", Kind.REPLICA, 1, at_zero=True),
    Method("ModelMetadata", Kind.REPLICA, 1, at_zero=True),
    Method("ModelConfig", Kind.REPLICA, 1, at_zero=True),
    Method("ModelStatistics", Kind.REPLICA, 1, operation=Operation.STATISTICS),
    Method("TraceSetting", Kind.REPLICA, 2, operation=Operation.TRACE),
    Method("ServerMetadata", Kind.REPLICA, at_zero=True),
    Method("RepositoryIndex", Kind.REPLICA, at_zero=True, operation=Operation.INDEX),
    Method("LogSettings", Kind.REPLICA, operation=Operation.LOG),
    Method("RepositoryModelLoad", Kind.REFUSED, refusal=_CONTROL, operation=Operation.LOAD),
    Method("RepositoryModelUnload", Kind.REFUSED, refusal=_CONTROL, operation=Operation.UNLOAD),
    *(
        Method(f"{kind}SharedMemory{action}", Kind.REFUSED, refusal=_SHARED_MEMORY, operation=operation)
        for kind in ("System", "Cuda")
        for action, operation in (
            ("Status", Operation.REGIONS),
            ("Register", Operation.REGISTER),
            ("Unregister", Operation.UNREGISTER),
        )
    ),
)
_METHODS = {(_SERVICE + method.name).encode(): method for method in _ALL}
_METHODS[_HEALTH.encode()] = Method("Check", Kind.OWN)


@dataclass(slots=True)
class CallHead:
    """The head of a call. Remembered with its bytes, so it says nothing of one call alone."""

    status: int
    """200; or the HTTP status with which a request that is no gRPC call is refused."""
    path: str
    method: Method | None
    timeout_seconds: float | None
    job: bool
    authorization: bytes
    """The value of the field of that name if it holds a key of ours; b"" otherwise. Not sent on."""
    encoding: bytes
    fields: Fields
    block: bytes
    """To be sent to a replica."""
    declared_class: bytes | None = None
    tenant: bytes | None = None

    def block_with(self, timeout_seconds: float) -> bytes:
        """The block with another timeout."""
        fields = [(name, value) for name, value in self.fields if name != b"grpc-timeout"]
        return encode([*fields, (b"grpc-timeout", _timeout_value(timeout_seconds))])


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """A head, or the trailers, of a replica's answer."""

    status: int | None
    grpc_status: int | None
    block: bytes
    trailers: bytes
    """The block for a caller that has an answer's head already."""
    message: bytes = b""
    """What it says of its status."""

    def with_retry_after(self, seconds: float) -> bytes:
        """The block with ``retry-after``, for an answer that is a status and nothing else."""
        return self.block + encode([(b"retry-after", b"%d" % math.ceil(seconds))])


def read_call(fields: Fields) -> CallHead:
    """Raises MalformedError."""
    pseudo, rest = checked_request(fields)
    path = pseudo[b":path"]
    timeout, authorization, encoding, content_type = None, b"", b"identity", b""
    own: dict[bytes, bytes] = {}
    passed: Fields = []
    for name, value in rest:
        if name == b"authorization" and is_own_key(value):
            authorization = value
            continue
        if name in _OWN:
            own[name] = value
            continue
        if name == b"grpc-timeout":
            timeout = _timeout(value)
        elif name == b"grpc-encoding":
            encoding = value
        elif name == b"content-type":
            content_type = value
        passed.append((name, value))
    status = 200
    if pseudo[b":method"] != b"POST":
        status = 405
    elif not content_type.startswith(b"application/grpc"):
        status = 415
    kept = [*pseudo.items(), *passed]
    method = _METHODS.get(path)
    return CallHead(
        status,
        path.decode("latin-1"),
        method,
        timeout,
        _JOB in own,
        authorization,
        encoding,
        kept,
        encode(kept),
        own.get(_CLASS),
        own.get(_TENANT),
    )


def read_answer(fields: Fields) -> AnswerHead:
    """Raises MalformedError."""
    check_answer(fields)
    status, grpc_status, message = None, None, b""
    for name, value in fields:
        if name == b":status":
            status = int(value) if value.isdigit() else 0
        elif name == b"grpc-status":
            grpc_status = int(value) if value.isdigit() else UNKNOWN
        elif name == b"grpc-message":
            message = value
    block = encode(fields)
    trailers = block if status is None else encode(field for field in fields if field[0] not in _OF_HEAD)
    return AnswerHead(status, grpc_status, block, trailers, message)


#: The head and the trailers of an answer that is all well.
OK_HEAD = encode([(b":status", b"200"), _CONTENT_TYPE])
OK_TRAILERS = encode([(b"grpc-status", b"0")])


def status_fields(code: int, message: str, extra: Fields, *, started: bool) -> bytes:
    """The block that ends a call with a status; with the answer's head in it unless that was sent."""
    head = [] if started else [(b":status", b"200"), _CONTENT_TYPE]
    words = quote_from_bytes(message.encode(), safe=_PLAIN).encode()
    return encode([*head, (b"grpc-status", b"%d" % code), (b"grpc-message", words), *extra])


def error_fields(error: TidegateError, *, started: bool) -> bytes:
    """The block that ends a call with an error of ours."""
    extra: Fields = [(ERROR_KIND_HEADER.encode(), error.kind.value.encode())]
    if error.retry_after_seconds is not None:
        extra.append((b"retry-after", b"%d" % math.ceil(error.retry_after_seconds)))
    return status_fields(error.row.grpc, error.message, extra, started=started)


def http_refusal(status: int) -> tuple[bytes, bytes]:
    """Head and body of the answer to a request that is no gRPC call."""
    return encode([(b":status", b"%d" % status), (b"content-type", b"text/plain")]), b"this port speaks gRPC\n"


_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def _timeout(value: bytes) -> float | None:
    match = _TIMEOUT(value)
    if match is None:
        return None
    seconds = int(match[1]) * _UNITS[match[2]]
    return None if seconds > _NEVER else seconds


def _timeout_value(seconds: float) -> bytes:
    for unit, scale in ((b"u", 1e6), (b"m", 1e3), (b"S", 1.0)):
        if seconds * scale < 1e8:
            return b"%d" % max(1, seconds * scale) + unit
    return b"99999999S"
