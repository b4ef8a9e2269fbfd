"""How fast a caller sends his request or reads his answer, looked at now and then: no timer per request."""

#: A caller who sends more slowly than this over a whole stall time is taken for stalled. Bytes per second.
LEAST_BYTES_PER_SECOND = 1024


class Pace:
    """Progress of whatever a caller has to move on with just now, since a window began."""

    __slots__ = ("_began", "_moved_at_begin", "_what")

    def __init__(self) -> None:
        self._what: object = None
        self._began = 0.0
        self._moved_at_begin = 0

    def restart(self) -> None:
        """The caller has nothing to move on with just now; whatever he has next gets a whole stall time."""
        self._what = None

    def has_stalled(self, what: object, now: float, moved_bytes: int, stall_seconds: float, least_bytes: float) -> bool:
        """Whether less than ``least_bytes`` were moved over a whole window of ``stall_seconds``.

        ``what`` tells one task of the caller from the next, by equality; ``now`` is any steady clock in seconds;
        ``moved_bytes`` only ever grows while ``what`` stays the same.
        """
        moved = moved_bytes - self._moved_at_begin
        if what == self._what and now - self._began < stall_seconds:
            return False
        stalled = what == self._what and moved < least_bytes
        self._what, self._began, self._moved_at_begin = what, now, moved_bytes
        return stalled
