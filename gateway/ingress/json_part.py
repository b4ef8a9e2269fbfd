"""The few members of a request's JSON part that the gateway has to know, found without decoding the tensors in it.

Only requests that need it are looked into: see docs/protocol.md. No I/O.
"""

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from gateway.ingress.http_body import CHUNKED, ChunkScanner, MalformedError
from gateway.ingress.http_wire import Request
from gateway.routing.sequences import SEQUENCE_PARAMETERS, SequencePart, sequence_part

#: As much of a body is looked into, compressed and not. Bytes.
PART_LIMIT = 1 << 20
_JSON_LENGTH = re.compile(rb"\r\ninference-header-content-length:[ \t]*([0-9]+)", re.IGNORECASE).search
_ENCODING = re.compile(rb"\r\ncontent-encoding:[ \t]*([a-z]+)[ \t]*\r\n", re.IGNORECASE).search
_WBITS = {b"gzip": 31, b"deflate": 15}
#: Strings, and what opens or closes something. What is between them is numbers, words and commas.
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:]', re.DOTALL)
_OPENING = b"[{"
_CLOSING = b"]}"


class JsonPart:
    """The JSON part of a body that passes by: chunks are joined, gzip and deflate undone, as far as PART_LIMIT."""

    __slots__ = ("_left", "_scanner", "_taken", "_unpacker", "_wanted", "complete", "text")

    def __init__(self, request: Request) -> None:
        self.text = b""
        self.complete = request.body_bytes == 0
        """Nothing that comes can add to ``text``."""
        length = _JSON_LENGTH(request.upstream_head)
        # Without that header the whole body is JSON. With it, the length is that of the uncompressed part.
        self._wanted = PART_LIMIT if length is None else min(int(length[1]), PART_LIMIT)
        encoding = _ENCODING(request.upstream_head)
        wbits = None if encoding is None else _WBITS.get(encoding[1].lower())
        self._unpacker = None if wbits is None else zlib.decompressobj(wbits)
        self._scanner = ChunkScanner() if request.body_bytes == CHUNKED else None
        self._left = request.body_bytes
        self._taken = 0

    def feed(self, data: bytes) -> None:
        """More of the body, as it comes over the wire."""
        if self.complete:
            return
        self._taken += len(data)
        if self._scanner is None:
            self._left -= len(data)
            ended = self._left <= 0
        else:
            pieces: list[bytes] = []
            try:
                ended = self._scanner.feed(data, pieces) >= 0
            except MalformedError:
                ended = True  # who reads the body for good says so
            data = b"".join(pieces)
        if self._unpacker is not None:
            try:
                data = self._unpacker.decompress(data, self._wanted - len(self.text) + 1)
            except zlib.error:
                data, ended = b"", True
        self.text += data[: self._wanted - len(self.text)]
        self.complete = ended or len(self.text) >= self._wanted or self._taken >= PART_LIMIT

    @property
    def cut(self) -> bool:
        """Whether there is more of it than is looked into."""
        return self.complete and (len(self.text) >= PART_LIMIT or self._taken >= PART_LIMIT > self._wanted)


def members(text: bytes, *names: str) -> dict[str, Any]:
    """The values of the members ``names`` of the object in ``text``, which may be cut off; those that cannot be read
    are left out. Of several members of one name the first counts, as in Triton."""
    found: dict[str, Any] = {}
    wanted = {b'"%b"' % name.encode(): name for name in names}
    depth = 0
    string, string_at = b"", 0
    key: str | None = None
    start = 0
    for token in _TOKENS.finditer(text):
        mark = token[0]
        if mark in _OPENING:
            depth += 1
        elif mark in _CLOSING:
            depth -= 1
            if depth <= 0:
                _keep(found, key, text[start : token.start()])
                return found
        elif depth != 1:
            continue
        elif mark != b":":
            string, string_at = mark, token.start()
        elif string:
            # What lies between the last colon and this key is the last value and a comma.
            _keep(found, key, text[start:string_at].rstrip().removesuffix(b","))
            key, start, string = wanted.get(string), token.end(), b""
    return found


def sequence_of(text: bytes, model: str) -> SequencePart | None:
    """The sequence that a request with the JSON part ``text`` belongs to; None where it names none."""
    given = members(text, "parameters", *SEQUENCE_PARAMETERS)
    # The generate endpoints take parameters from the top of the object, too.
    nested = given.pop("parameters", None)
    return sequence_part(model, given | nested if isinstance(nested, dict) else given)


def timeout_of(text: bytes) -> int | None:
    """The ``timeout`` parameter of a request, in microseconds: how long it may wait."""
    parameters = members(text, "parameters").get("parameters")
    return timeout_parameter(parameters) if isinstance(parameters, dict) else None


def timeout_parameter(parameters: Mapping[str, Any]) -> int | None:
    """None where there is none, and where Triton would take it for none."""
    timeout = parameters.get("timeout")
    return timeout if isinstance(timeout, int) and not isinstance(timeout, bool) and 0 < timeout < 2**63 else None


def may_name(word: bytes, request: Request, body: bytes) -> bool:
    """Whether the JSON part of a request of which ``body`` has come could hold a member of that name: a quick look,
    so that most need no other. What is chunked or compressed could hold anything."""
    return request.wrapped or b'"%b"' % word in body


def _keep(found: dict[str, Any], key: str | None, raw: bytes) -> None:
    if key is None or key in found:
        return
    try:
        found[key] = json.loads(raw, object_pairs_hook=_first_wins)
    except (ValueError, RecursionError):
        found[key] = None


def _first_wins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))
