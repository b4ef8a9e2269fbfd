"""One queue as producers and observers see it: submit jobs, read and await outcomes, measure the backlog.

Workers claim and finish jobs through :mod:`stores.job_claims`. Names and fields: :mod:`wire.jobs`. Every method raises
``TidegateError(STORE_UNAVAILABLE)`` when the store does not answer, unless its docstring says otherwise.
"""

import asyncio
import uuid
from collections.abc import Iterable
from contextlib import aclosing, suppress
from importlib.resources import files

from redis.commands.core import AsyncScript

from stores.store import Store
from wire.errors import TidegateError
from wire.jobs import GROUP, Job, Outcome, QueueBacklog, outcome_channel, outcome_key, stream_key, submission_key

#: Outcomes are announced; this is how long a lost announcement (a store that restarted) goes unnoticed. Seconds.
_LOOK_AGAIN_SECONDS = 5.0
#: Longer than any driver waits before it sends a command again. Milliseconds.
_SUBMISSION_KEPT_MS = 60_000


class JobStream:
    """The jobs and outcomes of ``queue``."""

    def __init__(self, store: Store, queue: str) -> None:
        self._store = store
        self.queue = queue
        self._stream = stream_key(store.prefix, queue)
        self._channel = outcome_channel(store.prefix, queue)
        self._submit = load_script(store, "submit.lua")
        self._backlog = load_script(store, "backlog.lua")

    async def submit(self, job: Job) -> str:
        """Append ``job``; its id. The caller enforces the queue's payload limit."""
        # The driver sends a command again when its answer is lost; the token makes that one job.
        token = submission_key(self._store.prefix, self.queue, uuid.uuid4().hex)
        words = [word for field in job.encode().items() for word in field]
        with self._store.errors():
            job_id = await self._submit(keys=[self._stream, token], args=[_SUBMISSION_KEPT_MS, *words])
        return bytes(job_id).decode()

    async def outcome(self, job_id: str) -> Outcome | None:
        """The outcome of a job; None while it has none (or no longer has one, or never existed)."""
        return (await self._outcomes([job_id])).get(job_id)

    async def wait(self, job_ids: Iterable[str], timeout_seconds: float) -> dict[str, Outcome]:
        """The outcomes of these jobs, as soon as all are there or ``timeout_seconds`` have passed.

        Jobs without an outcome by then are missing from the answer. Never raises for an absent store: it goes on
        waiting, and looks again when the store is back.
        """
        waiting = set(job_ids)
        found: dict[str, Outcome] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                notices = self._store.notices(self._channel, at_least_every_seconds=_LOOK_AGAIN_SECONDS)
                async with aclosing(notices) as announced:  # type: ignore[type-var]
                    async for job_id in announced:
                        if job_id is not None and job_id not in waiting:
                            continue
                        with suppress(TidegateError):
                            found |= await self._outcomes(sorted(waiting) if job_id is None else [job_id])
                        waiting -= found.keys()
                        if not waiting:
                            break
        return found

    async def backlog(self) -> QueueBacklog:
        """What is unfinished now. A queue that was never used has nothing unfinished."""
        with self._store.errors():
            reply = await self._backlog(keys=[self._stream], args=[GROUP])
        length, has_group, lag, pending, consumers, undelivered_id, pending_id, time = reply
        now = int(time[0]) + int(time[1]) / 1e6
        undelivered_age = _age(undelivered_id, now)
        return QueueBacklog(
            queue=self.queue,
            lag=_lag(length, has_group, lag, pending, is_empty=undelivered_age is None),
            pending=pending,
            oldest_undelivered_seconds=undelivered_age,
            oldest_pending_seconds=_age(pending_id, now),
            consumers=consumers,
        )

    async def _outcomes(self, job_ids: list[str]) -> dict[str, Outcome]:
        keys = [outcome_key(self._store.prefix, self.queue, job_id) for job_id in job_ids]
        with self._store.errors():
            values = await self._store.redis.mget(keys) if keys else []
        return {
            job_id: Outcome.model_validate_json(value)
            for job_id, value in zip(job_ids, values, strict=True)
            if value is not None
        }


def _lag(length: int, has_group: int, lag: int, pending: int, *, is_empty: bool) -> int:
    """Undelivered jobs. Whether there are any is always known; how many may have to be counted."""
    if is_empty:
        return 0
    if not has_group:
        return length
    if lag >= 0:
        return max(1, lag)
    # The server cannot tell after deletions among undelivered entries. Finished jobs are deleted, so what is there
    # is either undelivered or pending; pending entries that were trimmed make this too small, never zero.
    return max(1, length - pending)


def _age(entry_id: bytes, now: float) -> float | None:
    """Seconds since the store appended the entry; entry ids begin with the store's time in milliseconds."""
    return max(0.0, now - submitted_at(entry_id.decode())) if entry_id else None


def submitted_at(job_id: str) -> float:
    """Unix seconds by the store's clock at which it appended the job."""
    return int(job_id.partition("-")[0]) / 1000


def load_script(store: Store, name: str) -> AsyncScript:
    """The Lua script of that file in this package; it is sent to the store on first use, and again after a restart."""
    script: AsyncScript = store.redis.register_script(files("stores").joinpath(name).read_text())
    return script
