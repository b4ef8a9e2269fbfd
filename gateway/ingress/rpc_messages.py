"""gRPC's framing of messages inside a stream's data, and the name that a request's first bytes hold."""

import zlib

from gateway.ingress.protobuf import strings_in_prefix
from wire.errors import ErrorKind, TidegateError

#: The flag and the length before each message. Bytes.
PREFIX_LENGTH = 5
#: Of a compressed message, so much is uncompressed to find a name. Bytes.
_UNPACKED_LIMIT = 65536
_WBITS = {b"gzip": 31, b"deflate": 15}


class MessageMeter:
    """Follows the messages in a stream's data: where they end, and that none is over the limit."""

    __slots__ = ("_head", "_left", "_limit", "first_end")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._left = 0
        self._head = b""
        self.first_end: int | None = None
        """Where the first message ends, in bytes from the start of the data; None until that is known."""

    @property
    def at_boundary(self) -> bool:
        return not self._left and not self._head

    def feed(self, data: bytes) -> None:
        """Raises TidegateError for a message over the limit."""
        size = len(data)
        left = self._left
        if left:
            if size <= left:
                self._left = left - size
                return
        elif size >= PREFIX_LENGTH and not self._head:
            length = int.from_bytes(data[1:PREFIX_LENGTH])
            if length + PREFIX_LENGTH == size and length <= self._limit:
                if self.first_end is None:
                    self.first_end = size
                return  # one whole message, as most are
        at = self._left
        self._left = 0
        while at < size:
            head = self._head + data[at : at + PREFIX_LENGTH - len(self._head)]
            at += len(head) - len(self._head)
            if len(head) < PREFIX_LENGTH:
                self._head = head
                return
            self._head = b""
            length = int.from_bytes(head[1:])
            if length > self._limit:
                message = f"a message of {length} bytes is larger than body_limit_bytes ({self._limit})"
                raise TidegateError(ErrorKind.TOO_LARGE, message)
            if self.first_end is None:
                self.first_end = PREFIX_LENGTH + length
            self._left = max(0, length - (size - at))
            at += length

    def until_boundary(self, data: bytes) -> int:
        """How many bytes of ``data``, which is not fed yet, end the message under way, as far as they do."""
        left, at = self._left, 0
        if self._head:
            at = PREFIX_LENGTH - len(self._head)
            if len(data) < at:
                return len(data)
            left = int.from_bytes((self._head + data[:at])[1:])
        return min(len(data), at + left)


def plain_name(data: bytes) -> str | None:
    """The string in field 1 of a first message, if it is as nearly all are: uncompressed, the name in front, shorter
    than 128 bytes, something behind it. None says nothing: look closer with :class:`FirstMessage`."""
    if len(data) < 8 or data[0] or data[5] != 0x0A:
        return None
    end = 7 + data[6]
    if data[6] > 127 or end >= len(data) or data[end] < 16 or int.from_bytes(data[1:PREFIX_LENGTH]) < end - 4:
        return None
    try:
        return data[7:end].decode() or None
    except UnicodeDecodeError:
        return None


class FirstMessage:
    """The first message in ``data``, as much of it as is there."""

    __slots__ = ("_body", "_whole", "end", "length")

    def __init__(self, data: bytes, encoding: bytes, *, last: bool) -> None:
        """``last``: nothing comes behind ``data``. Raises TidegateError when it is compressed in a way not known."""
        self.length = int.from_bytes(data[1:PREFIX_LENGTH]) if len(data) >= PREFIX_LENGTH else None
        self.end = len(data) if self.length is None else PREFIX_LENGTH + self.length
        body = data[PREFIX_LENGTH : self.end]
        self._whole = last or (self.length is not None and len(data) >= self.end)
        if body and data[0] & 1:
            body, ended = _unpacked(body, encoding)
            self._whole = self._whole or ended
        self._body = body

    def strings(self, *numbers: int) -> dict[int, str] | None:
        """The string fields ``numbers``, those that are there; None while more bytes could change the answer."""
        found, certain = strings_in_prefix(self._body, numbers)
        return found if certain or self._whole else None

    def guess(self, *numbers: int) -> dict[int, str]:
        """As :meth:`strings`, from what is there."""
        return strings_in_prefix(self._body, numbers)[0]

    @property
    def whole(self) -> bool:
        return self._whole

    @property
    def body(self) -> bytes:
        """The message, uncompressed, up to a limit."""
        return self._body


def _unpacked(body: bytes, encoding: bytes) -> tuple[bytes, bool]:
    """The front of a compressed message, and whether nothing more would be read of it."""
    wbits = _WBITS.get(encoding)
    if wbits is None:
        raise TidegateError(ErrorKind.NOT_SUPPORTED, "messages are compressed with gzip or deflate, or not at all")
    unpacker = zlib.decompressobj(wbits)
    try:
        front = unpacker.decompress(bytes(body), _UNPACKED_LIMIT)
    except zlib.error:
        return b"", True
    return front, len(front) >= _UNPACKED_LIMIT


def framed(message: bytes) -> bytes:
    """A message with its prefix, uncompressed."""
    return b"\0" + len(message).to_bytes(4) + message
