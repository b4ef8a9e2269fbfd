"""HTTP/1.1 as bytes: the head of a request, the head of an answer. No I/O. Where bodies end: http_body.py."""

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import httptools

from gateway.access import is_own_key
from gateway.ingress.http_body import CHUNKED, UNTIL_CLOSE, MalformedError
from wire.membership import CLASS_HEADER, JOB_HEADER, TENANT_HEADER, TIMEOUT_HEADER

_HTTP_1_0 = b"HTTP/1.0"
_PLAIN_TEXT = b"Content-Type: text/plain"
#: Where Triton's words for a status are not the usual ones.
_PHRASES = {405: b"Not Allowed"}
_END_OF_HEAD = b"\r\n\r\n"
_JOB = JOB_HEADER.lower().encode()
_TIMEOUT = TIMEOUT_HEADER.lower().encode()
_CLASS = CLASS_HEADER.lower().encode()
_TENANT = TENANT_HEADER.lower().encode()
#: Request headers (lower case) that end at this hop: framing is written anew, the rest is between two neighbours.
_NOT_FORWARDED = frozenset(
    b"connection keep-alive proxy-connection te trailer upgrade expect content-length transfer-encoding".split()
) | {_JOB, _TIMEOUT, _CLASS, _TENANT}
#: A Connection header that lists one of these does not get it dropped: the request would mean something else.
_NEVER_DROPPED = frozenset((b"host", b"content-encoding", b"accept-encoding", b"inference-header-content-length"))
#: Heads up to this length are remembered with what they mean. Bytes.
_REMEMBERED_LENGTH = 2048


def read_request(data: bytes, limit_bytes: int) -> "tuple[Request, bytes] | None":
    """The request whose whole head ``data`` starts with, and the bytes after its head; None where it does not.

    Raises MalformedError as :class:`RequestParser` does, which reads what this function does not.
    """
    end = data.find(_END_OF_HEAD) + 4
    if not 4 <= end <= limit_bytes:
        return None
    head = data[:end]
    request = _remembered(head) if end <= _REMEMBERED_LENGTH else _parse(head)
    return None if request is None else (request, data[end:])


def _parse(head: bytes) -> "Request | None":
    found = RequestParser(len(head)).feed(head)
    return None if found is None else found[0]


#: A caller's heads are mostly the same from request to request, and what one means depends on its bytes alone.
_remembered = lru_cache(maxsize=1024)(_parse)


class RequestParser:
    """Reads the head of one request, fed as it arrives; strict, as two parsers of one stream must agree."""

    __slots__ = ("_buffer", "_complete", "_headers", "_limit", "_parser", "_target")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._buffer = b""
        self._complete = False
        self._target = b""
        self._parser: Any = None
        self._headers: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> "tuple[Request, bytes] | None":
        """The request and the bytes after its head, or None while the head is incomplete.

        Raises:
            MalformedError: it is not HTTP/1.x, contradicts itself, or is longer than the limit.
        """
        if self._parser is None:
            data = data.lstrip(b"\r\n")  # empty lines before a request are forgiven
            if not data:
                return None
            self._parser = httptools.HttpRequestParser(self)
        fed = len(self._buffer)
        buffer = self._buffer + data if fed else data
        # The end may straddle what came before and what came now.
        end = buffer.find(_END_OF_HEAD, max(0, fed - 3))
        length = len(buffer) if end < 0 else end + 4
        if length > self._limit:
            raise MalformedError(f"the request head is longer than {self._limit} bytes")
        try:
            self._parser.feed_data(memoryview(buffer)[fed:length])
        except httptools.HttpParserUpgrade:
            pass  # an upgrade is an offer; not taking it up means to answer the request
        except httptools.HttpParserError as error:
            raise MalformedError(f"malformed HTTP request: {error}") from None
        if self._complete != (end >= 0):
            raise MalformedError("malformed HTTP request: its head does not end with an empty line")
        if end < 0:
            self._buffer = buffer
            return None
        # httptools also reads requests of protocols that look like HTTP.
        version = buffer[: buffer.find(b"\r\n")].rpartition(b" ")[2]
        if version not in (b"HTTP/1.1", _HTTP_1_0):
            raise MalformedError("malformed HTTP request: only HTTP/1.1 and HTTP/1.0 are spoken here")
        return Request(self._parser.get_method(), self._target, version, self._headers), buffer[length:]

    # What httptools calls.

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._complete = True


class Request:
    """The head of a request; never changed, as equal heads share it.

    ``body_bytes`` is the length of its body, or CHUNKED; ``timeout_ms`` the text of TIMEOUT_HEADER, if it came;
    ``declared_class`` that of CLASS_HEADER, ``tenant`` that of TENANT_HEADER;
    ``authorization`` the Authorization header if it holds a key of ours; ``upstream_head`` the head as it is sent on;
    ``wrapped`` whether the body's bytes are not yet its content: chunked, or with a Content-Encoding.
    """

    __slots__ = (
        "_connection",
        "_framing",
        "authorization",
        "body_bytes",
        "declared_class",
        "expectation",
        "http_1_0",
        "job",
        "keep_alive",
        "method",
        "target",
        "tenant",
        "timeout_ms",
        "upstream_head",
        "wrapped",
    )

    def __init__(self, method: bytes, target: bytes, version: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.target = target
        self.http_1_0 = version == _HTTP_1_0
        self.keep_alive = not self.http_1_0
        self.body_bytes = 0
        self.expectation = b""
        self.job = False
        self.declared_class: bytes | None = None
        self.tenant: bytes | None = None
        self.timeout_ms: bytes | None = None
        self.authorization = b""
        self._framing = b"\r\n"
        self._connection: list[bytes] = []
        forwarded = [b"%b %b HTTP/1.1" % (self.method, target)]
        for name, value in headers:
            key = name.lower()
            if key in _NOT_FORWARDED:
                self._take(key, value.strip())
            elif key == b"authorization" and is_own_key(value):
                self.authorization = value
            else:
                forwarded.append(b"%b: %b" % (name, value))
        if self._connection:
            connection = set(self._connection)
            self.keep_alive = b"close" not in connection and (self.keep_alive or b"keep-alive" in connection)
            dropped = connection - _NEVER_DROPPED - {b"close", b"keep-alive"}
            if dropped:
                forwarded[1:] = [line for line in forwarded[1:] if line.partition(b":")[0].lower() not in dropped]
        self.upstream_head = b"\r\n".join(forwarded) + self._framing + b"\r\n"
        encoded = any(name.lower() == b"content-encoding" and value != b"identity" for name, value in headers)
        self.wrapped = encoded or self.body_bytes == CHUNKED

    def _take(self, key: bytes, value: bytes) -> None:
        """Take in a header that is not forwarded as it is."""
        if key == b"content-length":
            self.body_bytes = int(value)
            self._framing = b"\r\nContent-Length: %d\r\n" % self.body_bytes
        elif key == b"transfer-encoding":
            if self.body_bytes or self.http_1_0 or value.lower() != b"chunked":
                raise MalformedError("malformed HTTP request: the only Transfer-Encoding spoken here is chunked")
            self.body_bytes = CHUNKED
            self._framing = b"\r\nTransfer-Encoding: chunked\r\n"
        elif key == b"connection":
            self._connection += [token.strip() for token in value.lower().split(b",")]
        elif key == b"expect" and not self.http_1_0:
            self.expectation = value.lower()
        elif key == _TIMEOUT:
            self.timeout_ms = value
        elif key == _JOB:
            self.job = True
        elif key == _CLASS:
            self.declared_class = value
        elif key == _TENANT:
            self.tenant = value


class AnswerHead:
    """The head of an answer; never changed, as equal heads share it.

    ``body_bytes`` is the length of its body, CHUNKED or UNTIL_CLOSE.
    """

    __slots__ = ("body_bytes", "keep_alive", "raw", "status")

    def __init__(self, raw: bytes) -> None:
        """``raw`` ends with the empty line. Raises MalformedError."""
        lines = raw[:-4].split(b"\r\n")
        first = lines[0]
        if not first.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")) or not first[9:12].isdigit():
            raise MalformedError("malformed HTTP answer: no status line")
        if b"\0" in raw or not raw.count(b"\r") == raw.count(b"\n") == len(lines) + 1:
            raise MalformedError("malformed HTTP answer: a control character that two readers could read differently")
        self.raw = raw
        self.status = int(first[9:12])
        self.keep_alive = first[7:8] == b"1"
        self.body_bytes = UNTIL_CLOSE
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise MalformedError("malformed HTTP answer: a header line without a colon")
            self._take(name.lower(), value.strip())
        if self.status < 200 or self.status in (204, 304):
            self.body_bytes = 0
        elif self.body_bytes == UNTIL_CLOSE:
            self.keep_alive = False

    def _take(self, key: bytes, value: bytes) -> None:
        if key == b"content-length":
            if not value.isdigit() or self.body_bytes not in (UNTIL_CLOSE, int(value)):
                raise MalformedError("malformed HTTP answer: Content-Length")
            self.body_bytes = int(value)
        elif key == b"transfer-encoding":
            if self.body_bytes != UNTIL_CLOSE or value.lower() != b"chunked":
                raise MalformedError("malformed HTTP answer: Transfer-Encoding")
            self.body_bytes = CHUNKED
        elif key == b"connection":
            tokens = [token.strip() for token in value.lower().split(b",")]
            self.keep_alive = b"close" not in tokens and (self.keep_alive or b"keep-alive" in tokens)

    def for_caller(self, *, http_1_0: bool, keep_alive: bool) -> bytes:
        """The head for a caller whose connection lives on, or not, otherwise than HTTP/1.1 expects; one of HTTP/1.0
        does not know chunks."""
        dechunked = http_1_0 and self.body_bytes == CHUNKED
        dropped = (b"connection:", b"keep-alive:") + ((b"transfer-encoding:",) if dechunked else ())
        lines = [line for line in self.raw[:-4].split(b"\r\n") if not line.lower().startswith(dropped)]
        if http_1_0:
            lines[0] = _HTTP_1_0 + lines[0][len(_HTTP_1_0) :]
        if keep_alive or not http_1_0:
            lines.append(b"Connection: keep-alive" if keep_alive else b"Connection: close")
        return b"\r\n".join((*lines, b"", b""))


def with_retry_after(raw: bytes, seconds: float) -> bytes:
    """The head of an answer, ``raw``, with a Retry-After of whole seconds, unless it has one."""
    if b"\r\nretry-after:" in raw.lower():
        return raw
    return b"%b\r\nRetry-After: %d\r\n\r\n" % (raw[:-4], math.ceil(seconds))


def render_answer(
    status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, request: Request | None, *, keep_alive: bool
) -> bytes:
    """An answer of our own to ``request`` (None: one that could not be read), with its headers in Triton's order."""
    http_1_0 = request is not None and request.http_1_0
    phrase = _PHRASES.get(status) or HTTPStatus(status).phrase.encode()
    lines = [b"%b %d %b" % (_HTTP_1_0 if http_1_0 else b"HTTP/1.1", status, phrase)]
    length = b"Content-Length: %d" % len(body)
    described = [b"%b: %b" % header for header in headers]
    # The type that Triton falls back on is written last.
    lines += [length, *described] if _PLAIN_TEXT in described else [*described, length]
    if keep_alive == http_1_0:
        lines.append(b"Connection: keep-alive" if keep_alive else b"Connection: close")
    head_only = request is not None and request.method == b"HEAD"
    return b"\r\n".join((*lines, b"", b"" if head_only else body))


def error_body(message: str) -> bytes:
    """``message`` as Triton words an error."""
    return json.dumps({"error": message}, separators=(",", ":"), ensure_ascii=False).encode()
