"""Real worker processes and a real Valkey; the handlers are of tests/handlers.py."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stores.job_stream import JobStream
from stores.store import Store
from tests.valkey import RunningValkey
from tests.worker_process import QUEUE, worker_process
from wire.jobs import GROUP, Job, Outcome, OutcomeStatus, dead_letter_key, stream_key


class Bench:
    """A queue, and workers for it."""

    def __init__(self, valkey: RunningValkey, store: Store, folder: Path) -> None:
        self.valkey = valkey
        self.store = store
        self.folder = folder
        self.log = folder / "log"
        self.stream = JobStream(store, QUEUE)

    def worker(self, **options: Any) -> Any:
        return worker_process(self.valkey.settings, self.log, **options)

    async def submit(self, payload: str, **fields: Any) -> str:
        return await self.stream.submit(Job(queue=QUEUE, payload=payload.encode(), **fields))

    async def outcome(self, job_id: str, limit: float = 15) -> Outcome:
        found = await self.stream.wait([job_id], limit)
        assert job_id in found, self.log.read_text()
        return found[job_id]

    async def run(self, payload: str, **fields: Any) -> Outcome:
        return await self.outcome(await self.submit(payload, **fields))

    async def is_claimed(self, count: int = 1) -> None:
        async with asyncio.timeout(10):
            while (await self.stream.backlog()).pending < count:
                await asyncio.sleep(0.02)

    async def worker_connections(self) -> set[str]:
        clients = await self.store.redis.client_list()
        return {client["id"] for client in clients if client["name"] == "worker"}

    def lines(self, *levels: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(levels)]


@pytest.fixture
async def bench(valkey: RunningValkey, store: Store, tmp_path: Path) -> AsyncIterator[Bench]:
    yield Bench(valkey, store, tmp_path)


async def test_every_way_a_job_can_end(bench: Bench) -> None:
    """Acceptance: bad input gets one clear sentence, and the worker goes on."""
    async with bench.worker() as process:
        done = await bench.run("echo hello")
        assert (done.status, done.deliveries) == (OutcomeStatus.SUCCEEDED, 1)
        assert done.result is not None
        assert done.result["echo"] == "hello"
        assert (await bench.run("cpu")).result == {"sum": 6}
        bad = await bench.run("bad")
        assert (bad.status, bad.error_kind, bad.error) == (OutcomeStatus.FAILED, "bad_input", "this is not a page")
        for payload, kind in (("fail", "internal"), ("timeout", "internal"), ("not-json", "internal")):
            failed = await bench.run(payload)
            assert (failed.status, failed.error_kind) == (OutcomeStatus.FAILED, kind)
            assert "/" not in (failed.error or "")
        late = await bench.run("sleep 30", timeout_ms=300)
        assert (late.status, late.error_kind) == (OutcomeStatus.FAILED, "deadline")
        expired = await bench.run("sleep 30", timeout_ms=0)
        assert expired.error_kind == "deadline"
        key = stream_key(bench.store.prefix, QUEUE)
        strange = (await bench.store.redis.xadd(key, {"schema": "9", "payload": "x"})).decode()
        unread = await bench.outcome(strange)
        assert "schema version '9'" in (unread.error or "")
        assert await bench.store.redis.xlen(dead_letter_key(bench.store.prefix, QUEUE)) == 1
        assert (await bench.run("echo still here")).status is OutcomeStatus.SUCCEEDED
        backlog = await bench.stream.backlog()
        assert (backlog.lag, backlog.pending) == (0, 0)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0


async def test_what_is_no_page_gets_one_clear_sentence(bench: Bench) -> None:
    """Acceptance 7: broken image, empty file; the gateway is not even asked."""
    async with bench.worker(handler="workers.handlers.segcls:handle"):
        image = Path("deployments/vision/samples/text.png").read_bytes()
        for payload, words in ((b"", "empty"), (b"text", "known format"), (image[:9000], "broken")):
            job_id = await bench.stream.submit(Job(queue=QUEUE, payload=payload))
            outcome = await bench.outcome(job_id)
            assert (outcome.status, outcome.error_kind) == (OutcomeStatus.FAILED, "bad_input")
            assert words in (outcome.error or "")


async def test_the_payload_limit_holds_for_a_plain_xadd(bench: Bench) -> None:
    """Producers in other languages ask nobody; the worker does not hand the job to its handler."""
    async with bench.worker(payload_limit_bytes=10):
        job_id = (
            await bench.store.redis.xadd(
                stream_key(bench.store.prefix, QUEUE), {"schema": "1", "payload": "echo 123456"}
            )
        ).decode()
        outcome = await bench.outcome(job_id)
        assert (outcome.status, outcome.error_kind) == (OutcomeStatus.FAILED, "bad_input")
        told = "the payload has 11 bytes, and queue work takes at most 10 (payload_limit_bytes)"
        assert outcome.error == told
        assert (await bench.run("echo 12345")).status is OutcomeStatus.SUCCEEDED


async def test_a_handler_that_does_not_exist_is_named_at_the_start(bench: Bench) -> None:
    async with bench.worker(handler="workers.handlers.nowhere:handle") as process:
        assert await asyncio.wait_for(process.wait(), 10) == 1
    assert "workers.handlers.nowhere" in bench.log.read_text()


async def test_an_idle_worker_picks_a_job_up_at_once_and_keeps_its_connections(bench: Bench) -> None:
    """A-077: under 0.2 s on a quiet queue, no error line, no new connection."""
    async with bench.worker(queues=[QUEUE, "other", "third"]):
        await bench.run("echo warm-up")
        before = await bench.worker_connections()
        await asyncio.sleep(3)
        loop = asyncio.get_running_loop()
        for _ in range(3):
            started = loop.time()
            await bench.run("echo now")
            assert loop.time() - started < 0.2
        assert before - await bench.worker_connections() == set()
        assert bench.lines("ERROR", "WARNING") == []


async def test_many_queues_share_few_places(bench: Bench) -> None:
    names = [f"q{number}" for number in range(5)]
    streams = {name: JobStream(bench.store, name) for name in names}
    async with bench.worker(queues=names, concurrency=2):
        ids = {
            name: [await stream.submit(Job(queue=name, payload=b"sleep 0.02")) for _ in range(5)]
            for name, stream in streams.items()
        }
        for name, stream in streams.items():
            assert len(await stream.wait(ids[name], 15)) == 5


async def test_another_worker_finishes_the_job_of_a_killed_one(bench: Bench) -> None:
    """A-073: by a worker that runs, or one that is started later; two deliveries, nothing pending."""
    mark = bench.folder / "mark"
    job_id = await bench.submit(f"mark-and-sleep {mark} 1.5")
    async with bench.worker(claim_seconds=1) as first:
        await bench.is_claimed()
        first.kill()
        await first.wait()
    async with bench.worker(claim_seconds=1) as second:
        outcome = await bench.outcome(job_id)
        assert outcome.result == {"pid": second.pid}
    assert outcome.deliveries == 2
    assert len(mark.read_text().splitlines()) == 2
    assert (await bench.stream.backlog()).backlog == 0


async def test_long_jobs_keep_their_claim_even_when_they_hold_the_event_loop(bench: Bench) -> None:
    """A-078, A-080: executed once, delivered once, with other workers waiting for stale claims."""
    mark = bench.folder / "mark"
    async with bench.worker(claim_seconds=1, concurrency=1) as first:
        holding = await bench.submit("hold-the-loop 3")
        await bench.is_claimed()
        async with bench.worker(claim_seconds=1), bench.worker(claim_seconds=1):
            sleeping = await bench.submit(f"mark-and-sleep {mark} 3")
            outcomes = await bench.stream.wait([holding, sleeping], 15)
    assert {outcome.deliveries for outcome in outcomes.values()} == {1}
    assert outcomes[holding].result == {"pid": first.pid}
    assert len(mark.read_text().splitlines()) == 1


async def test_a_job_that_kills_its_worker_becomes_a_dead_letter_and_harms_no_other(bench: Bench) -> None:
    """A-079: at most 3 deliveries, then a dead letter with its reason; the good ones are done."""
    good = [await bench.submit(f"echo {number}") for number in range(10)]
    bad = await bench.submit("crash")
    good += [await bench.submit(f"sleep 0.{number}") for number in range(10)]
    stop = asyncio.Event()

    async def supervise() -> int:
        starts = 0
        while not stop.is_set():
            starts += 1
            async with bench.worker(claim_seconds=1) as process:
                ended = asyncio.create_task(process.wait())
                await asyncio.wait(
                    {ended, stopped := asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED
                )
                stopped.cancel()
                if ended.done():
                    continue
                process.terminate()
                await ended
        return starts

    supervisor = asyncio.create_task(supervise())
    try:
        outcomes = await bench.stream.wait([*good, bad], 40)
    finally:
        stop.set()
        starts = await supervisor
    assert len(outcomes) == 21, bench.log.read_text()
    assert outcomes[bad].error_kind == "poison"
    assert all(outcomes[job_id].status is OutcomeStatus.SUCCEEDED for job_id in good)
    ((_, letter),) = await bench.store.redis.xrange(dead_letter_key(bench.store.prefix, QUEUE))
    assert b"delivered 3 times" in letter[b"reason"]
    assert starts == 4


async def test_a_leaving_worker_finishes_what_it_can_and_hands_back_the_rest(bench: Bench) -> None:
    async with bench.worker(drain_limit_seconds=1.5, claim_seconds=60) as first:
        short = await bench.submit("sleep 1.0")
        long = await bench.submit("sleep 3.0")
        await bench.is_claimed(2)
        first.terminate()
        assert await asyncio.wait_for(first.wait(), 6) == 0
        later = await bench.submit("echo later")
    outcome = await bench.outcome(short, 0.5)
    assert outcome.status is OutcomeStatus.SUCCEEDED
    async with bench.worker(claim_seconds=60) as second:
        outcome = await bench.outcome(long)
        assert (outcome.result, outcome.deliveries) == ({"pid": second.pid}, 1)
        assert (await bench.outcome(later)).status is OutcomeStatus.SUCCEEDED


async def test_a_second_signal_hands_back_at_once(bench: Bench) -> None:
    async with bench.worker(drain_limit_seconds=60, claim_seconds=60) as process:
        await bench.submit("sleep 30")
        await bench.is_claimed()
        process.terminate()
        await asyncio.sleep(0.3)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 4) == 1
    (entry,) = await bench.store.redis.xpending_range(stream_key(bench.store.prefix, QUEUE), GROUP, "-", "+", 5)
    assert (entry["consumer"], entry["times_delivered"]) == (b"handed-back", 0)


async def test_a_worker_goes_on_by_itself_after_restarts_of_the_store(bench: Bench) -> None:
    """A-082: once, several times in a row; the job that was running keeps its result; few log lines."""
    async with bench.worker(claim_seconds=5):
        await bench.run("echo before")
        running = await bench.submit("sleep 1")
        await bench.is_claimed()
        await bench.valkey.stop()
        await asyncio.sleep(2)
        await bench.valkey.start()
        assert (await bench.outcome(running)).status is OutcomeStatus.SUCCEEDED
        assert (await bench.run("echo once")).status is OutcomeStatus.SUCCEEDED
        for _ in range(3):
            await bench.valkey.kill()
            await bench.valkey.start()
            await asyncio.sleep(0.2)
        assert (await bench.run("echo again")).status is OutcomeStatus.SUCCEEDED
    assert len(bench.lines("ERROR", "WARNING")) < 10


async def test_a_frozen_store_stops_nothing_for_good(bench: Bench) -> None:
    async with bench.worker(claim_seconds=5):
        await bench.run("echo before")
        bench.valkey.freeze()
        await asyncio.sleep(3)
        bench.valkey.thaw()
        assert (await bench.run("echo after")).status is OutcomeStatus.SUCCEEDED


async def test_an_emptied_store_is_used_again(bench: Bench) -> None:
    """A-076: FLUSHALL under an idle worker, then jobs; XGROUP DESTROY while jobs run."""
    key = stream_key(bench.store.prefix, QUEUE)
    mark = bench.folder / "mark"
    async with bench.worker():
        await bench.run("echo before")
        await bench.store.redis.flushall()
        ids = [await bench.submit("echo after") for _ in range(5)]
        assert len(await bench.stream.wait(ids, 10)) == 5
        running = await bench.submit(f"mark-and-sleep {mark} 1.5")
        await bench.is_claimed()
        await bench.store.redis.xgroup_destroy(key, GROUP)
        next_id = await bench.submit("echo next")
        outcomes = await bench.stream.wait([running, next_id], 10)
        assert {outcome.status for outcome in outcomes.values()} == {OutcomeStatus.SUCCEEDED}
        assert len(outcomes) == 2
        assert len(mark.read_text().splitlines()) == 1
        assert (await bench.stream.backlog()).backlog == 0
    assert len(bench.lines("ERROR", "WARNING")) < 20


async def test_trimmed_pending_jobs_are_recorded_and_no_demand(bench: Bench) -> None:
    """A-046, A-075: read by a throw-away consumer, trimmed; recorded as lost, pending 0, no traceback."""
    key = stream_key(bench.store.prefix, QUEUE)
    ids = [await bench.submit("echo gone") for _ in range(3)]
    kept = await bench.submit("echo kept")
    await bench.store.redis.xgroup_create(key, GROUP, id="0")
    await bench.store.redis.xreadgroup(GROUP, "throw-away", {key: ">"})
    await bench.store.redis.xtrim(key, minid=kept)
    async with bench.worker(claim_seconds=1):
        outcomes = await bench.stream.wait([*ids, kept], 10)
        assert [outcomes[job_id].status for job_id in ids] == [OutcomeStatus.LOST] * 3
        assert outcomes[kept].status is OutcomeStatus.SUCCEEDED
        assert (await bench.stream.backlog()).backlog == 0
    assert "Traceback" not in bench.log.read_text()
