"""State of the autoscaler that others read or cause: who leads, activations, decisions and their memory.

Keys (under the prefix):
    autoscaler:leader         token of the leading autoscaler, expires
    poke                      channel: the pool to look at now
    pool:<pool>:activation    set while someone waits for a pool at zero, expires
    pool:<pool>:decision      JSON DecisionRecord of the last tick, expires
    pool:<pool>:decisions     stream of the decisions that changed something, bounded
    pool:<pool>:memory        JSON memory of decide(), so that a restart forgets nothing
"""

from collections.abc import AsyncIterator

from stores.store import Store
from wire.decisions import DecisionRecord, decisions_key, latest_decision_key

#: Decisions kept per pool for ``tidegate why`` and the dashboard.
KEPT_DECISIONS = 1000

_LEAD = """
local holder = redis.call('GET', KEYS[1])
if holder == false or holder == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return 1
end
return 0
"""

_STEP_DOWN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


class Leadership:
    """At most one autoscaler acts: the holder of a lease with a token."""

    def __init__(self, store: Store, token: str) -> None:
        self._store = store
        self._token = token
        self._key = store.key("autoscaler", "leader")
        self._lead = store.redis.register_script(_LEAD)
        self._step_down = store.redis.register_script(_STEP_DOWN)

    async def hold(self, lease_seconds: float) -> bool:
        """Take or renew the lease; False while another token holds it."""
        with self._store.errors():
            return bool(await self._lead(keys=[self._key], args=[self._token, int(lease_seconds * 1000)]))

    async def release(self) -> None:
        """Give the lease up if it is ours, so that a successor need not wait for it to expire."""
        with self._store.errors():
            await self._step_down(keys=[self._key], args=[self._token])


class Activations:
    """Asking for a pool that is at zero. An activation outlives the caller who made it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._channel = store.key("poke")

    async def activate(self, pool: str, keep_seconds: float) -> None:
        """Ask for at least one replica of ``pool`` and poke the autoscaler to tick now."""
        store = self._store
        with store.errors():
            async with store.redis.pipeline(transaction=True) as pipe:
                pipe.set(store.key("pool", pool, "activation"), "1", px=int(keep_seconds * 1000))
                pipe.publish(self._channel, pool)
                await pipe.execute()

    async def poke(self, pool: str) -> None:
        """Ask the autoscaler to tick now, without asking for a replica."""
        await self._store.publish(self._channel, pool)

    async def is_active(self, pool: str) -> bool:
        with self._store.errors():
            return bool(await self._store.redis.exists(self._store.key("pool", pool, "activation")))

    async def clear(self, pool: str) -> None:
        """The activation was served: a replica is ready."""
        with self._store.errors():
            await self._store.redis.delete(self._store.key("pool", pool, "activation"))

    def pokes(self, *, at_least_every_seconds: float) -> AsyncIterator[str | None]:
        """The pool that was poked, or None when a regular tick is due; see ``Store.notices``."""
        return self._store.notices(self._channel, at_least_every_seconds=at_least_every_seconds)


class DecisionLog:
    """Every decision that changed something, the newest one always, and the memory of decide()."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def record(self, record: DecisionRecord, *, changed: bool, keep_seconds: float) -> None:
        """Keep ``record`` as the newest; append it to the history when it ``changed`` something."""
        store = self._store
        raw = record.model_dump_json()
        with store.errors():
            async with store.redis.pipeline(transaction=True) as pipe:
                pipe.set(latest_decision_key(store.prefix, record.pool), raw, px=int(keep_seconds * 1000))
                if changed:
                    key = decisions_key(store.prefix, record.pool)
                    pipe.xadd(key, {"record": raw}, maxlen=KEPT_DECISIONS, approximate=True)
                await pipe.execute()

    async def latest(self, pool: str) -> DecisionRecord | None:
        """The decision of the last tick; None when no autoscaler has ticked lately."""
        with self._store.errors():
            raw = await self._store.redis.get(latest_decision_key(self._store.prefix, pool))
        return None if raw is None else DecisionRecord.model_validate_json(raw)

    async def history(self, pool: str, count: int) -> list[DecisionRecord]:
        """The last ``count`` decisions that changed something, newest first."""
        with self._store.errors():
            key = decisions_key(self._store.prefix, pool)
            entries: list[tuple[bytes, dict[bytes, bytes]]] = await self._store.redis.xrevrange(key, count=count)
        return [DecisionRecord.model_validate_json(fields[b"record"]) for _, fields in entries]

    async def save_memory(self, pool: str, memory: str) -> None:
        with self._store.errors():
            await self._store.redis.set(self._store.key("pool", pool, "memory"), memory)

    async def load_memory(self, pool: str) -> str | None:
        with self._store.errors():
            raw: bytes | None = await self._store.redis.get(self._store.key("pool", pool, "memory"))
        return None if raw is None else raw.decode()
