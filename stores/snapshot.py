"""The whole system as the store knows it at one moment: for ``tidegate status``, the control API and the dashboard."""

from collections.abc import Iterable

from redis.exceptions import ResponseError

from stores.job_stream import JobStream
from stores.membership import GatewayDirectory, ReplicaDirectory
from stores.scaling import DecisionLog
from stores.store import Store
from wire.decisions import DecisionRecord
from wire.jobs import QueueBacklog
from wire.membership import GatewayReport, PoolLoad, Record, ReplicaLease


class PoolSnapshot(Record):
    """One pool. What nobody reports is None: unknown, not zero."""

    name: str
    replicas: tuple[ReplicaLease, ...]
    """Living leases, oldest first."""
    decision: DecisionRecord | None
    """The autoscaler's last tick; None when no autoscaler ticked lately."""
    load: PoolLoad | None
    """Sum over all gateway instances; None when none reports."""

    @property
    def target(self) -> int | None:
        """Replicas wanted; None when nobody decides."""
        return None if self.decision is None else self.decision.target

    @property
    def states(self) -> dict[str, int]:
        """Replicas by state; states that no replica is in are left out."""
        counts: dict[str, int] = {}
        for lease in self.replicas:
            counts[lease.state.value] = counts.get(lease.state.value, 0) + 1
        return counts


class Snapshot(Record):
    """Everything the store knows, read within moments (not in one transaction: it is for people)."""

    at: float
    """Unix seconds by the store's clock."""
    pools: tuple[PoolSnapshot, ...]
    queues: tuple[QueueBacklog, ...]
    gateways: tuple[GatewayReport, ...]


async def read_snapshot(store: Store, pools: Iterable[str], queues: Iterable[str]) -> Snapshot:
    """Read the state of these pools and queues.

    Raises:
        TidegateError: STORE_UNAVAILABLE.
    """
    replicas, decisions = ReplicaDirectory(store), DecisionLog(store)
    gateways = await GatewayDirectory(store).list()
    return Snapshot(
        at=await store.now(),
        pools=tuple(
            [
                PoolSnapshot(
                    name=pool,
                    replicas=tuple(await replicas.list(pool)),
                    decision=await decisions.latest(pool),
                    load=_total_load([report.pools[pool] for report in gateways if pool in report.pools]),
                )
                for pool in pools
            ]
        ),
        queues=tuple([await JobStream(store, queue).backlog() for queue in queues]),
        gateways=tuple(gateways),
    )


async def connected_names(store: Store) -> frozenset[str] | None:
    """Names of the connections the store has now; a process that uses the store has one under its own name.

    None where the store does not tell (a user without the right to ask)."""
    try:
        with store.errors():
            clients = await store.redis.client_list()
    except ResponseError:
        return None
    return frozenset(str(client["name"]) for client in clients)


def _total_load(loads: list[PoolLoad]) -> PoolLoad | None:
    """The sum of several instances' loads; the shortest idleness is the pool's."""
    if not loads:
        return None
    on_replica: dict[str, int] = {}
    for load in loads:
        for replica, count in load.in_flight_by_replica.items():
            on_replica[replica] = on_replica.get(replica, 0) + count
    return PoolLoad(
        held_interactive=sum(load.held_interactive for load in loads),
        held_job=sum(load.held_job for load in loads),
        in_flight_interactive=sum(load.in_flight_interactive for load in loads),
        in_flight_job=sum(load.in_flight_job for load in loads),
        in_flight_by_replica=on_replica,
        requests_total=sum(load.requests_total for load in loads),
        idle_seconds=min((load.idle_seconds for load in loads if load.idle_seconds is not None), default=None),
    )
