"""Making one change on a pool: written down, made by its replicas, answered, and cleared of what it made obsolete."""

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gateway.pool_wide.operations import Asked, Operation
from gateway.routing.pool import Pool, RequestHead
from stores.changes import ChangeStore
from wire.changes import Call, CallAnswer, Change, ChangeKind, Numbered, obsolete
from wire.membership import ReplicaLease, ReplicaState

log = logging.getLogger(__name__)


class Changing:
    """See the module. ``refresh`` reads a pool's replicas again, now."""

    def __init__(self, changes: ChangeStore, refresh: Callable[[Pool], Awaitable[None]]) -> None:
        self._changes = changes
        self._refresh = refresh
        self._making: set[asyncio.Task[Any]] = set()

    def close(self) -> None:
        """Wait for no more answers; what is written down is made all the same."""
        for task in self._making:
            task.cancel()

    async def make(self, pool: Pool, asked: Asked, head: RequestHead) -> list[CallAnswer]:
        """Change a pool: the answers of its ready replicas, none where it has none. Once begun it is seen through,
        whether its caller waits or not. Raises TidegateError."""
        task: asyncio.Task[Any] = asyncio.create_task(self._change_pool(pool, asked, head))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        task.add_done_callback(_retrieve)
        answers: list[CallAnswer] = await asyncio.shield(task)
        return answers

    async def _change_pool(self, pool: Pool, asked: Asked, head: RequestHead) -> list[CallAnswer]:
        """Write the change down, wait for the replicas that are ready, and forget what it made obsolete."""
        # A pool that makes a change is not idle; one that is too busy to give a slot is not either.
        with pool.try_reserve(head) or contextlib.nullcontext():
            return await self._write_and_wait(pool, asked)

    async def _write_and_wait(self, pool: Pool, asked: Asked) -> list[CallAnswer]:
        kind = asked.operation.change
        assert kind is not None
        change = Change(
            token=uuid.uuid4().hex,
            kind=kind,
            about=asked.about,
            models=_models_of(pool, asked) if asked.operation in (Operation.LOAD, Operation.UNLOAD) else (),
            plain=kind is ChangeKind.LOAD and not asked.names,
        )
        made = await self._changes.append(pool.name, change, _without_queries(asked.call))
        log.info("event=change pool=%s kind=%s about=%r", pool.name, kind.value, asked.about)
        # Read again: a replica may have become ready that this instance has not heard of.
        await self._refresh(pool)
        answers = await self._answers(pool, made)
        await self._settle(pool, made, answers)
        await self._refresh(pool)  # who asks next shall be routed by what has changed
        return answers

    async def _answers(self, pool: Pool, made: Numbered) -> list[CallAnswer]:
        """The answers of the replicas that are ready, as long as they are."""
        expected = {lease.id: position for position, lease in enumerate(ready_replicas(pool))}
        answers: dict[str, CallAnswer] = {}
        while True:
            there = {lease.id for lease in ready_replicas(pool)}
            if all(replica in answers for replica in expected if replica in there):
                return [answers[replica] for replica in sorted(answers, key=lambda each: expected.get(each, 1 << 30))]
            answer = await self._changes.next_answer(pool.name, made.change.token)
            if answer is not None:
                answers[answer.replica] = answer

    async def _settle(self, pool: Pool, made: Numbered, answers: Sequence[CallAnswer]) -> None:
        kept = await self._changes.after(pool.name)
        if answers and not any(answer.well for answer in answers):
            gone = {made.id}  # every replica has refused it, so would the next
        else:
            gone = set(obsolete(kept, made, pool.settings.model_names))
        await self._changes.forget(pool.name, [each for each in kept if each.id in gone])


def ready_replicas(pool: Pool) -> list[ReplicaLease]:
    return [lease for lease in pool.replicas if lease.state is ReplicaState.READY]


def _models_of(pool: Pool, asked: Asked) -> tuple[str, ...]:
    """The named model, and those that go with it: an ensemble may be unloaded with its parts."""
    models = [asked.model or ""]
    known = None if pool.catalogue is None else pool.catalogue.models.get(models[0])
    if asked.operation is Operation.UNLOAD and "unload_dependents" in asked.names and known is not None:
        steps = json.loads(known.config_http).get("ensemble_scheduling", {}).get("step", ())
        models += [step["model_name"] for step in steps]
    return tuple(dict.fromkeys(models))


def _without_queries(call: Call) -> Call:
    return call.model_copy(update={"target": call.target.partition("?")[0]})


def _retrieve(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("event=change-failed error=%r", str(task.exception()))
