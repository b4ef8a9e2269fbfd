"""How a loop behaves while the store is away: growing pauses, few words."""

import logging

_FIRST_PAUSE = 0.1
_GREATEST_PAUSE = 2.0
#: Between two lines in the log about one outage. Seconds.
_WORD_EVERY = 30.0


class Outage:
    """One loop's view of the store. Times are ``time.monotonic()``."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since: float | None = None
        self._next_word = 0.0
        self._pause = _FIRST_PAUSE

    def failed(self, message: str, now: float) -> float:
        """A step failed; how long to pause before the next. Seconds."""
        if self._since is None:
            self._since = now
        if now >= self._next_word:
            self._log.warning("%s; trying again", message)
            self._next_word = now + _WORD_EVERY
        pause, self._pause = self._pause, min(_GREATEST_PAUSE, self._pause * 2)
        return pause

    def over(self, now: float) -> None:
        """A step succeeded."""
        if self._since is not None:
            self._log.info("the store answers again after %.1f seconds", now - self._since)
            self._since = None
            self._pause = _FIRST_PAUSE
