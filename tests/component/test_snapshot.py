"""The snapshot of the system, read from a real store: what nobody reports is unknown, not zero."""

import pytest

from stores.job_stream import JobStream
from stores.membership import GatewayDirectory, ReplicaDirectory
from stores.scaling import DecisionLog
from stores.settings import StoreSettings
from stores.snapshot import connected_names, read_snapshot
from stores.store import Store
from tests.e2e.system import free_ports
from wire.decisions import DecisionRecord, Reason
from wire.errors import ErrorKind, TidegateError
from wire.jobs import Job
from wire.membership import GatewayReport, PoolLoad, ReplicaLease, ReplicaState


async def test_an_empty_store_knows_nothing(store: Store) -> None:
    snapshot = await read_snapshot(store, ["vision"], ["scan"])
    (pool,) = snapshot.pools
    assert (pool.target, pool.decision, pool.load, pool.replicas, pool.states) == (None, None, None, (), {})
    assert snapshot.queues[0].backlog == 0  # a queue that was never used has nothing unfinished
    assert snapshot.gateways == ()
    assert snapshot.at > 1e9


async def test_everything_that_is_reported_is_there(store: Store) -> None:
    replicas, gateways = ReplicaDirectory(store), GatewayDirectory(store)
    for number, state in enumerate((ReplicaState.READY, ReplicaState.READY, ReplicaState.WARMING)):
        lease = ReplicaLease(id=f"r{number}", pool="vision", state=state, started_at=float(number))
        await replicas.renew(lease, 10, announce=False)
    for name, idle in (("a", 3.0), ("b", None)):
        load = PoolLoad(held_job=2, in_flight_interactive=1, in_flight_by_replica={"r0": 1}, idle_seconds=idle)
        report = GatewayReport(instance=name, http_address="h", grpc_address="g", pools={"vision": load})
        await gateways.report(report, 10)
    decision = DecisionRecord(
        pool="vision",
        at=1.0,
        target=3,
        previous_target=2,
        reason=Reason.DEMAND,
        explanation="3: demand",
        demand=None,
        backlog=None,
        interactive=4,
        replicas={"ready": 2},
    )
    await DecisionLog(store).record(decision, changed=True, keep_seconds=10)
    await JobStream(store, "scan").submit(Job("scan", b"page"))

    snapshot = await read_snapshot(store, ["vision", "other"], ["scan"])
    vision, other = snapshot.pools
    assert [lease.id for lease in vision.replicas] == ["r0", "r1", "r2"]
    assert vision.states == {"ready": 2, "warming": 1}
    assert vision.target == 3
    assert vision.load == PoolLoad(
        held_job=4, in_flight_interactive=2, in_flight_by_replica={"r0": 2}, idle_seconds=3.0
    )
    assert (other.target, other.load) == (None, None)
    assert snapshot.queues[0].backlog == 1
    assert {report.instance for report in snapshot.gateways} == {"a", "b"}


async def test_processes_are_seen_by_the_names_of_their_connections(store: Store) -> None:
    await store.ping()
    names = await connected_names(store)
    assert names is not None
    assert any(name for name in names)


async def test_a_store_that_is_away_is_an_error_of_ours() -> None:
    away = Store.connect(StoreSettings(embedded_port=free_ports(1)[0], timeout_seconds=1), client_name="t")
    with pytest.raises(TidegateError) as raised:
        await read_snapshot(away, ["vision"], [])
    assert raised.value.kind is ErrorKind.STORE_UNAVAILABLE
    await away.close()
