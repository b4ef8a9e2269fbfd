"""How fast a queue gets shorter: slots given to held requests a second, the recent ones counting most. Pure."""

import math

#: What happened this long ago counts a third of what happens now. Seconds.
_MEMORY_SECONDS = 10.0


class DrainRate:
    """See the module. Nothing is counted while nobody waits, so a quiet time does not make the queue look slow."""

    __slots__ = ("_at", "_count", "_watched")

    def __init__(self) -> None:
        self._count = 0.0
        self._watched = 0.0
        self._at: float | None = None

    def on_wait(self, now: float) -> None:
        """Somebody begins to wait, and nobody did before."""
        self._fade(now, watched=False)

    def on_grant(self, now: float) -> None:
        """A held request got a slot."""
        self._fade(now, watched=True)
        self._count += 1.0

    def per_second(self, now: float) -> float | None:
        """None as long as nothing was seen."""
        self._fade(now, watched=True)
        return self._count / self._watched if self._count > 1e-3 and self._watched > 1e-3 else None

    def _fade(self, now: float, *, watched: bool) -> None:
        if self._at is not None and watched:
            passed = now - self._at
            kept = math.exp(-passed / _MEMORY_SECONDS)
            self._count *= kept
            # The time over which _count was gathered, faded in the same way.
            self._watched = self._watched * kept + _MEMORY_SECONDS * (1.0 - kept)
        self._at = now
