"""Where HTTP bodies end. They are never held: what arrives is passed on, and only its end is found. No I/O."""

from wire.errors import ErrorKind, TidegateError

#: ``body_bytes`` of a chunked body.
CHUNKED = -1
#: ``body_bytes`` of an answer that ends when its connection does.
UNTIL_CLOSE = -2

#: Longest line that tells the size of a chunk, extensions included. Bytes.
_CHUNK_LINE_LIMIT = 4096
#: Most trailers after the last chunk. Bytes.
_TRAILER_LIMIT = 16384
_LAST_CHUNK = b"0\r\n\r\n"
_HEX_DIGITS = b"0123456789abcdefABCDEF"
_HEX_LIMIT = 15


class MalformedError(Exception):
    """Bytes that are not the HTTP they should be. The message is one sentence about what is wrong."""


class ChunkScanner:
    """Finds the end of a chunked body that passes by. ``body_bytes`` is the size of the chunks announced so far."""

    __slots__ = ("_in_trailers", "_left", "_line", "_trailer_bytes", "body_bytes")

    def __init__(self) -> None:
        self.body_bytes = 0
        self._left = 0  # of the current chunk, with the CRLF after it
        self._line = b""
        self._in_trailers = False
        self._trailer_bytes = 0

    def feed(self, data: bytes, pieces: list[bytes] | None = None) -> int:
        """The index in ``data`` after the body's last byte, or -1 when the body goes on.

        ``pieces`` gets the content without the framing. Raises MalformedError.
        """
        at, size = 0, len(data)
        while at < size:
            if self._left > 2:
                taken = min(self._left - 2, size - at)
                if pieces is not None:
                    pieces.append(data[at : at + taken])
                self._left -= taken
                at += taken
            elif self._left:
                if data[at] != b"\r\n"[2 - self._left]:
                    raise MalformedError("malformed chunked body: no line end after a chunk")
                self._left -= 1
                at += 1
            else:
                newline = data.find(b"\n", at)
                line = self._line + data[at : size if newline < 0 else newline + 1]
                if len(line) > _CHUNK_LINE_LIMIT:
                    raise MalformedError("malformed chunked body: a line without an end")
                if newline < 0:
                    self._line = line
                    return -1
                self._line = b""
                at = newline + 1
                if self._read_line(line):
                    return at
        return -1

    def _read_line(self, line: bytes) -> bool:
        """Take in a line between chunks; True when it was the last of the body."""
        if len(line) < 2 or line.find(b"\r") != len(line) - 2:
            raise MalformedError("malformed chunked body: a line that does not end with CRLF")
        if self._in_trailers:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > _TRAILER_LIMIT:
                raise MalformedError("malformed chunked body: too many trailers")
            return len(line) == 2
        digits = line[:-2].partition(b";")[0].rstrip(b" \t")
        if not 0 < len(digits) <= _HEX_LIMIT or digits.translate(None, _HEX_DIGITS):
            raise MalformedError("malformed chunked body: a chunk without a size")
        size = int(digits, 16)
        self.body_bytes += size
        self._left = size + 2 if size else 0
        self._in_trailers = not size
        return False


class RequestBody:
    """A request's body as it passes by."""

    __slots__ = ("_left", "_limit", "_scanner", "complete")

    def __init__(self, body_bytes: int, limit_bytes: int) -> None:
        """``body_bytes``: its length, or CHUNKED; ``limit_bytes``: the most that chunks may add up to."""
        self._left = body_bytes
        self._limit = limit_bytes
        self._scanner = ChunkScanner() if body_bytes == CHUNKED else None
        self.complete = body_bytes == 0

    @property
    def left(self) -> int | None:
        """Bytes still to come; None when only its end will tell."""
        return 0 if self.complete else None if self._scanner is not None else self._left

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """The part of ``data`` that belongs to this body, as it is sent on, and what comes after it.

        A chunked body is framed anew: Triton 2.51 hangs up on the extensions of a chunk, answers a request with
        trailers and then hangs up, and nobody downstream has to read a stranger's framing.

        Raises:
            TidegateError: BAD_REQUEST, TOO_LARGE. The end of this body cannot be found any more.
        """
        if self._scanner is None:
            size = min(len(data), self._left)
            self._left -= size
            self.complete = not self._left
            return (data, b"") if size == len(data) else (data[:size], data[size:])
        pieces: list[bytes] = []
        try:
            end = self._scanner.feed(data, pieces)
        except MalformedError as error:
            raise TidegateError(ErrorKind.BAD_REQUEST, str(error)) from None
        if self._scanner.body_bytes > self._limit:
            raise too_large(self._limit)
        content = b"".join(pieces)
        framed = b"%x\r\n%b\r\n" % (len(content), content) if content else b""
        if end < 0:
            return framed, b""
        self.complete = True
        return framed + _LAST_CHUNK, data[end:]


def too_large(limit_bytes: int) -> TidegateError:
    return TidegateError(ErrorKind.TOO_LARGE, f"the request body is larger than body_limit_bytes ({limit_bytes})")
