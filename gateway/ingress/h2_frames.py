"""HTTP/2 frames as bytes: cut out of a stream that comes in pieces, and put together. Pure: no connection, no state but
the piece of a frame that is still incomplete.
"""

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

#: Largest payload that a peer must take unasked, and that is announced here. Bytes.
DEFAULT_FRAME_SIZE = 16384
#: Size of a window before anybody changes it, and the largest there may be. Bytes.
DEFAULT_WINDOW = 65535
LARGEST_WINDOW = 2**31 - 1
LARGEST_STREAM_ID = 2**31 - 1

_HEAD = struct.Struct(">IBI")
_SETTING = struct.Struct(">HI")
_WORD = struct.Struct(">I")

#: Type, flags, stream id, payload.
Frame = tuple[int, int, int, bytes]


class Code(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """The peer broke the protocol, or overdid it: the connection ends with GOAWAY and this code."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class FrameReader:
    """Cuts a stream of bytes into frames, wherever the pieces begin and end. Keeps at most one frame."""

    __slots__ = ("_rest", "oversize")

    def __init__(self) -> None:
        self._rest = b""
        self.oversize = False
        """True once a frame is longer than was announced; nothing behind it is read."""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that ``data`` completes."""
        if self._rest:
            data = self._rest + data
        frames: list[Frame] = []
        at, size = 0, len(data)
        unpack = _HEAD.unpack_from
        while size - at >= 9:
            word, flags, stream_id = unpack(data, at)
            length = word >> 8
            if length > DEFAULT_FRAME_SIZE:
                self.oversize = True
                self._rest = b""
                return frames
            end = at + 9 + length
            if end > size:
                break
            frames.append((word & 0xFF, flags, stream_id & 0x7FFFFFFF, data[at + 9 : end]))
            at = end
        self._rest = data[at:] if at else data
        return frames


def frame_head(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """The nine bytes before a payload of ``length`` bytes."""
    return _HEAD.pack(length << 8 | kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings_frame(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(key, value) for key, value in values.items()))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, _WORD.pack(increment))


def rst_stream(stream_id: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, _WORD.pack(code))


def goaway(last_stream_id: int, code: int, message: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, _WORD.pack(last_stream_id) + _WORD.pack(code) + message)


def header_frames(stream_id: int, block: bytes, *, end_stream: bool, frame_size: int) -> bytes:
    """A header block as HEADERS and as many CONTINUATION frames as it takes."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= frame_size:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    pieces = [block[at : at + frame_size] for at in range(0, len(block), frame_size)]
    frames = [frame(HEADERS, flags, stream_id, pieces[0])]
    frames += [frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
    frames.append(frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1]))
    return b"".join(frames)


def word(payload: bytes, at: int = 0) -> int:
    """The four bytes at ``at`` as a number; raises ConnectionFault when they are not there."""
    if len(payload) < at + 4:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame is too short for its type")
    return int(_WORD.unpack_from(payload, at)[0])


def unpadded(payload: bytes, flags: int) -> bytes:
    """The content of a DATA or HEADERS payload, without padding and priority. Raises ConnectionFault."""
    skip, padding = 0, 0
    if flags & PADDED:
        if not payload:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a padded frame without its padding length")
        skip, padding = 1, payload[0]
    if flags & HAS_PRIORITY:
        skip += 5
    if skip + padding > len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[skip : len(payload) - padding]


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Settings in order. Raises ConnectionFault for values that none may have."""
    if len(payload) % 6:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS come in pieces of six bytes")
    settings = list(_SETTING.iter_unpack(payload))
    for key, value in settings:
        if key == INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "the initial window is too large")
        if key == MAX_FRAME_SIZE and not DEFAULT_FRAME_SIZE <= value < 2**24:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "the maximum frame size is out of range")
        if key == ENABLE_PUSH and value > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
    return settings
