"""Queues against a real Valkey: claims, fencing, recovery, backlog, waiting."""

import asyncio

import pytest

from stores.job_claims import Claim, JobClaims
from stores.job_stream import JobStream
from stores.store import Store
from tests.valkey import RunningValkey
from wire.errors import ErrorKind, TidegateError
from wire.jobs import GROUP, Job, Outcome, OutcomeStatus, dead_letter_key, stream_key

QUEUE = "pages"
KEEP = 60.0


@pytest.fixture
def stream(store: Store) -> JobStream:
    return JobStream(store, QUEUE)


def _job(payload: bytes = b"page") -> Job:
    return Job(queue=QUEUE, payload=payload, name="a page", timeout_ms=60_000)


def _outcome(claim: Claim, **fields: object) -> Outcome:
    return Outcome.model_validate(
        {"job_id": claim.id, "queue": QUEUE, "status": OutcomeStatus.SUCCEEDED, "worker": claim.consumer} | fields
    )


async def _claim(claims: JobClaims, count: int = 1) -> list[Claim]:
    """The first read of an unused queue makes its group and returns nothing."""
    for _ in range(20):
        found = await claims.claim_new([QUEUE], count_each=count, wait_seconds=0.05)
        if found:
            return found
    raise AssertionError("no job was delivered")


async def _take(claims: JobClaims, *, stale: float = 0.0, count: int = 10) -> tuple[list[Claim], list[str]]:
    return await claims.take_over(QUEUE, count=count, stale_seconds=stale, keep_seconds=KEEP)


async def _pending(store: Store) -> list[dict[str, object]]:
    found = await store.redis.xpending_range(stream_key(store.prefix, QUEUE), GROUP, "-", "+", 100)
    return [dict(entry) for entry in found]


async def test_a_job_submitted_before_the_first_worker_is_delivered_and_finished(
    store: Store, stream: JobStream
) -> None:
    job_id = await stream.submit(_job())
    claims = JobClaims(store, "a")
    (claim,) = await _claim(claims)
    assert (claim.id, claim.deliveries, claim.fields[b"payload"]) == (job_id, 1, b"page")
    assert 0 <= claim.waited_seconds < 5
    assert await claims.finish(claim, _outcome(claim, result={"lines": 2}), KEEP)
    outcome = await stream.outcome(job_id)
    assert outcome is not None
    assert outcome.result == {"lines": 2}
    assert await store.redis.xlen(stream_key(store.prefix, QUEUE)) == 0
    assert await _pending(store) == []


async def test_a_submission_without_an_answer_is_told_and_not_sent_again(
    valkey: RunningValkey, store: Store, stream: JobStream
) -> None:
    """The store is frozen when the job comes: the caller is told within the limit; what was sent is there once."""
    await stream.submit(_job())
    hasty_store = Store.connect(valkey.settings.model_copy(update={"timeout_seconds": 0.3}), client_name="hasty")
    await hasty_store.ping()
    valkey.freeze()
    with pytest.raises(TidegateError) as unanswered:
        await JobStream(hasty_store, QUEUE).submit(_job())
    assert unanswered.value.kind is ErrorKind.STORE_UNAVAILABLE
    valkey.thaw()
    async with asyncio.timeout(5):
        while (await store.redis.xlen(stream_key(store.prefix, QUEUE))) < 2:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    assert (await store.redis.xlen(stream_key(store.prefix, QUEUE))) == 2
    await hasty_store.close()


async def test_outcomes_expire(store: Store, stream: JobStream) -> None:
    job_id = await stream.submit(_job())
    claims = JobClaims(store, "a")
    (claim,) = await _claim(claims)
    await claims.finish(claim, _outcome(claim), 0.05)
    await asyncio.sleep(0.1)
    assert await stream.outcome(job_id) is None


async def test_only_the_latest_delivery_may_finish(store: Store, stream: JobStream) -> None:
    """A worker that was taken for dead cannot overwrite the outcome of its successor, nor end its claim."""
    job_id = await stream.submit(_job())
    first, second = JobClaims(store, "a"), JobClaims(store, "b")
    (old,) = await _claim(first)
    ((new,), lost) = await _take(second)
    assert (new.id, new.deliveries, lost) == (job_id, 2, [])
    assert new.fields == old.fields
    assert not await first.finish(old, _outcome(old), KEEP)
    assert not await first.hand_back(old)
    assert not await first.dead_letter(old, _outcome(old), "no", KEEP)
    assert await first.renew(QUEUE, [old]) == {job_id}
    assert await stream.outcome(job_id) is None
    assert await second.finish(new, _outcome(new), KEEP)
    assert not await second.finish(new, _outcome(new), KEEP)


async def test_the_same_consumer_cannot_finish_an_older_delivery(store: Store, stream: JobStream) -> None:
    await stream.submit(_job())
    claims = JobClaims(store, "a")
    (old,) = await _claim(claims)
    ((new,), _) = await _take(claims)
    assert not await claims.finish(old, _outcome(old), KEEP)
    assert await claims.finish(new, _outcome(new), KEEP)


async def test_renewal_keeps_the_claim_and_the_delivery_number(store: Store, stream: JobStream) -> None:
    """A-078: a living worker keeps its claim, with the delivery counter at 1."""
    await stream.submit(_job())
    claims, other = JobClaims(store, "a"), JobClaims(store, "b")
    (claim,) = await _claim(claims)
    for _ in range(4):
        await asyncio.sleep(0.1)
        assert await claims.renew(QUEUE, [claim]) == set()
        assert await _take(other, stale=0.3) == ([], [])
    (entry,) = await _pending(store)
    assert (entry["consumer"], entry["times_delivered"]) == (b"a", 1)


async def test_a_handed_back_job_is_taken_at_once_and_costs_no_delivery(store: Store, stream: JobStream) -> None:
    job_id = await stream.submit(_job())
    first, second = JobClaims(store, "a"), JobClaims(store, "b")
    (claim,) = await _claim(first)
    assert await first.hand_back(claim)
    ((again,), _) = await _take(second, stale=3600)
    assert (again.id, again.deliveries, again.consumer) == (job_id, 1, "b")
    assert not await first.finish(claim, _outcome(claim), KEEP)
    assert await second.finish(again, _outcome(again), KEEP)


async def test_a_dead_letter_keeps_the_job_and_tells_the_producer(store: Store, stream: JobStream) -> None:
    """A-079: past the limit the job goes to a dead-letter place with its history."""
    job_id = await stream.submit(_job(b"poison"))
    claims = JobClaims(store, "a")
    await _claim(claims)
    ((claim,), _) = await _take(claims)
    failed = _outcome(claim, status=OutcomeStatus.FAILED, error="it kills workers", error_kind="poison", deliveries=2)
    assert await claims.dead_letter(claim, failed, "delivered 2 times", KEEP)
    ((_, letter),) = await store.redis.xrange(dead_letter_key(store.prefix, QUEUE))
    assert letter[b"payload"] == b"poison"
    assert (letter[b"job_id"].decode(), letter[b"deliveries"], letter[b"reason"]) == (
        job_id,
        b"2",
        b"delivered 2 times",
    )
    assert await stream.outcome(job_id) == failed
    backlog = await stream.backlog()
    assert backlog.backlog == 0


async def test_jobs_trimmed_while_pending_are_recorded_as_lost_once(store: Store, stream: JobStream) -> None:
    """A-046, A-075: pending entries without content are cleared and recorded; the others are delivered."""
    ids = [await stream.submit(_job()) for _ in range(3)]
    await _claim(JobClaims(store, "gone"), count=3)
    key = stream_key(store.prefix, QUEUE)
    await store.redis.xdel(key, ids[1])
    await store.redis.xtrim(key, minid=ids[1])
    claims = JobClaims(store, "b")
    taken, lost = await _take(claims)
    assert [claim.id for claim in taken] == ids[2:]
    assert lost == ids[:2]
    assert await _take(claims, stale=60) == ([], [])
    outcomes = await stream.wait(ids[:2], 1)
    assert {outcome.status for outcome in outcomes.values()} == {OutcomeStatus.LOST}
    assert [outcomes[job_id].job_id for job_id in ids[:2]] == ids[:2]
    assert await claims.finish(taken[0], _outcome(taken[0]), KEEP)
    assert await _pending(store) == []


async def test_a_job_trimmed_under_its_worker_still_gets_its_result(store: Store, stream: JobStream) -> None:
    job_id = await stream.submit(_job())
    claims = JobClaims(store, "a")
    (claim,) = await _claim(claims)
    await store.redis.xtrim(stream_key(store.prefix, QUEUE), maxlen=0)
    assert await claims.renew(QUEUE, [claim]) == set()
    assert (await _take(JobClaims(store, "b")))[1] == [job_id]
    assert await claims.finish(claim, _outcome(claim), KEEP)
    outcome = await stream.outcome(job_id)
    assert outcome is not None
    assert outcome.status is OutcomeStatus.SUCCEEDED


async def test_a_destroyed_group_loses_neither_the_running_nor_the_waiting_job(store: Store, stream: JobStream) -> None:
    """A-076: the running job's result is kept and it is not delivered again; the waiting one is delivered."""
    running = await stream.submit(_job())
    claims = JobClaims(store, "a")
    (claim,) = await _claim(claims)
    waiting = await stream.submit(_job())
    await store.redis.xgroup_destroy(stream_key(store.prefix, QUEUE), GROUP)
    assert await _take(claims) == ([], [])
    assert await claims.renew(QUEUE, [claim]) == set()
    assert await claims.finish(claim, _outcome(claim), KEEP)
    assert [found.id for found in await _claim(claims, count=5)] == [waiting]
    assert (await stream.outcome(running)) is not None


async def test_an_emptied_store_works_again_from_the_beginning(store: Store, stream: JobStream) -> None:
    """A-076: FLUSHALL takes the group away; it is made again, also under a blocked read."""
    claims = JobClaims(store, "a")
    await claims.claim_new([QUEUE], count_each=1, wait_seconds=0.01)
    reading = asyncio.create_task(claims.claim_new([QUEUE], count_each=1, wait_seconds=0.5))
    await asyncio.sleep(0.05)
    await store.redis.flushall()
    assert await reading == []
    ids = [await stream.submit(_job()) for _ in range(5)]
    assert [claim.id for claim in await _claim(claims, count=5)] == ids


async def test_one_read_serves_several_queues(store: Store) -> None:
    first, second = JobStream(store, "one"), JobStream(store, "two")
    claims = JobClaims(store, "a")
    await claims.claim_new(["one", "two"], count_each=1, wait_seconds=0.01)
    for _ in range(3):
        await first.submit(Job(queue="one", payload=b"1"))
    await second.submit(Job(queue="two", payload=b"2"))
    found = await claims.claim_new(["one", "two"], count_each=1, wait_seconds=0.1)
    assert sorted(claim.queue for claim in found) == ["one", "two"]


async def test_a_quiet_read_ends_before_the_connection_does(valkey: RunningValkey) -> None:
    """A-077: the wait stays below the connection's time limit, whatever is asked for."""
    settings = valkey.settings.model_copy(update={"timeout_seconds": 0.4})
    store = Store.connect(settings, client_name="quiet")
    claims = JobClaims(store, "a")
    for _ in range(3):
        assert await claims.claim_new([QUEUE], count_each=1, wait_seconds=30) == []
    await store.close()


async def test_the_backlog_counts_what_is_unfinished(store: Store, stream: JobStream) -> None:
    """A-044: finished jobs do not count, however many there were."""
    nothing = await stream.backlog()
    assert (nothing.lag, nothing.pending, nothing.backlog, nothing.consumers) == (0, 0, 0, 0)
    assert nothing.oldest_undelivered_seconds is None
    for _ in range(4):
        await stream.submit(_job())
    before = await stream.backlog()
    assert (before.lag, before.pending, before.oldest_pending_seconds) == (4, 0, None)
    claims = JobClaims(store, "a")
    held = await _claim(claims, count=3)
    await asyncio.sleep(0.1)
    seen = await stream.backlog()
    assert (seen.lag, seen.pending, seen.backlog, seen.consumers) == (1, 3, 4, 1)
    assert seen.oldest_undelivered_seconds is not None
    assert seen.oldest_pending_seconds is not None
    assert 0.1 <= seen.oldest_undelivered_seconds <= seen.oldest_pending_seconds < 10
    for claim in [*held, *await _claim(claims)]:
        assert await claims.finish(claim, _outcome(claim), KEEP)
    done = await stream.backlog()
    assert (done.lag, done.pending, done.oldest_undelivered_seconds, done.oldest_pending_seconds) == (0, 0, None, None)


async def test_an_unknown_lag_is_counted(store: Store, stream: JobStream) -> None:
    """Deleting an undelivered entry makes the server's lag unknown; unknown is not zero."""
    ids = [await stream.submit(_job()) for _ in range(5)]
    claims = JobClaims(store, "a")
    await _claim(claims, count=1)
    key = stream_key(store.prefix, QUEUE)
    await store.redis.xdel(key, ids[2])
    (group,) = await store.redis.xinfo_groups(key)
    assert group["lag"] is None
    assert (await stream.backlog()).lag == 3
    await store.redis.xtrim(key, maxlen=0)
    assert (await stream.backlog()).lag == 0


async def test_waiting_ends_with_the_last_outcome_without_asking(store: Store, stream: JobStream) -> None:
    ids = [await stream.submit(_job()) for _ in range(2)]
    claims = JobClaims(store, "a")
    held = await _claim(claims, count=2)
    await claims.finish(held[0], _outcome(held[0]), KEEP)
    waiting = asyncio.create_task(stream.wait(ids, 10))
    await asyncio.sleep(0.2)
    asked = (await store.redis.info("commandstats"))["cmdstat_mget"]["calls"]
    await asyncio.sleep(0.3)
    assert (await store.redis.info("commandstats"))["cmdstat_mget"]["calls"] == asked
    started = asyncio.get_running_loop().time()
    await claims.finish(held[1], _outcome(held[1]), KEEP)
    assert set(await waiting) == set(ids)
    assert asyncio.get_running_loop().time() - started < 0.2


async def test_waiting_for_what_never_comes_ends_at_the_limit(stream: JobStream) -> None:
    """A-085: a wait for a lost id ends, and not later than asked."""
    started = asyncio.get_running_loop().time()
    assert await stream.wait(["1-1"], 0.3) == {}
    assert asyncio.get_running_loop().time() - started < 1


async def test_waiting_survives_a_restart_of_the_store(valkey: RunningValkey, store: Store, stream: JobStream) -> None:
    job_id = await stream.submit(_job())
    claims = JobClaims(store, "a")
    (claim,) = await _claim(claims)
    waiting = asyncio.create_task(stream.wait([job_id], 20))
    await asyncio.sleep(0.1)
    await valkey.stop()
    with pytest.raises(TidegateError) as caught:
        await stream.backlog()
    assert caught.value.kind is ErrorKind.STORE_UNAVAILABLE
    await valkey.start()
    assert await claims.finish(claim, _outcome(claim), KEEP)
    assert set(await waiting) == {job_id}


async def test_names_of_dead_workers_are_forgotten_unless_they_hold_a_job(store: Store, stream: JobStream) -> None:
    idle, holder = JobClaims(store, "idle"), JobClaims(store, "holder")
    await stream.submit(_job())
    await _claim(holder)
    await idle.claim_new([QUEUE], count_each=1, wait_seconds=0.01)
    assert (await stream.backlog()).consumers == 2
    assert await holder.forget_consumers(QUEUE, 0) == 1
    assert (await stream.backlog()).consumers == 1
    assert len(await _pending(store)) == 1
