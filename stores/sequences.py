"""On which replica each live sequence is, for gateway instances that have not seen it start.

Key (under the prefix): sequence:<pool>:<model>:<digest of the sequence's id>   the replica's id; expires
"""

import hashlib

from stores.store import Store


class SequencePlaces:
    """Written when a sequence starts and now and then while it lives; read by an instance that does not know it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def claim(self, pool: str, model: str, name: str, replica: str, seconds: float) -> str:
        """Write ``replica``, unless another is written; returns what is written then."""
        with self._store.errors():
            there: bytes | None = await self._store.redis.set(
                self._key(pool, model, name), replica, px=int(seconds * 1000), nx=True, get=True
            )
        return replica if there is None else there.decode()

    async def put(self, pool: str, model: str, name: str, replica: str, seconds: float) -> None:
        with self._store.errors():
            await self._store.redis.set(self._key(pool, model, name), replica, px=int(seconds * 1000))

    async def get(self, pool: str, model: str, name: str) -> str | None:
        with self._store.errors():
            there: bytes | None = await self._store.redis.get(self._key(pool, model, name))
        return None if there is None else there.decode()

    async def drop(self, pool: str, model: str, name: str) -> None:
        with self._store.errors():
            await self._store.redis.delete(self._key(pool, model, name))

    def _key(self, pool: str, model: str, name: str) -> str:
        # Callers choose ids: of any length, with any characters in them.
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        return self._store.key("sequence", pool, model, digest)
