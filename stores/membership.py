"""Who is there: leases of replicas, reports of gateway instances, the catalogue of each pool.

Keys (under the prefix):
    replica:<id>            JSON ReplicaLease, expires
    pool:<pool>:replicas    set of replica ids that ever held a lease; pruned on read
    gateway:<instance>      JSON GatewayReport, expires
    gateways                set of instance names; pruned on read
    pool:<pool>:catalogue   JSON Catalogue
    membership              channel: the pool whose replicas changed
"""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TypeVar

from stores.store import Store
from wire.errors import TidegateError
from wire.membership import Catalogue, GatewayReport, Record, ReplicaLease

R = TypeVar("R", bound=Record)


class ReplicaDirectory:
    """The leases of all replicas."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._channel = store.key("membership")

    async def renew(self, lease: ReplicaLease, lease_seconds: float, *, announce: bool) -> None:
        """Write or renew ``lease``. ``announce`` changes of state, address or models: gateways then look at once."""
        store = self._store
        with store.errors():
            async with store.redis.pipeline(transaction=True) as pipe:
                pipe.set(store.key("replica", lease.id), lease.model_dump_json(), px=int(lease_seconds * 1000))
                pipe.sadd(store.key("pool", lease.pool, "replicas"), lease.id)
                if announce:
                    pipe.publish(self._channel, lease.pool)
                await pipe.execute()

    async def leave(self, pool: str, replica_id: str) -> None:
        """End a lease at once and tell everybody."""
        store = self._store
        with store.errors():
            async with store.redis.pipeline(transaction=True) as pipe:
                pipe.delete(store.key("replica", replica_id))
                pipe.srem(store.key("pool", pool, "replicas"), replica_id)
                pipe.publish(self._channel, pool)
                await pipe.execute()

    async def list(self, pool: str) -> list[ReplicaLease]:
        """The living leases of ``pool``, oldest first."""
        leases = await _read_all(self._store, self._store.key("pool", pool, "replicas"), "replica", ReplicaLease)
        return sorted(leases, key=lambda lease: (lease.started_at, lease.id))

    def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[str | None]:
        """The pool whose replicas changed, or None when it is time to look at all; see ``Store.notices``."""
        return self._store.notices(self._channel, at_least_every_seconds=at_least_every_seconds)


class GatewayDirectory:
    """The reports of all gateway instances."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def report(self, report: GatewayReport, lease_seconds: float) -> None:
        store = self._store
        with store.errors():
            async with store.redis.pipeline(transaction=True) as pipe:
                key = store.key("gateway", report.instance)
                pipe.set(key, report.model_dump_json(), px=int(lease_seconds * 1000))
                pipe.sadd(store.key("gateways"), report.instance)
                await pipe.execute()

    async def leave(self, instance: str) -> None:
        store = self._store
        with store.errors():
            async with store.redis.pipeline(transaction=True) as pipe:
                pipe.delete(store.key("gateway", instance))
                pipe.srem(store.key("gateways"), instance)
                await pipe.execute()

    async def list(self) -> list[GatewayReport]:
        return await _read_all(self._store, self._store.key("gateways"), "gateway", GatewayReport)


class CatalogueStore:
    """What each pool answers about itself while it is at zero."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, pool: str, catalogue: Catalogue) -> None:
        with self._store.errors():
            await self._store.redis.set(self._store.key("pool", pool, "catalogue"), catalogue.model_dump_json())

    async def get(self, pool: str) -> Catalogue | None:
        with self._store.errors():
            raw = await self._store.redis.get(self._store.key("pool", pool, "catalogue"))
        return None if raw is None else Catalogue.model_validate_json(raw)


async def _read_all(store: Store, index: str, kind: str, model: type[R]) -> list[R]:
    """Every living record that ``index`` names; ids whose record has expired are taken out of the index."""
    with store.errors():
        raw_members: set[bytes] = await store.redis.smembers(index)
        members = sorted(member.decode() for member in raw_members)
        if not members:
            return []
        values = await store.redis.mget([store.key(kind, member) for member in members])
    gone = [member for member, value in zip(members, values, strict=True) if value is None]
    if gone:
        # Housekeeping: a store that takes no writes just now can still be read.
        with suppress(TidegateError), store.errors():
            await store.redis.srem(index, *gone)
    return [model.model_validate_json(value) for value in values if value is not None]
