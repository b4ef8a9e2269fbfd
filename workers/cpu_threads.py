"""Threads for pre- and post-processing. Unlike the standard pool they never keep a process from ending."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class CpuThreads:
    """``count`` daemon threads, started on first use. A worker that was told to leave leaves; a computation whose
    job was handed back does not hold it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """``function(*args)`` in one of the threads."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._serve, name=f"cpu-{i}", daemon=True) for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        future: Future[T] = Future()
        self._work.put((future, lambda: function(*args, **kwargs)))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads as they become free."""
        for _ in self._threads:
            self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue  # its job is gone
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the awaiting job
                future.set_exception(error)
            del item, future, call  # a page's pixels must not stay until the next one comes
