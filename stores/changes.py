"""What operators have changed in each pool: written down by gateways, made by replicas, answered by them.

Keys (under the prefix):
    pool:<pool>:changes             stream of JSON Change, in the order in which they are made; those in force
    pool:<pool>:change:<token>      JSON Call of one of them, which may be large
    pool:<pool>:answers:<token>     list of JSON CallAnswer, one a replica, for a while
    changes                         channel: the pool that has a new change
"""

from collections.abc import AsyncIterator, Iterable

from stores.store import Store
from wire.changes import Call, CallAnswer, Change, Numbered

#: Answers that nobody fetched are dropped after this time. Seconds.
_ANSWERS_KEPT_SECONDS = 600
#: Longest single wait for an answer; must be below the store's time limit. Seconds.
_LISTEN_SECONDS = 0.5


class ChangeStore:
    """The changes of all pools. Every method raises ``TidegateError(STORE_UNAVAILABLE)`` when the store is away."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._channel = store.key("changes")

    async def append(self, pool: str, change: Change, call: Call) -> Numbered:
        """Write a change down, behind all others of the pool, and tell its replicas."""
        store = self._store
        with store.errors():
            async with store.redis.pipeline(transaction=True) as pipe:
                pipe.set(self._call_key(pool, change.token), call.model_dump_json())
                pipe.xadd(self._stream(pool), {"change": change.model_dump_json()})
                pipe.publish(self._channel, pool)
                done = await pipe.execute()
        return Numbered(id=bytes(done[1]).decode(), change=change)

    async def after(self, pool: str, last_id: str = "0-0") -> list[Numbered]:
        """The pool's changes behind ``last_id``, in order."""
        with self._store.errors():
            entries = await self._store.redis.xrange(self._stream(pool), min=f"({last_id}")
        return [
            Numbered(id=number.decode(), change=Change.model_validate_json(fields[b"change"]))
            for number, fields in entries
        ]

    async def call(self, pool: str, token: str) -> Call | None:
        """The call of a change; None when the change is no longer kept."""
        with self._store.errors():
            raw = await self._store.redis.get(self._call_key(pool, token))
        return None if raw is None else Call.model_validate_json(raw)

    async def forget(self, pool: str, changes: Iterable[Numbered]) -> None:
        """Keep these no longer."""
        gone = list(changes)
        if not gone:
            return
        store = self._store
        with store.errors():
            async with store.redis.pipeline(transaction=True) as pipe:
                pipe.xdel(self._stream(pool), *(each.id for each in gone))
                pipe.delete(*(self._call_key(pool, each.change.token) for each in gone))
                await pipe.execute()

    async def answer(self, pool: str, token: str, answer: CallAnswer) -> None:
        """A replica has made the change."""
        store, key = self._store, self._answers_key(pool, token)
        with store.errors():
            async with store.redis.pipeline(transaction=True) as pipe:
                pipe.rpush(key, answer.model_dump_json())
                pipe.expire(key, _ANSWERS_KEPT_SECONDS)
                await pipe.execute()

    async def next_answer(self, pool: str, token: str) -> CallAnswer | None:
        """The next answer that nobody has fetched; None when none comes for a moment."""
        with self._store.errors():
            found = await self._store.redis.blpop([self._answers_key(pool, token)], timeout=_LISTEN_SECONDS)
        return None if found is None else CallAnswer.model_validate_json(found[1])

    def notices(self, *, at_least_every_seconds: float) -> AsyncIterator[str | None]:
        """The pool that has a new change, or None when it is time to look; see ``Store.notices``."""
        return self._store.notices(self._channel, at_least_every_seconds=at_least_every_seconds)

    def _stream(self, pool: str) -> str:
        return self._store.key("pool", pool, "changes")

    def _call_key(self, pool: str, token: str) -> str:
        return self._store.key("pool", pool, "change", token)

    def _answers_key(self, pool: str, token: str) -> str:
        return self._store.key("pool", pool, "answers", token)
