"""How long each stage of a job took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Elapsed milliseconds by stage, in the order in which they ran."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.milliseconds[name] = round((time.perf_counter() - started) * 1000, 1)
