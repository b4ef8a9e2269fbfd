"""The answer to a request that concerns all replicas of a pool, in either protocol: waited for, then told."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

from wire.changes import CallAnswer
from wire.errors import ErrorKind, TidegateError


class AwaitsAnswer(ABC):
    """What an operation of either protocol does with the work that makes its answer."""

    def __init__(self) -> None:
        self._working: asyncio.Task[CallAnswer] | None = None
        self._ended = False

    def _work_on(self, work: Coroutine[Any, Any, CallAnswer]) -> None:
        """Begin to make the answer; :meth:`_answer` or :meth:`fail` gets what comes of it, unless all is over."""
        self._working = asyncio.get_running_loop().create_task(work)
        self._working.add_done_callback(self._on_answer)

    def _stop_working(self) -> None:
        if self._working is not None:
            self._working.cancel()

    def _on_answer(self, task: "asyncio.Task[CallAnswer]") -> None:
        if self._ended or task.cancelled():
            return
        error = task.exception()
        if isinstance(error, TidegateError):
            self.fail(error)
        elif error is not None:
            self.fail(TidegateError(ErrorKind.INTERNAL, "a fault of the gateway"))
            raise error
        else:
            self._answer(task.result())

    @abstractmethod
    def fail(self, error: TidegateError) -> None:
        """Answer with an error of ours."""

    @abstractmethod
    def _answer(self, answer: CallAnswer) -> None:
        """Tell the caller."""
