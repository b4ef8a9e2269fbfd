"""Keeping the replica's lease: every change at once, renewed in time, rejoined after the store was away.

The store's driver takes as long to import as Triton to come up, so both happen at once: the store may come later
than the first change of the lease.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from wire.errors import TidegateError
from wire.membership import ReplicaLease, ReplicaState

if TYPE_CHECKING:
    from stores.store import Store

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_LEAVE_SECONDS = 2.0


class LeaseKeeper:
    """The one writer of a replica's lease."""

    def __init__(self, store: "Store | Callable[[], Store]", lease: ReplicaLease, lease_seconds: float) -> None:
        self._made_by = store if callable(store) else None
        self._connected = asyncio.ensure_future(asyncio.to_thread(_connect, store))
        self._lease = lease
        self._lease_seconds = lease_seconds
        self._changed = asyncio.Event()
        self._version, self._written_version = 1, 0
        self._written = asyncio.Event()
        self._started = time.monotonic()
        self._ready: float | None = None
        self._store_offset: float | None = None

    @property
    def lease(self) -> ReplicaLease:
        return self._lease

    async def store(self) -> "Store":
        """The store, as soon as its driver is imported."""
        return await asyncio.shield(self._connected)

    def change(self, **fields: Any) -> None:
        """Change fields of the lease; it is written and announced as soon as the store takes it."""
        if fields.get("state") is ReplicaState.READY and self._ready is None:
            self._ready = time.monotonic()
        self._lease = self._lease.model_copy(update=fields)
        self._version += 1
        self._changed.set()

    async def keep(self) -> None:
        """Write the lease whenever it changed and at a third of its time. Runs until cancelled; a store that is
        away is told in the log once and tried again, and the lease announced anew when it is back."""
        away = False
        while True:
            announce = away or self._version != self._written_version
            self._changed.clear()
            try:
                await self._write(announce=announce)
            except TidegateError as error:
                if not away:
                    _log.warning("the lease cannot be renewed, serving goes on: %s", error)
                away = True
            else:
                if away:
                    _log.info("the store is back, the lease is renewed")
                away = False
            delay = self._lease_seconds / 3
            with suppress(TimeoutError):
                # Not wait_for: until Python 3.12 it can lose a cancellation that meets a change.
                async with asyncio.timeout(min(delay, _RETRY_SECONDS) if away else delay):
                    await self._changed.wait()

    async def written(self, limit_seconds: float) -> bool:
        """Wait until the newest change is in the store, at most ``limit_seconds``; False when it is not."""
        try:
            async with asyncio.timeout(limit_seconds):
                while self._written_version != self._version:
                    self._written.clear()
                    await self._written.wait()
        except TimeoutError:
            return False
        return True

    async def leave(self) -> None:
        """End the lease now; when the store is away it ends by itself. Closes a store that was made for us."""
        from stores.membership import ReplicaDirectory

        with suppress(TidegateError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await ReplicaDirectory(await self.store()).leave(self._lease.pool, self._lease.id)
        if self._made_by is not None:
            await (await self.store()).close()

    async def _write(self, *, announce: bool) -> None:
        from stores.membership import ReplicaDirectory

        store = await self.store()
        if self._store_offset is None:
            self._store_offset = await store.now() - time.monotonic()
        version = self._version
        dates = {
            "started_at": self._store_offset + self._started,
            "ready_at": None if self._ready is None else self._store_offset + self._ready,
        }
        lease = self._lease.model_copy(update=dates)
        await ReplicaDirectory(store).renew(lease, self._lease_seconds, announce=announce)
        self._written_version = version
        self._written.set()


def _connect(store: "Store | Callable[[], Store]") -> "Store":
    """Runs in a thread: imports what a lease needs of the stores."""
    import stores.membership  # noqa: F401 - here, so that it costs the event loop nothing later

    return store() if callable(store) else store
