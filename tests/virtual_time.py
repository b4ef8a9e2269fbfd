"""An event loop whose time passes only when nothing else can happen, and then at once."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _ImpatientSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits for something that will never happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 seconds."""

    def __init__(self) -> None:
        self._impatient = _ImpatientSelector()
        super().__init__(self._impatient)

    def time(self) -> float:
        return self._impatient.now


def run_in_virtual_time(story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(story)
