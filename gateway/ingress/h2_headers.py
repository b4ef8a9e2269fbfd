"""Header blocks: decoded once, remembered by their bytes together with what they mean.

Both peers are told SETTINGS_HEADER_TABLE_SIZE 0, so that a block means the same wherever it comes from. What is passed
on is written anew, once per remembered block: plainly and from checked fields, so that an odd encoding of one caller
cannot break a replica's connection, which others share.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import hpack

from gateway.ingress.h2_frames import Code, ConnectionFault

Fields = list[tuple[bytes, bytes]]
M = TypeVar("M")

#: Blocks up to this length are remembered. Bytes.
_REMEMBERED_LENGTH = 2048
#: So many are remembered; then all are forgotten, which costs less than keeping count of their use.
_REMEMBERED = 2048
#: Fields that have a number of their own, and names that have one (RFC 7541, appendix A).
_INDEXED = {(b":method", b"POST"): b"\x83", (b":scheme", b"http"): b"\x86", (b":status", b"200"): b"\x88"}
_NAMES = {b":authority": 1, b":path": 4, b":status": 8}
#: Makes the receiver's table empty for good: nothing sent here refers to it.
EMPTY_TABLE = b"\x20"

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]").search
_REQUEST_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_PER_CONNECTION = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))


class MalformedError(Exception):
    """A header list that HTTP/2 or gRPC does not allow: its stream ends."""


class TooLongError(Exception):
    """A header list longer than the limit: its stream ends."""


class HeaderBlocks(Generic[M]):
    """Reads blocks. ``interpret`` tells what a list of fields means; what it raises is MalformedError."""

    def __init__(self, interpret: Callable[[Fields], M], limit_bytes: int) -> None:
        self._interpret = interpret
        self._limit_bytes = limit_bytes
        self._remembered: dict[bytes, M] = {}
        self._decoder = self.new_decoder()
        self._decoder.max_allowed_table_size = 0
        self._decoder.header_table_size = 0

    def new_decoder(self) -> hpack.Decoder:
        """A decoder for a connection whose peer does not know yet that tables are empty here."""
        # The library's own limit ends a connection; below it, what is too long ends its stream only.
        return hpack.Decoder(max_header_list_size=8 * self._limit_bytes)

    def read(self, block: bytes, decoder: hpack.Decoder | None = None) -> M:
        """What a block means; ``decoder`` where it depends on those before it.

        Raises:
            ConnectionFault: it cannot be decoded.
            MalformedError, TooLongError: it can, and must not be taken.
        """
        if decoder is not None:
            return self._interpret(self._decode(block, decoder))
        known = self._remembered.get(block)
        if known is None:
            known = self._interpret(self._decode(block, self._decoder))
            if len(block) <= _REMEMBERED_LENGTH:
                if len(self._remembered) >= _REMEMBERED:
                    self._remembered.clear()
                self._remembered[block] = known
        return known

    def _decode(self, block: bytes, decoder: hpack.Decoder) -> Fields:
        try:
            fields = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
        except hpack.OversizedHeaderListError as error:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "the header list is too long") from error
        except (hpack.HPACKError, IndexError, ValueError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, "a header block cannot be decoded") from error
        if sum(len(name) + len(value) + 32 for name, value in fields) > self._limit_bytes:
            raise TooLongError
        return fields


def encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A block that refers to no table but the static one and adds nothing to any."""
    block = bytearray()
    for name, value in fields:
        indexed = _INDEXED.get((name, value))
        if indexed is not None:
            block += indexed
            continue
        number = _NAMES.get(name)
        if number is not None:
            block.append(number)
        else:
            block.append(0)
            _put_length(block, len(name))
            block += name
        _put_length(block, len(value))
        block += value
    return bytes(block)


def _put_length(block: bytearray, length: int) -> None:
    if length < 127:
        block.append(length)
        return
    block.append(127)
    length -= 127
    while length > 127:
        block.append(length & 0x7F | 0x80)
        length >>= 7
    block.append(length)


def checked_request(fields: Fields) -> tuple[dict[bytes, bytes], Fields]:
    """The pseudo-header fields, and the others with binary values in their canonical form. Raises MalformedError."""
    pseudo: dict[bytes, bytes] = {}
    rest: Fields = []
    for name, value in fields:
        if _BAD_VALUE(value):
            raise MalformedError("a header value holds a control character")
        if name[:1] == b":":
            if rest or name in pseudo or name not in _REQUEST_PSEUDO:
                raise MalformedError("pseudo-header fields come first, once, and only those of requests")
            pseudo[name] = value
            continue
        if not _NAME(name) or name in _PER_CONNECTION or (name == b"te" and value != b"trailers"):
            raise MalformedError("a header field that HTTP/2 does not allow")
        rest.append((name, _canonical(value) if name.endswith(b"-bin") else value))
    if b":method" not in pseudo or not pseudo.get(b":path") or b":scheme" not in pseudo:
        raise MalformedError("a request needs :method, :scheme and :path")
    return pseudo, rest


def check_answer(fields: Fields) -> None:
    """Raises MalformedError for what would break the caller's connection."""
    for at, (name, value) in enumerate(fields):
        if _BAD_VALUE(value) or name in _PER_CONNECTION or not (_NAME(name) or (at == 0 and name == b":status")):
            raise MalformedError("a header field that HTTP/2 does not allow")


def _canonical(value: bytes) -> bytes:
    """Base64 as gRPC's parsers want it. Raises MalformedError."""
    bare = value.rstrip(b"=")
    try:
        return base64.b64encode(base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)).rstrip(b"=")
    except binascii.Error as error:
        raise MalformedError("a binary header value is not base64") from error
