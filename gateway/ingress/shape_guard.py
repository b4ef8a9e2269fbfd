"""Requests that are known to end a Triton: a JSON shape of more elements than memory holds, or JSON nested without end.
Pure.

Triton 2.51 makes room for the elements that an input's ``shape`` promises before it looks for them in ``data``, and
aborts when it cannot ([1, 9223372036854775807], but [1000, 1000, 1000, 1000] as well); and it descends into nested
JSON, at any endpoint that reads some, until its stack is used up. Tensors in binary, and gRPC, have neither fault.
"""

import math
import re
from itertools import accumulate

from gateway.ingress.http_wire import Request
from gateway.ingress.json_part import JsonPart
from wire.errors import ErrorKind, TidegateError

#: Up to so many elements Triton makes room whether they come or not.
_HARMLESS_ELEMENTS = 1 << 24
#: A shape whose dimensions take no more characters than this cannot have more elements than that.
_HARMLESS_LENGTH = 7
#: Deeper than this nothing is nested: as many dimensions no library has.
_DEPTH_LIMIT = 512
#: A string without an end goes to the end of the text: it must not be looked at again from its next quote.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS = {byte: 1 if byte in b"[{" else -1 for byte in b"[]{}"}
_SHAPE = re.compile(rb'"shape"\s*:\s*\[([^\[\]{}"]*)\]')
_DIMENSION = re.compile(rb"[0-9]+")
_ESCAPED = re.compile(rb"\\u00([2-7][0-9a-fA-F])")


def may_be_deadly(request: Request, body: bytes) -> bool:
    """A quick look, which lets most requests through: their tensors are binary."""
    return request.wrapped or b'"data"' in body or b"\\u00" in body or _may_be_deep(body)


def check_shapes(request: Request, body: bytes) -> None:
    """Look at the front of the body of a request that :func:`may_be_deadly`; all of it if it is small.

    Raises:
        TidegateError: BAD_REQUEST, for one that would end its Triton.
    """
    text = body
    if request.wrapped:
        part = JsonPart(request)
        part.feed(body)
        text = part.text
    found = deadly_shape(text, max(request.body_bytes, len(text)))
    if found is not None:
        message = f"the shape [{found}] has more elements than the request's data"
        raise TidegateError(ErrorKind.BAD_REQUEST, message)
    check_nesting(text)


def check_nesting(text: bytes | bytearray) -> None:
    """Raises TidegateError: BAD_REQUEST, for JSON that is nested deeper than a Triton's stack bears."""
    if _may_be_deep(text) and _depth(text) > _DEPTH_LIMIT:
        raise TidegateError(ErrorKind.BAD_REQUEST, f"the request's JSON is nested more than {_DEPTH_LIMIT} deep")


def _may_be_deep(text: bytes | bytearray) -> bool:
    return text.count(b"[") > _DEPTH_LIMIT or text.count(b"{") > _DEPTH_LIMIT


def deadly_shape(text: bytes, body_bytes: int) -> str | None:
    """The first shape in a JSON part of more elements than a body of that length can hold, and than are harmless."""
    if b"\\u00" in text:
        text = _ESCAPED.sub(lambda escaped: bytes((int(escaped[1], 16),)), text)
    limit = max(_HARMLESS_ELEMENTS, body_bytes)
    for shape in _SHAPE.findall(text):
        if len(shape) <= _HARMLESS_LENGTH:
            continue
        dimensions = _DIMENSION.findall(shape)
        # A number of so many digits is none that Triton reads; and a product of too many is not worked out here.
        if any(len(each) > 20 for each in dimensions) or len(dimensions) > 64:
            continue
        if math.prod(int(each) for each in dimensions) > limit:
            return str(shape[:100].decode("latin-1"))
    return None


def _depth(text: bytes | bytearray) -> int:
    """How deep arrays and objects lie in each other."""
    brackets = _STRING.sub(b"", text).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)
