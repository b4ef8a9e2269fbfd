"""Making operators' changes on this replica's Triton: those there are before it is ready, and those that come.

The store keeps them in one order for the whole pool. A replica makes them in that order, so that all replicas end
alike however many gateways wrote them down; what concerns different models goes on at the same time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

from replicas.triton import Triton, TritonRefused, TritonUnreachable
from wire.changes import CallAnswer, ChangeKind, Numbered
from wire.errors import TidegateError

if TYPE_CHECKING:
    from stores.changes import ChangeStore
    from stores.store import Store

_log = logging.getLogger(__name__)

#: A notice can get lost: changes are looked for at least so often. Seconds.
_LOOK_SECONDS = 1.0


class ChangeFollower:
    """See the module. ``models`` is what the replica can serve now."""

    def __init__(
        self,
        pool: str,
        replica: str,
        triton: Triton,
        store: "Callable[[], Awaitable[Store]]",
        *,
        models: Collection[str],
        limit_seconds: float,
        tell: Callable[[Collection[str]], Awaitable[None]],
    ) -> None:
        """``tell`` is called when ``models`` has changed, and returns when everybody can know."""
        self._pool, self._replica, self._triton, self._store = pool, replica, triton, store
        self._limit_seconds = limit_seconds
        self._tell = tell
        self._last_id = "0-0"
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self.models = list(models)

    async def catch_up(self) -> None:
        """Make every change there is, one after another; returns when the store has no more. Waits for the store.

        A change that fails here does not keep the replica from serving: its lease says which models it has.
        """
        changes = await self._changes()
        away = False
        while True:
            try:
                new = await changes.after(self._pool, self._last_id)
                if not new:
                    return
                for each in new:
                    answer = await self._make(changes, each)
                    self._last_id = each.id
                    if not answer.well:
                        _log.warning(
                            "a change of the pool was not made here: %s %s", each.change.kind, each.change.about
                        )
                        if each.change.kind is ChangeKind.REGISTER and answer.unreachable is None:
                            await changes.forget(self._pool, [each])  # the caller's memory is gone
            except TidegateError as error:
                if not away:
                    _log.warning("ready but for what operators have changed, which is not known yet: %s", error)
                away = True
                await asyncio.sleep(_LOOK_SECONDS)

    async def follow(self) -> None:
        """Make changes as they come, until cancelled."""
        changes = await self._changes()
        try:
            async for pool in changes.notices(at_least_every_seconds=_LOOK_SECONDS):
                if pool is None or pool == self._pool:
                    await self._look(changes)
        finally:
            for task in self._under_way.values():
                task.cancel()

    async def _changes(self) -> "ChangeStore":
        from stores.changes import ChangeStore

        return ChangeStore(await self._store())

    async def _look(self, changes: "ChangeStore") -> None:
        try:
            new = await changes.after(self._pool, self._last_id)
        except TidegateError:
            return  # looked for again in a moment
        for each in new:
            self._last_id = each.id
            self._under_way = {about: task for about, task in self._under_way.items() if not task.done()}
            before = self._under_way.get(each.change.about)
            self._under_way[each.change.about] = asyncio.create_task(self._make_after(before, changes, each))

    async def _make_after(self, before: "asyncio.Task[None] | None", changes: "ChangeStore", each: Numbered) -> None:
        if before is not None:
            await asyncio.wait({before})
        while True:
            try:
                await self._make(changes, each)
                return
            except TidegateError as error:
                _log.warning("a change of the pool waits for the store: %s", error)
                await asyncio.sleep(_LOOK_SECONDS)

    async def _make(self, changes: "ChangeStore", each: Numbered) -> CallAnswer:
        """Make one change and answer it."""
        call = await changes.call(self._pool, each.change.token)
        if call is None:
            return CallAnswer(replica=self._replica, status=0, unreachable="the change is no longer kept")
        answer = await self._triton.pass_on(call, self._replica, self._limit_seconds)
        _log.info("%s %s: %s", each.change.kind, each.change.about, "done" if answer.well else "refused")
        if each.change.kind in (ChangeKind.LOAD, ChangeKind.UNLOAD) and answer.unreachable is None:
            await self._look_at_models(each.change.models)
        await changes.answer(self._pool, each.change.token, answer)
        return answer

    async def _look_at_models(self, changed: Collection[str]) -> None:
        try:
            self.models = await self._triton.ready_models({*self.models, *changed})
        except (TritonRefused, TritonUnreachable) as error:
            _log.warning("what is loaded is not known: %s", error)
            return
        await self._tell(self.models)
