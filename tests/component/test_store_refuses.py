"""A store that answers reads and refuses writes: told as what it is, and inference goes on."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.routing.pool import RequestHead
from gateway.routing.router import Router
from stores.changes import ChangeStore
from stores.job_stream import JobStream
from stores.membership import CatalogueStore, GatewayDirectory, ReplicaDirectory
from stores.scaling import Activations
from stores.settings import StoreSettings
from stores.store import Store
from tests.valkey import RunningValkey
from wire.errors import ErrorKind, TidegateError
from wire.jobs import Job
from wire.membership import GatewayReport, ReplicaLease, ReplicaState
from wire.pools import ModelSettings, PoolSettings, ReplicaSettings

LEASE_SECONDS = 1.0
READY = ReplicaLease(
    id="r1",
    pool="vision",
    state=ReplicaState.READY,
    http_address="127.0.0.1:1",
    grpc_address="127.0.0.1:2",
    models=("m",),
)


async def refuse_writes(store: Store, *, refuse: bool) -> None:
    """As a full disk does; here for want of a replica, which a test can switch on and off."""
    await store.redis.config_set("min-replicas-to-write", "1" if refuse else "0")


@pytest_asyncio.fixture
async def router(store: Store) -> AsyncIterator[Router]:
    pool = PoolSettings(models=(ModelSettings(name="m"),), replica=ReplicaSettings(lease_seconds=LEASE_SECONDS))
    router = Router(
        {"vision": pool},
        replicas=ReplicaDirectory(store),
        gateways=GatewayDirectory(store),
        changes=ChangeStore(store),
        catalogues=CatalogueStore(store),
        activations=Activations(store),
        identity=GatewayReport(instance="g", http_address="", grpc_address=""),
    )
    running = asyncio.create_task(router.run())
    yield router
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _until_ready(router: Router, *, ready: bool, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while router.pools["vision"].has_ready_replica is not ready:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("setting", "value"), [("min-replicas-to-write", "1"), ("maxmemory", "1")], ids=["no replica", "no memory"]
)
async def test_a_refused_write_is_told_as_the_stores_state(store: Store, setting: str, value: str) -> None:
    """A-084: not as a fault of the call."""
    await store.redis.config_set(setting, value)
    with pytest.raises(TidegateError) as refused:
        await JobStream(store, "q").submit(Job("q", b"x"))
    assert refused.value.kind is ErrorKind.STORE_UNAVAILABLE
    with pytest.raises(TidegateError) as refused:
        await ReplicaDirectory(store).renew(READY, LEASE_SECONDS, announce=True)
    assert refused.value.kind is ErrorKind.STORE_UNAVAILABLE


async def test_a_password_that_is_wrong_or_missing_is_told_as_that(valkey: RunningValkey, store: Store) -> None:
    """Not as a store that does not answer; the password is not in it."""
    await store.redis.config_set("requirepass", "right")
    for user, words in ((":hunter2@", "refuses the user or password"), ("", "wants a password: set it in store.url")):
        settings = StoreSettings.model_validate({"url": f"redis://{user}127.0.0.1:{valkey.port}/0"})
        other = Store.connect(settings, client_name="test")
        with pytest.raises(TidegateError, match=f"the store {words}") as refused:
            await other.ping()
        assert "hunter2" not in refused.value.message
        await other.close()
    await store.redis.config_set("requirepass", "")


async def test_a_store_that_hangs_is_told_with_the_limit_and_within_it(valkey: RunningValkey, store: Store) -> None:
    await store.ping()
    settings = valkey.settings.model_copy(update={"timeout_seconds": 0.5})
    fresh = Store.connect(settings, client_name="test")
    valkey.freeze()
    try:
        began = asyncio.get_running_loop().time()
        with pytest.raises(TidegateError, match=r"^the store does not answer within 0\.5 s$"):
            await fresh.ping()
        assert asyncio.get_running_loop().time() - began < 0.9
        with pytest.raises(TidegateError, match=r"^the store does not answer within 2 s$"):
            await store.ping()
    finally:
        valkey.thaw()
        await fresh.close()


async def test_replicas_stay_while_their_leases_cannot_be_renewed(store: Store, router: Router) -> None:
    """Leases lapse, since no replica can write; requests are routed on. Once writes work again, silence counts."""
    await ReplicaDirectory(store).renew(READY, LEASE_SECONDS, announce=True)
    await _until_ready(router, ready=True, seconds=3)
    await refuse_writes(store, refuse=True)
    for _ in range(30):
        await asyncio.sleep(0.1)
        reservation = router.pools["vision"].try_reserve(RequestHead("m"))
        assert reservation is not None
        reservation.release()
    assert await ReplicaDirectory(store).list("vision") == []
    await refuse_writes(store, refuse=False)
    await _until_ready(router, ready=False, seconds=LEASE_SECONDS + 4)


async def test_a_replica_that_falls_silent_is_gone_while_the_store_is_well(store: Store, router: Router) -> None:
    await asyncio.sleep(LEASE_SECONDS + 0.6)
    await ReplicaDirectory(store).renew(READY, LEASE_SECONDS, announce=True)
    await _until_ready(router, ready=True, seconds=3)
    await _until_ready(router, ready=False, seconds=LEASE_SECONDS + 3)
