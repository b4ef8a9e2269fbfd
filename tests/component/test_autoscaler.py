"""The autoscaler with a real store and real processes as replicas."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from autoscaler.backends.local import LocalBackend
from autoscaler.backends.processes import ReplicaProcess, find_replicas
from autoscaler.loop import Autoscaler
from autoscaler.settings import AutoscalerSettings
from stores.job_stream import JobStream
from stores.membership import GatewayDirectory
from stores.scaling import Activations, DecisionLog
from stores.store import Store
from tests.stub_autoscaler import POOLS, QUEUES, stub_command
from tests.valkey import RunningValkey
from wire.decisions import Reason, decisions_key
from wire.errors import TidegateError
from wire.jobs import GROUP, Job, stream_key
from wire.membership import GatewayReport, PoolLoad


class Site:
    """One installation: its store, its replica processes, and a gateway that reports while the block lasts."""

    def __init__(self, valkey: RunningValkey, store: Store, folder: Path) -> None:
        self.valkey = valkey
        self.store = store
        self.folder = folder
        self.config = folder / "tidegate.yaml"
        self.load = PoolLoad()
        self.log = DecisionLog(store)
        self.jobs = JobStream(store, "pages")

    def backend(self, **stub: float | str) -> LocalBackend:
        command = stub_command(self.valkey.port, **stub)  # type: ignore[arg-type]
        return LocalBackend(config=self.config, run_dir=self.folder, command=command)

    def replicas(self, **stub: float | str) -> list[ReplicaProcess]:
        return find_replicas(stub_command(self.valkey.port, **stub), self.config)  # type: ignore[arg-type]

    @asynccontextmanager
    async def autoscaler(self, poll: float = 0.3, token: str = "one", **stub: float | str) -> AsyncIterator[None]:
        """An autoscaler in this process; its replicas are killed at the end."""
        store = Store.connect(self.valkey.settings, client_name=token)
        settings = AutoscalerSettings(poll_seconds=poll, leader_lease_seconds=1.0)
        backend = self.backend(**stub)
        stop = asyncio.Event()
        running = asyncio.create_task(Autoscaler(settings, POOLS, QUEUES, store, backend, token).run(stop))
        try:
            yield
        finally:
            stop.set()
            await running
            for process in self.replicas(**stub):
                os.kill(process.pid, signal.SIGKILL)
            while await backend.running("vision"):
                await asyncio.sleep(0.02)
            await store.close()

    @asynccontextmanager
    async def process(self, poll: float = 0.3) -> AsyncIterator[asyncio.subprocess.Process]:
        """An autoscaler as a process of its own; its replicas are left to the test."""
        argv = ["-m", "tests.stub_autoscaler", str(self.valkey.port), str(self.config), str(self.folder), str(poll)]
        process = await asyncio.create_subprocess_exec(sys.executable, *argv)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def submit(self, count: int) -> None:
        for _ in range(count):
            await self.jobs.submit(Job("pages", b"x"))

    async def finish_all(self) -> None:
        await self.store.redis.delete(stream_key(self.store.prefix, "pages"))

    async def target(self) -> int | None:
        decision = await self.log.latest("vision")
        return None if decision is None else decision.target


async def eventually(condition: Callable[[], object], limit: float = 10.0) -> None:
    async with asyncio.timeout(limit):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return
            await asyncio.sleep(0.02)


@pytest.fixture
async def site(valkey: RunningValkey, store: Store, tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(valkey, store, tmp_path)
    own = Store.connect(valkey.settings, client_name="gateway")

    async def report() -> None:
        while True:
            with suppress(TidegateError):  # the store comes and goes
                await GatewayDirectory(own).report(
                    GatewayReport(instance="g1", http_address="a:1", grpc_address="a:2", pools={"vision": made.load}),
                    3.0,
                )
            await asyncio.sleep(0.1)

    reporting = asyncio.create_task(report())
    try:
        yield made
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        await own.close()
        for process in made.replicas():
            os.kill(process.pid, signal.SIGKILL)


async def test_one_poke_is_one_start_within_a_second(site: Site) -> None:
    """A-040 with a poll of 15 s, A-041: 50 callers at once start one replica."""
    activations = Activations(site.store)
    async with site.autoscaler(poll=15):
        await eventually(lambda: _is(site.target(), 0))
        asked_at = time.monotonic()
        await asyncio.gather(*(activations.activate("vision", 30) for _ in range(50)))
        await eventually(site.replicas, limit=1.0)
        assert time.monotonic() - asked_at < 1.0
        await asyncio.sleep(1.5)
        assert len(site.replicas()) == 1
        history = await site.log.history("vision", 10)
        assert history[0].reason in (Reason.ACTIVATION, Reason.RETAIN)
        assert Reason.ACTIVATION in [record.reason for record in history]


async def test_up_with_the_backlog_and_down_to_zero(site: Site) -> None:
    """A-043, A-046, A-047: one job wakes the pool, more bring more, and an empty queue brings it to zero."""
    async with site.autoscaler():
        await site.submit(1)
        await eventually(lambda: len(site.replicas()) == 1, limit=2)
        await site.submit(24)
        await eventually(lambda: len(site.replicas()) == 3, limit=2)
        decision = await site.log.latest("vision")
        assert decision is not None
        assert (decision.demand, decision.backlog, decision.interactive) == (25, 25, 0)
        await site.finish_all()
        await eventually(lambda: not site.replicas())
        reasons = [record.reason for record in await site.log.history("vision", 20)]
        assert reasons[0] is Reason.IDLE
        assert reasons.count(Reason.DEMAND) == 2


async def test_an_activation_is_cleared_when_a_replica_is_ready(site: Site) -> None:
    activations = Activations(site.store)
    async with site.autoscaler(ready_after=0.8):
        await activations.activate("vision", 60)
        await eventually(lambda: site.replicas(ready_after=0.8), limit=2)
        assert await activations.is_active("vision")
        await eventually(lambda: _is(activations.is_active("vision"), False))


async def test_a_killed_autoscaler_is_replaced_and_nothing_is_doubled(site: Site) -> None:
    """The replicas outlive it; its successor finds them, starts none, and brings them to zero in the end."""
    await site.submit(25)
    async with site.process() as first:
        await eventually(lambda: len(site.replicas()) == 3)
        first.kill()
    before = {process.pid for process in site.replicas()}
    assert len(before) == 3
    async with site.process() as second:
        # The dead one's leadership has to expire first.
        await eventually(lambda: _decided_after(site, before_now=0.0), limit=5)
        await asyncio.sleep(1.0)
        assert {process.pid for process in site.replicas()} == before
        await site.finish_all()
        await eventually(lambda: not site.replicas())
        second.terminate()
        assert await second.wait() == 0


async def test_sigterm_leaves_the_replicas_and_the_leadership(site: Site) -> None:
    await site.submit(15)
    async with site.process() as first:
        await eventually(lambda: len(site.replicas()) == 2)
        first.terminate()
        assert await first.wait() == 0
    assert len(site.replicas()) == 2
    assert await site.store.redis.get(site.store.key("autoscaler", "leader")) is None
    assert await site.backend().stop_all(limit_seconds=10) == []


async def test_only_one_of_two_acts(site: Site) -> None:
    async with site.autoscaler(token="one"), site.autoscaler(token="two"):
        await site.submit(25)
        await eventually(lambda: len(site.replicas()) == 3)
        await asyncio.sleep(1.0)
        assert len(site.replicas()) == 3


async def test_failing_starts_back_off_and_say_why(site: Site) -> None:
    async with site.autoscaler(poll=0.2, how="fails"):
        await site.submit(1)
        await asyncio.sleep(4.5)
        logs = list((site.folder / "logs").iterdir())
        assert 2 <= len(logs) <= 4, "tries at about 0, 1, 3 s"
        said = "starts failed (exit status 3: no such model: segmenter), next try in"
        await eventually(lambda: _explains(site, said))


async def test_a_store_that_is_away_shrinks_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A-051: frozen, then killed; the count stays, one complaint, and normal decisions soon after it is back."""
    async with site.autoscaler():
        await site.submit(25)
        await eventually(lambda: len(site.replicas()) == 3)
        before = {process.pid for process in site.replicas()}
        await asyncio.sleep(0.5)
        site.valkey.freeze()
        await asyncio.sleep(3.5)
        await site.valkey.kill()
        await asyncio.sleep(1.5)
        assert {process.pid for process in site.replicas()} == before
        assert sum("nothing is scaled" in record.message for record in caplog.records) == 1
        await site.valkey.start()
        back_at = await site.store.now()
        await eventually(lambda: _decided_after(site, before_now=back_at), limit=3)
        assert {process.pid for process in site.replicas()} == before
        await site.finish_all()
        await eventually(lambda: not site.replicas())


async def test_an_unreadable_queue_shrinks_nothing(site: Site) -> None:
    async with site.autoscaler():
        await site.submit(15)
        await eventually(lambda: len(site.replicas()) == 2)
        key = stream_key(site.store.prefix, "pages")
        await site.store.redis.delete(key)
        await site.store.redis.set(key, "not a stream")
        await asyncio.sleep(2.5)
        decision = await site.log.latest("vision")
        assert decision is not None
        assert (decision.target, decision.reason, decision.demand) == (2, Reason.UNKNOWN_SIGNAL, None)
        assert "backlog of pages" in decision.explanation
        assert len(site.replicas()) == 2


async def test_a_claimed_job_keeps_the_pool(site: Site) -> None:
    """A-050: lag is 0, one is claimed and never finished."""
    async with site.autoscaler():
        await site.submit(1)
        key = stream_key(site.store.prefix, "pages")
        await site.store.redis.xgroup_create(key, GROUP, id="0")
        await site.store.redis.xreadgroup(GROUP, "somebody", {key: ">"})
        await eventually(site.replicas)
        await asyncio.sleep(2.5)
        assert len(site.replicas()) == 1


async def test_a_busy_gateway_keeps_the_pool_and_an_idle_one_lets_it_go(site: Site) -> None:
    site.load = PoolLoad(in_flight_interactive=1, requests_total=1, idle_seconds=0.0)
    async with site.autoscaler():
        await eventually(site.replicas)
        await asyncio.sleep(2.0)
        assert len(site.replicas()) == 1
        site.load = PoolLoad(requests_total=1, idle_seconds=5.0)
        await eventually(lambda: not site.replicas())


async def _is(value: Awaitable[object], wanted: object) -> bool:
    return await value == wanted


async def _explains(site: Site, words: str) -> bool:
    decision = await site.log.latest("vision")
    return decision is not None and words in decision.explanation


async def _decided_after(site: Site, *, before_now: float) -> bool:
    decision = await site.log.latest("vision")
    return decision is not None and decision.at > before_now


async def test_a_broken_record_stops_neither_the_loop_nor_the_pool(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that cannot be read starts anew; a key of the wrong kind is logged, and it goes on when that is gone."""
    await site.store.redis.set(site.store.key("pool", "vision", "memory"), "{")
    key = decisions_key(site.store.prefix, "vision")
    await site.store.redis.set(key, "not a stream")
    async with site.autoscaler():
        await eventually(lambda: "the tick of pool vision failed" in caplog.text)
        await site.store.redis.delete(key)
        await site.submit(1)
        await eventually(site.replicas)
    assert "the memory of pool vision cannot be read" in caplog.text
