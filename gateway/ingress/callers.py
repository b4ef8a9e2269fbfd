"""The callers' connections of one door: kept while they are open, and drained when the instance leaves."""

import asyncio
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from wire.errors import ErrorKind, TidegateError

#: After the drain limit, the errors that are still being written get this long. Seconds.
_CUT_SECONDS = 0.5


class CallerConnection(Protocol):
    """A caller's connection, as far as its end goes."""

    def leave(self) -> None:
        """Take nothing new and close as soon as nothing is under way."""

    def cut(self, error: TidegateError) -> None:
        """Give up what is under way with ``error``, and close."""

    def abort(self) -> None:
        """Be gone, whatever was not written yet."""


C = TypeVar("C", bound=CallerConnection)


class Callers(Generic[C]):
    """See the module."""

    def __init__(self) -> None:
        self.draining = False
        self._open: set[C] = set()
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[C]:
        """Those open now; they may close meanwhile."""
        return iter(list(self._open))

    def opened(self, connection: C) -> None:
        """A caller has connected."""
        self._open.add(connection)
        if self.draining:
            connection.leave()

    def closed(self, connection: C) -> None:
        """A connection has ended."""
        self._open.discard(connection)
        if not self._open:
            self._empty.set()

    async def drain(self, limit_seconds: float) -> None:
        """Take nothing new, let what is under way finish, for as long as the limit allows; then give up."""
        self.draining = True
        for connection in self:
            connection.leave()
        await self._until_empty(limit_seconds)
        late = TidegateError(ErrorKind.DRAINING, "this gateway instance is leaving; try again", retry_after_seconds=1.0)
        for connection in self:
            connection.cut(late)
        await self._until_empty(_CUT_SECONDS)
        for connection in self:
            connection.abort()
        await self._until_empty(_CUT_SECONDS)

    async def _until_empty(self, limit_seconds: float) -> None:
        self._empty.clear()
        if not self._open:
            return
        try:
            async with asyncio.timeout(limit_seconds):
                await self._empty.wait()
        except TimeoutError:
            pass
