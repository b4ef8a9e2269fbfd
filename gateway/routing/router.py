"""Which pool serves a model, and keeping every pool's view of its replicas fresh."""

import asyncio
import logging
import math
from collections.abc import Mapping

from gateway.routing.pool import Pool
from stores.changes import ChangeStore
from stores.membership import CatalogueStore, GatewayDirectory, ReplicaDirectory
from stores.scaling import Activations
from wire.changes import loaded, unloaded
from wire.errors import ErrorKind, TidegateError
from wire.membership import GatewayReport, ReplicaLease, ReplicaState
from wire.pools import PoolSettings

log = logging.getLogger(__name__)

#: Replicas are read again this often even if nobody announced a change. Seconds.
_REREAD_SECONDS = 1.0
#: A pool's catalogue is read again for so long after a replica of it became ready: a replica that finds other models
#: than its predecessors writes it a moment after that. Seconds.
_CATALOGUE_SECONDS = 10.0
#: A load report is written this often, and lives for _REPORT_LEASE_SECONDS.
_REPORT_SECONDS = 0.4
_REPORT_LEASE_SECONDS = 3.0
#: While requests wait for a pool without a ready replica, its activation is renewed this often. Seconds.
_REACTIVATE_SECONDS = 1.0
#: An activation outlives the caller who made it by up to this long. Seconds.
_ACTIVATION_KEEP_SECONDS = 60.0


class Router:
    """All pools of this gateway instance. ``run`` keeps them fresh until it is cancelled."""

    def __init__(
        self,
        pools: Mapping[str, PoolSettings],
        *,
        replicas: ReplicaDirectory,
        gateways: GatewayDirectory,
        catalogues: CatalogueStore,
        changes: ChangeStore,
        activations: Activations,
        identity: GatewayReport,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.pools = {name: Pool(name, settings, clock=clock, on_wanted=self._want) for name, settings in pools.items()}
        self._pool_of_model: dict[str, Pool] = {}
        self._map_models()
        self._replicas = replicas
        self._gateways = gateways
        self._catalogues = catalogues
        self._changes = changes
        self._activations = activations
        self._identity = identity
        self._ready: dict[str, frozenset[tuple[str, tuple[str, ...]]]] = {}
        self._catalogue_until: dict[str, float] = {}
        self._wanted: set[str] = set()
        self._wanted_event = asyncio.Event()
        self.store_seen_at: float | None = None
        """Loop time of the last successful read of the store; None before the first."""
        # Loop time; None while the store is away or takes no writes. Nothing is known yet that it could have let lapse.
        self._store_well_since: float | None = -math.inf

    def pool_of(self, model: str) -> Pool:
        """The pool that serves ``model``.

        Raises:
            TidegateError: NOT_FOUND, in Triton's own words, when none does.
        """
        pool = self._pool_of_model.get(model)
        if pool is None:
            raise TidegateError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{model}' is not found")
        return pool

    async def run(self) -> None:
        """Follow membership, report load, ask for pools that are wanted; until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._report())
            group.create_task(self._ask())

    async def leave(self, *, draining: bool) -> None:
        """Tell everybody that this instance drains (``draining``) or is gone."""
        try:
            if draining:
                self._identity = self._identity.model_copy(update={"draining": True})
                await self._write_report()
            else:
                await self._gateways.leave(self._identity.instance)
        except TidegateError as error:
            log.warning("event=report-failed error=%r", error.message)

    # -- membership ---------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async for changed in self._replicas.changes(at_least_every_seconds=_REREAD_SECONDS):
            for pool in self.pools.values():
                if changed is None or changed == pool.name:
                    await self._reread(pool)

    async def refresh(self, pool: Pool) -> None:
        """Read a pool's replicas again now, because something is known to have changed."""
        await self._reread(pool)

    def _map_models(self) -> None:
        """Models by pool: those of the settings, and those that operators have loaded, or unloaded, elsewhere."""
        beyond = {
            model: pool
            for pool in self.pools.values()
            for models in (pool.loaded, pool.unloaded, *(lease.models for lease in pool.replicas))
            for model in models
        }
        of_settings = {model: pool for pool in self.pools.values() for model in pool.settings.model_names}
        self._pool_of_model = beyond | of_settings

    async def _reread(self, pool: Pool) -> None:
        """Read a pool's replicas. While the store is away the last known ones stay: inference survives it."""
        try:
            leases = await self._replicas.list(pool.name)
            changes = await self._changes.after(pool.name)
            pool.loaded, pool.unloaded = loaded(changes), unloaded(changes)
            pool.update([*leases, *self._not_believed_gone(pool, leases)])
            pool.refuse_unloaded()
            self._map_models()
            if pool.catalogue is None or self._may_be_new(pool):
                pool.catalogue = await self._catalogues.get(pool.name)
        except TidegateError as error:
            if self.store_seen_at is not None:
                log.warning("event=store-away pool=%s error=%r", pool.name, error.message)
            self.store_seen_at = None
            self._store_well_since = None
        else:
            self.store_seen_at = asyncio.get_running_loop().time()

    def _may_be_new(self, pool: Pool) -> bool:
        """Whether the pool's catalogue may have changed since it was read."""
        now = asyncio.get_running_loop().time()
        ready = frozenset((lease.id, lease.models) for lease in pool.replicas if lease.state is ReplicaState.READY)
        if ready - self._ready.get(pool.name, frozenset()):
            self._catalogue_until[pool.name] = now + _CATALOGUE_SECONDS
        self._ready[pool.name] = ready
        return now < self._catalogue_until.get(pool.name, -math.inf)

    def _not_believed_gone(self, pool: Pool, leases: list[ReplicaLease]) -> list[ReplicaLease]:
        """Ready replicas whose lease has lapsed, unless the store has been well for as long as a lease lasts.

        A store that takes no writes (its disk is full), or that was away, lets leases lapse whose owners are alive.
        A replica that leaves says so first, and one that cannot be reached is ejected anyway.
        """
        now = asyncio.get_running_loop().time()
        if self._store_well_since is not None and now - self._store_well_since >= pool.settings.replica.lease_seconds:
            return []
        there = {lease.id for lease in leases}
        return [lease for lease in pool.replicas if lease.id not in there and lease.state is ReplicaState.READY]

    # -- load report and activation -----------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            try:
                await self._write_report()
            except TidegateError as error:
                log.debug("event=report-failed error=%r", error.message)
            await asyncio.sleep(_REPORT_SECONDS)

    async def _write_report(self) -> None:
        loads = {name: pool.load() for name, pool in self.pools.items()}
        try:
            await self._gateways.report(self._identity.model_copy(update={"pools": loads}), _REPORT_LEASE_SECONDS)
        except TidegateError:
            self._store_well_since = None
            raise
        if self._store_well_since is None:
            self._store_well_since = asyncio.get_running_loop().time()

    def _want(self, pool: str) -> None:
        self._wanted.add(pool)
        self._wanted_event.set()

    async def _ask(self) -> None:
        """Ask for wanted pools at once, then again while requests are still held for them: an ask can get lost."""
        while True:
            await self._wanted_event.wait()
            self._wanted_event.clear()
            for name in sorted(self._wanted):
                self._wanted.discard(name)
                await self._activate(name)
            waiting = [name for name, pool in self.pools.items() if pool.held and not pool.has_ready_replica]
            if waiting:
                asyncio.get_running_loop().call_later(_REACTIVATE_SECONDS, self._want_again, waiting)

    def _want_again(self, names: list[str]) -> None:
        for name in names:
            if self.pools[name].held and not self.pools[name].has_ready_replica:
                self._want(name)

    async def _activate(self, name: str) -> None:
        try:
            # The report first: the tick that the poke causes shall already see the held request.
            await self._write_report()
            await self._activations.activate(name, _ACTIVATION_KEEP_SECONDS)
        except TidegateError as error:
            log.warning("event=activation-failed pool=%s error=%r", name, error.message)
