"""A pool's slots and held requests, in virtual time."""

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.routing.pool import Hold, Pool, RequestHead, Reservation
from tests.virtual_time import run_in_virtual_time
from wire.errors import ErrorKind, TidegateError
from wire.membership import ReplicaLease, ReplicaState
from wire.pools import ModelSettings, PoolSettings, RoutingSettings

SEG = RequestHead("segmenter")
CLS = RequestHead("classifier")


def virtual(story: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in virtual time."""

    @functools.wraps(story)
    def test(*args: Any, **kwargs: Any) -> None:
        run_in_virtual_time(story(*args, **kwargs))  # type: ignore[arg-type]

    return test


def make(**routing: Any) -> tuple[Pool, list[str]]:
    wanted: list[str] = []
    settings = PoolSettings(
        models=(ModelSettings(name="segmenter"), ModelSettings(name="classifier")), routing=RoutingSettings(**routing)
    )
    return Pool("vision", settings, clock=asyncio.get_running_loop().time, on_wanted=wanted.append), wanted


def lease(name: str = "a", state: ReplicaState = ReplicaState.READY, *models: str, **more: Any) -> ReplicaLease:
    return ReplicaLease(id=name, pool="vision", state=state, models=models or ("segmenter", "classifier"), **more)


def taken(pool: Pool, head: RequestHead = SEG) -> Reservation:
    reservation = pool.try_reserve(head)
    assert reservation is not None
    return reservation


def granted(hold: Hold) -> str | None:
    """Name of the replica that a held request got, or None while it waits."""
    return hold.future.result().replica.id if hold.future.done() else None


def error_of(hold: Hold) -> TidegateError:
    error = hold.future.exception()
    assert isinstance(error, TidegateError)
    return error


# -- slots ------------------------------------------------------------------------------------------------


@virtual
async def test_requests_spread_over_ready_replicas_that_have_the_model() -> None:
    pool, _ = make(max_in_flight_per_replica=2)
    pool.update([lease("a"), lease("b", ReplicaState.READY, "segmenter"), lease("c", ReplicaState.WARMING)])
    assert sorted(taken(pool).replica.id for _ in range(4)) == ["a", "a", "b", "b"]
    assert pool.try_reserve(SEG) is None
    assert pool.try_reserve(CLS) is None
    assert pool.in_flight == 4
    assert pool.load().in_flight_by_replica == {"a": 2, "b": 2}


@virtual
async def test_a_slot_comes_back_once_however_often_it_is_released() -> None:
    pool, _ = make(max_in_flight_per_replica=1)
    pool.update([lease()])
    first = taken(pool)
    first.release()
    second = taken(pool)
    first.release()
    assert pool.in_flight == 1
    with second:
        pass
    second.release_abandoned()
    second.release_unreached()
    assert pool.in_flight == 0


@virtual
async def test_a_replica_whose_lease_lapsed_for_a_moment_has_not_more_slots_than_before() -> None:
    pool, _ = make(max_in_flight_per_replica=1)
    pool.update([lease()])
    running = taken(pool)
    pool.update([])
    assert pool.load().in_flight_by_replica == {"a": 1}
    pool.update([lease()])
    assert pool.try_reserve(SEG) is None
    running.release()
    assert pool.try_reserve(SEG) is not None


@virtual
async def test_an_unreached_replica_is_left_alone_for_a_second() -> None:
    pool, _ = make()
    pool.update([lease("a"), lease("b")])
    first = taken(pool)
    gone = first.replica.id
    first.release_unreached()
    others = [taken(pool) for _ in range(3)]
    assert gone not in {other.replica.id for other in others}
    await asyncio.sleep(1.1)
    assert taken(pool).replica.id == gone


# -- holding ----------------------------------------------------------------------------------------------


@virtual
async def test_at_zero_a_request_is_held_asks_for_the_pool_and_goes_when_a_replica_is_ready() -> None:
    pool, wanted = make()
    hold = pool.hold(SEG)
    assert wanted == ["vision"]
    assert pool.load().held_interactive == 1
    await asyncio.sleep(10)
    pool.update([lease(state=ReplicaState.WARMING)])
    assert granted(hold) is None
    pool.update([lease()])
    assert granted(hold) == "a"
    assert hold.future.result().held_seconds == pytest.approx(10)
    assert (pool.held, pool.in_flight) == (0, 1)


@virtual
async def test_held_requests_go_oldest_first_and_one_model_does_not_stop_the_other() -> None:
    pool, _ = make(max_in_flight_per_replica=2)
    holds = [pool.hold(head) for head in (CLS, SEG, SEG, SEG)]
    pool.update([lease("a", ReplicaState.READY, "segmenter")])
    assert [granted(hold) for hold in holds] == [None, "a", "a", None]
    holds[1].future.result().release()
    assert [granted(hold) for hold in holds[2:]] == ["a", "a"]
    pool.update([lease("a", ReplicaState.READY, "segmenter"), lease("b", ReplicaState.READY, "classifier")])
    assert granted(holds[0]) == "b"


@virtual
async def test_across_models_the_oldest_gets_a_shared_slot() -> None:
    pool, _ = make(max_in_flight_per_replica=1)
    pool.update([lease()])
    running = taken(pool)
    first = pool.hold(CLS)
    await asyncio.sleep(1)
    second = pool.hold(SEG)
    running.release()
    assert (granted(first), granted(second)) == ("a", None)


@virtual
async def test_a_request_that_reached_no_replica_keeps_its_place_and_its_hold_limit() -> None:
    pool, _ = make(hold_limit_seconds=5, hold_limit_requests=1)
    later = pool.hold(SEG)
    await asyncio.sleep(1)
    again = pool.hold(SEG, since=-0.5)
    assert pool.load().requests_total == 1
    await asyncio.sleep(3.6)
    assert error_of(again).kind is ErrorKind.NO_REPLICA
    assert not later.future.done()
    again = pool.hold(SEG, since=-0.25)
    pool.update([lease()])
    assert again.future.done()
    again.future.result().release()
    assert granted(later) == "a"


@virtual
async def test_the_hold_limit_ends_in_no_replica_with_a_believable_retry_after() -> None:
    pool, _ = make(hold_limit_seconds=3)
    pool.update([lease(started_at=100.0, ready_at=107.5)])
    pool.update([])
    hold = pool.hold(SEG)
    await asyncio.sleep(3.01)
    error = error_of(hold)
    assert (error.kind, error.retry_after_seconds) == (ErrorKind.NO_REPLICA, 7.5)
    assert "no replica of pool 'vision' is ready; retry in 8 s" in error.message
    assert pool.held == 0


@virtual
async def test_a_retry_never_comes_after_the_replica_has_gone_idle_again() -> None:
    """A-039: with holding off, the caller's next try is all there is to keep the replica."""
    for delay, cold_start, announced in ((10.0, None, 10.0), (30.0, None, 15.0), (10.0, 7.5, 7.5), (0.0, 7.5, 1.0)):
        settings = make()[0].settings
        scaling = settings.scaling.model_copy(update={"scale_to_zero_delay_seconds": delay})
        settings = settings.model_copy(update={"scaling": scaling})
        pool = Pool("vision", settings, clock=asyncio.get_running_loop().time, on_wanted=lambda _: None)
        if cold_start is not None:
            pool.update([lease(started_at=100.0, ready_at=100.0 + cold_start)])
        assert pool.retry_after_seconds == announced


@virtual
async def test_callers_are_told_why_the_last_replica_failed() -> None:
    pool, _ = make(hold_limit_seconds=3)
    reason = "the model file of 'segmenter' is missing: no such file: /srv/models/segmenter/1/model.onnx"
    pool.update([lease(state=ReplicaState.FAILED, reason=reason)])
    pool.update([])
    hold = pool.hold(SEG)
    await asyncio.sleep(3.01)
    assert error_of(hold).message == (
        "no replica of pool 'vision' is ready (the last one that started failed: the model file of 'segmenter' is "
        "missing: no such file: model.onnx); retry in 15 s"
    )
    hold = pool.hold(SEG)
    pool.update([lease(ready_at=7.0)])
    pool.update([])
    hold = pool.hold(CLS)
    await asyncio.sleep(3.01)
    assert "failed" not in error_of(hold).message


@virtual
async def test_an_old_failure_is_forgotten() -> None:
    pool, _ = make(hold_limit_seconds=3)
    pool.update([lease(state=ReplicaState.FAILED, reason="no memory")])
    pool.update([])
    await asyncio.sleep(301)
    hold = pool.hold(SEG)
    await asyncio.sleep(3.01)
    assert "no memory" not in error_of(hold).message


@virtual
async def test_a_deadline_before_the_hold_limit_ends_in_deadline() -> None:
    pool, _ = make()
    now = asyncio.get_running_loop().time()
    hold = pool.hold(RequestHead("segmenter", deadline=now + 2))
    await asyncio.sleep(2.01)
    assert error_of(hold).kind is ErrorKind.DEADLINE
    with pytest.raises(TidegateError) as caught:
        pool.hold(RequestHead("segmenter", deadline=now + 1))
    assert caught.value.kind is ErrorKind.DEADLINE


@virtual
async def test_too_many_held_requests_are_refused() -> None:
    pool, _ = make(hold_limit_requests=2)
    holds = [pool.hold(SEG), pool.hold(CLS)]
    with pytest.raises(TidegateError) as caught:
        pool.hold(SEG)
    assert caught.value.kind is ErrorKind.HOLD_LIMIT
    assert caught.value.retry_after_seconds is not None
    holds[0].cancel()
    pool.hold(SEG)


@virtual
async def test_each_class_waits_within_a_bound_of_its_own() -> None:
    pool, _ = make(hold_limit_requests=1, batch_hold_limit_requests=2)
    for batch, limit in ((True, 2), (False, 1)):
        head = RequestHead("segmenter", batch=batch)
        for _ in range(limit):
            pool.hold(head)
        with pytest.raises(
            TidegateError, match=f"holds {limit} requests of class {'batch' if batch else 'interactive'}"
        ):
            pool.hold(head)
        assert pool.held_of(batch=batch) == limit


@virtual
async def test_the_classes_share_slots_that_come_free() -> None:
    pool, _ = make(max_in_flight_per_replica=1, interactive_weight=2.0)
    pool.update([lease()])
    running = taken(pool)
    holds = [pool.hold(RequestHead("segmenter", batch=n < 30)) for n in range(60)]
    order: list[bool] = []
    for _ in range(30):
        running.release()
        (granted_now,) = [hold for hold in holds if hold.future.done()]
        holds.remove(granted_now)
        order.append(granted_now.head.batch)
        running = granted_now.future.result()
    assert order.count(False) == 20


@virtual
async def test_a_tenant_over_its_quota_is_told_when_to_come_back_and_others_are_served() -> None:
    pool, _ = make(tenants={"a": {"requests_per_second": 0.25}})
    pool.update([lease()])
    head = RequestHead("segmenter", tenant="a")
    taken(pool, head).release()
    assert pool.try_reserve(head) is None
    with pytest.raises(
        TidegateError, match=r"tenant 'a' has used up its quota of pool 'vision'; retry in 4 s"
    ) as caught:
        pool.hold(head)
    assert (caught.value.kind, caught.value.retry_after_seconds) == (ErrorKind.QUOTA, 4.0)
    assert (caught.value.row.http, caught.value.row.grpc) == (429, 8)
    taken(pool).release()
    await asyncio.sleep(4)
    taken(pool, head).release_unreached()
    # One that comes again because its replica was not there has been counted.
    assert pool.hold(head, since=3.9) is not None


@virtual
async def test_a_held_request_counts_once_against_its_quota() -> None:
    pool, wanted = make(tenants={"a": {"requests_per_second": 2}})
    head = RequestHead("segmenter", tenant="a")
    holds = []
    for _ in range(2):
        assert pool.try_reserve(head) is None
        holds.append(pool.hold(head))
    before = pool.load()
    await asyncio.sleep(0.1)
    with pytest.raises(TidegateError):
        pool.hold(head)
    assert (len(wanted), pool.load()) == (2, before)  # a refusal wakes nothing, and keeps nothing awake
    pool.update([lease()])
    assert [granted(hold) for hold in holds] == ["a", "a"]


@virtual
async def test_tenants_that_wait_take_turns_by_weight() -> None:
    pool, _ = make(max_in_flight_per_replica=1, tenants={"a": {"weight": 3}, "b": {}})
    pool.update([lease()])
    running = taken(pool)
    holds = [pool.hold(RequestHead("segmenter", tenant="a" if n < 40 else "b")) for n in range(80)]
    order = []
    for _ in range(20):
        running.release()
        (now,) = [hold for hold in holds if hold.future.done()]
        holds.remove(now)
        order.append(now.head.tenant)
        running = now.future.result()
    assert order.count("a") == 15


@virtual
async def test_retry_after_is_how_long_the_queue_takes_to_get_through() -> None:
    """A-022: believable. Two requests a second are served and ten wait."""
    pool, _ = make(max_in_flight_per_replica=1, hold_limit_requests=10)
    pool.update([lease()])
    running = taken(pool)
    holds = [pool.hold(SEG) for _ in range(10)]
    for _ in range(40):
        await asyncio.sleep(0.5)
        running.release()
        (now,) = [hold for hold in holds if hold.future.done()]
        holds.remove(now)
        running = now.future.result()
        holds.append(pool.hold(SEG))
    with pytest.raises(TidegateError) as caught:
        pool.hold(SEG)
    assert caught.value.retry_after_seconds == pytest.approx(5.0, rel=0.1)
    pool.update([])
    with pytest.raises(TidegateError) as caught:
        pool.hold(SEG)
    assert caught.value.retry_after_seconds == pool.retry_after_seconds


@virtual
async def test_without_holding_a_request_is_refused_and_still_asks_for_the_pool() -> None:
    pool, wanted = make(hold_limit_seconds=0)
    with pytest.raises(TidegateError) as caught:
        pool.hold(SEG)
    assert caught.value.kind is ErrorKind.NO_REPLICA
    assert wanted == ["vision"]


@virtual
async def test_cancelling_in_the_instant_of_the_grant_gives_the_slot_back() -> None:
    pool, _ = make(max_in_flight_per_replica=1)
    hold = pool.hold(SEG)
    pool.update([lease()])
    hold.cancel()
    hold.cancel()
    assert (pool.held, pool.in_flight) == (0, 0)


@virtual
async def test_a_hold_whose_future_was_cancelled_takes_no_slot_with_it() -> None:
    pool, _ = make(max_in_flight_per_replica=1)
    hold, other = pool.hold(SEG), pool.hold(SEG)
    hold.future.cancel()
    pool.update([lease()])
    await asyncio.sleep(0)
    assert granted(other) == "a"
    assert (pool.held, pool.in_flight) == (0, 1)


@virtual
async def test_after_a_hang_up_held_requests_wait_a_moment_for_the_slot_and_new_ones_do_not() -> None:
    pool, _ = make(max_in_flight_per_replica=1)
    pool.update([lease()])
    abandoned = taken(pool)
    hold = pool.hold(SEG)
    abandoned.release_abandoned()
    assert (granted(hold), pool.in_flight) == (None, 0)
    await asyncio.sleep(0.2)
    assert granted(hold) == "a"


@virtual
async def test_reserve_waits_and_gives_everything_back_when_it_is_cancelled() -> None:
    pool, _ = make(max_in_flight_per_replica=1)
    waiting = asyncio.create_task(pool.reserve(SEG))
    await asyncio.sleep(0)
    assert pool.held == 1
    pool.update([lease()])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (pool.held, pool.in_flight) == (0, 0)
    with await pool.reserve(SEG):
        assert pool.in_flight == 1


@virtual
async def test_jobs_and_interactive_requests_are_counted_apart() -> None:
    pool, _ = make(max_in_flight_per_replica=1)
    pool.update([lease()])
    running = taken(pool, RequestHead("segmenter", job=True))
    holds = [pool.hold(RequestHead("segmenter", job=job)) for job in (True, False, True)]
    load = pool.load()
    assert (load.held_job, load.held_interactive, load.in_flight_job, load.in_flight_interactive) == (2, 1, 1, 0)
    holds[2].cancel()
    running.release()
    load = pool.load()
    assert (load.held_job, load.held_interactive, load.in_flight_job, load.in_flight_interactive) == (0, 1, 1, 0)
    assert load.requests_total == 4


@virtual
async def test_idle_seconds_are_unknown_before_the_first_request_and_zero_while_one_runs() -> None:
    pool, _ = make()
    pool.update([lease()])
    assert pool.load().idle_seconds is None
    running = taken(pool)
    await asyncio.sleep(5)
    assert pool.load().idle_seconds == 0.0
    running.release()
    await asyncio.sleep(7)
    assert pool.load().idle_seconds == pytest.approx(7)


@virtual
async def test_listeners_hear_of_every_update() -> None:
    pool, _ = make()
    heard: list[int] = []

    def listener(changed: Pool) -> None:
        heard.append(len(changed.replicas))

    pool.subscribe(listener)
    pool.update([lease("a")])
    pool.update([lease("a"), lease("b", ReplicaState.DRAINING)])
    pool.unsubscribe(listener)
    pool.update([])
    assert heard == [1, 2]


class Chaos:
    """Random arrivals, ends, hang-ups and changes of membership."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pool, _ = make(max_in_flight_per_replica=3, hold_limit_requests=20, hold_limit_seconds=50)
        self.running: list[Reservation] = []
        self.holds: list[Hold] = []

    async def step(self) -> None:
        chance = self.chance
        match chance.randrange(6):
            case 0 | 1:
                self.arrive(RequestHead(chance.choice(("segmenter", "classifier", None)), job=chance.random() < 0.5))
            case 2 if self.running:
                ending = self.running.pop(chance.randrange(len(self.running)))
                chance.choice((ending.release, ending.release_abandoned, ending.release_unreached))()
            case 3 if self.holds:
                self.holds.pop(chance.randrange(len(self.holds))).cancel()
            case 4:
                states = (ReplicaState.READY, ReplicaState.READY, ReplicaState.DRAINING)
                names = chance.sample("abc", chance.randrange(4))
                self.pool.update(lease(name, chance.choice(states)) for name in names)
            case _:
                await asyncio.sleep(chance.choice((0, 0.01, 1.5)))
        self.collect()

    def arrive(self, head: RequestHead) -> None:
        reservation = self.pool.try_reserve(head)
        if reservation is not None:
            self.running.append(reservation)
            return
        try:
            self.holds.append(self.pool.hold(head))
        except TidegateError as error:
            assert error.kind is ErrorKind.HOLD_LIMIT

    def collect(self) -> None:
        for hold in [hold for hold in self.holds if hold.future.done()]:
            self.holds.remove(hold)
            if hold.future.exception() is None:
                self.running.append(hold.future.result())

    def check(self) -> None:
        load = self.pool.load()
        assert (self.pool.in_flight, self.pool.held) == (len(self.running), len(self.holds))
        assert sum(load.in_flight_by_replica.values()) == len(self.running)
        assert all(count <= 3 for count in load.in_flight_by_replica.values())


@pytest.mark.parametrize("seed", range(20))
@virtual
async def test_whatever_happens_slots_are_counted_right_and_nobody_starves(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(400):
        await chaos.step()
        chaos.check()
    chaos.pool.update([lease("z")])
    while chaos.holds or chaos.running:
        for reservation in chaos.running:
            reservation.release()
        chaos.running.clear()
        waiting = len(chaos.holds)
        await asyncio.sleep(2)
        chaos.collect()
        assert len(chaos.holds) < waiting or not waiting
    chaos.check()


@virtual
async def test_requests_held_for_an_unloaded_model_do_not_wait_for_it() -> None:
    """In Triton's words; those for other models wait on."""
    pool, _ = make()
    pool.update([lease("a", ReplicaState.READY, "classifier")])
    gone, stays = pool.hold(SEG), pool.hold(RequestHead("other"))
    pool.unloaded = frozenset(("segmenter",))
    pool.refuse_unloaded()
    error = error_of(gone)
    assert error.kind is ErrorKind.NOT_FOUND
    assert error.message == "Request for unknown model: 'segmenter' has no available versions"
    assert not stays.future.done()
    stays.cancel()
    assert pool.who_answers_for("segmenter") is None
    pool.update([lease("a", ReplicaState.READY, "segmenter")])
    assert pool.who_answers_for("segmenter") == "segmenter"
    pool.update([])
    with pytest.raises(TidegateError, match="no available versions"):
        pool.who_answers_for("segmenter")
