"""Read everything a decision needs. A read that fails makes its signal unknown (None), never zero."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from autoscaler.backends.base import RunningReplica, ScalerBackend
from autoscaler.decision.observation import Observation, SeenGateway, SeenQueue, SeenReplica
from stores.job_stream import JobStream
from stores.membership import GatewayDirectory, ReplicaDirectory
from stores.scaling import Activations
from stores.store import Store
from wire.membership import GatewayReport, PoolLoad, ReplicaLease, ReplicaState
from wire.queues import QueueSettings

T = TypeVar("T")

#: A read that takes longer has failed: the loop keeps its period. Unit: seconds.
_READ_LIMIT_SECONDS = 3.0

_logger = logging.getLogger(__name__)


class Observer:
    """Reads the state of pools through the stores and the backend."""

    def __init__(self, store: Store, queues: Mapping[str, QueueSettings], backend: ScalerBackend) -> None:
        self._backend = backend
        self._replicas = ReplicaDirectory(store)
        self._gateways = GatewayDirectory(store)
        self._activations = Activations(store)
        self._streams = {name: JobStream(store, name) for name in queues}
        self._pools = {name: queue.pools for name, queue in queues.items()}
        self._failing: set[str] = set()

    async def observe(self, pool: str, *, starting: tuple[str, ...], stopping: tuple[str, ...]) -> Observation:
        """What can be seen of ``pool`` now. Never raises for a source that cannot be read.

        ``starting`` and ``stopping`` are ids from the pool's memory: replicas whose ending is of interest, and
        replicas that drain even if their lease does not say so yet.
        """
        names = [name for name, pools in self._pools.items() if pool in pools]
        queues, gateways, leases, activation, running = await asyncio.gather(
            asyncio.gather(*(self._queue(name) for name in names)),
            self._read("load of the gateways", self._gateways.list),
            self._read(f"leases of {pool}", lambda: self._replicas.list(pool)),
            self._read(f"activation of {pool}", lambda: self._activations.is_active(pool)),
            self._read(f"running replicas of {pool}", lambda: self._backend.running(pool)),
        )
        replicas = None if running is None else _join(running, leases, gateways, pool, stopping)
        return Observation(
            queues=tuple(queues),
            gateways=None
            if gateways is None
            else tuple(
                SeenGateway(report.instance, report.draining, report.pools.get(pool, PoolLoad())) for report in gateways
            ),
            activation=activation,
            replicas=replicas,
            endings=() if running is None else await self._endings(starting, running),
        )

    async def _queue(self, name: str) -> SeenQueue:
        backlog = await self._read(f"backlog of {name}", self._streams[name].backlog)
        if backlog is None:
            return SeenQueue(name, lag=None, pending=None)
        ages = (backlog.oldest_undelivered_seconds, backlog.oldest_pending_seconds)
        return SeenQueue(
            name,
            lag=backlog.lag,
            pending=backlog.pending,
            oldest_seconds=max((age for age in ages if age is not None), default=None),
        )

    async def _endings(self, starting: tuple[str, ...], running: list[RunningReplica]) -> tuple[tuple[str, str], ...]:
        living = {replica.id for replica in running}
        endings = [(name, await self._backend.ending(name)) for name in starting if name not in living]
        return tuple((name, words) for name, words in endings if words is not None)

    async def _read(self, what: str, read: Callable[[], Awaitable[T]]) -> T | None:
        """The value read, or None; the first of a row of failures is logged, and the end of the row."""
        try:
            async with asyncio.timeout(_READ_LIMIT_SECONDS):
                value = await read()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a read, its signal is unknown
            if what not in self._failing:
                self._failing.add(what)
                _logger.warning("cannot read the %s: %s", what, error or "no answer in time")
            return None
        if what in self._failing:
            self._failing.discard(what)
            _logger.info("the %s can be read again", what)
        return value


def _join(
    running: list[RunningReplica],
    leases: list[ReplicaLease] | None,
    gateways: list[GatewayReport] | None,
    pool: str,
    stopping: tuple[str, ...],
) -> tuple[SeenReplica, ...]:
    """What runs, with what it says of itself and what is in flight on it.

    A lease without a running replica is a dead one's, or another backend's: it is no capacity of ours. A running
    replica without a lease has not come to it yet.
    """
    by_id = {lease.id: lease for lease in leases or ()}
    seen = []
    for replica in running:
        lease = by_id.get(replica.id)
        state: ReplicaState | None
        if replica.stopping or replica.id in stopping:
            state = ReplicaState.DRAINING
        elif lease is not None:
            state = lease.state
        else:
            state = None if leases is None else ReplicaState.STARTING
        seen.append(
            SeenReplica(
                id=replica.id,
                state=state,
                age_seconds=replica.age_seconds,
                ready_at=None if lease is None else lease.ready_at,
                in_flight=None if gateways is None else _in_flight(replica.id, gateways, pool),
                reason=None if lease is None else lease.reason,
            )
        )
    return tuple(seen)


def _in_flight(replica_id: str, gateways: list[GatewayReport], pool: str) -> int:
    loads = [report.pools[pool] for report in gateways if pool in report.pools]
    return sum(load.in_flight_by_replica.get(replica_id, 0) for load in loads)
