"""Flow control as arithmetic: what a peer may still send here, and when to let it send more.

The window that a peer gets follows what has been taken: it opens by what went on to the other side and no faster, and
grows, up to a limit, only for a stream whose data does go on.
"""

from gateway.ingress.h2_frames import DEFAULT_WINDOW, LARGEST_WINDOW, Code, ConnectionFault

#: A stream's window grows to this. Bytes.
STREAM_WINDOW_LIMIT = 1 << 20


class ReceiveWindow:
    """What a peer may send, on a stream or on a whole connection."""

    __slots__ = ("_left", "_limit", "_size", "_taken")

    def __init__(self, size: int = DEFAULT_WINDOW, limit: int = STREAM_WINDOW_LIMIT) -> None:
        self._left = size
        self._size = size
        self._limit = limit
        self._taken = 0

    def receive(self, count: int) -> None:
        """``count`` bytes have come. Raises ConnectionFault when that is more than was granted."""
        self._left -= count
        if self._left < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more data than the window allows")

    def take(self, count: int) -> int:
        """``count`` of the bytes that came have been passed on; returns by how much to open the window now, 0 for
        not yet: it opens in steps of at least half its size."""
        taken = self._taken + count
        if taken * 2 < self._size:
            self._taken = taken
            return 0
        self._taken = 0
        growth = min(self._size, self._limit - self._size)
        if growth > 0:
            self._size += growth
            taken += growth
        self._left += taken
        return taken


def widened(window: int, increment: int) -> int:
    """A peer's window after its WINDOW_UPDATE or a change of its settings. Raises ConnectionFault."""
    window += increment
    if window > LARGEST_WINDOW:
        raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window is too large")
    return window
