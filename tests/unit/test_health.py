"""Which replicas are left alone, for how long, and how they come back: pools in virtual time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.health import Doubt, is_silent
from gateway.routing.pool import Pool, RequestHead, Reservation
from tests.unit.test_pool import SEG, lease, make, taken, virtual
from wire.membership import ReplicaState


def on(pool: Pool, replica: str) -> Reservation:
    """A slot on a certain replica."""
    reservation = pool.try_reserve(RequestHead("segmenter", replica=replica))
    assert reservation is not None
    return reservation


def free(pool: Pool) -> dict[str, int]:
    """How many more requests each replica may have."""
    found = {"a": 0, "b": 0}
    got = []
    while (reservation := pool.try_reserve(SEG)) is not None:
        found[reservation.replica.id] += 1
        got.append(reservation)
    for reservation in got:
        reservation.release()
    return found


def two(**routing: int) -> Pool:
    pool, _ = make(**({"max_in_flight_per_replica": 8} | routing))
    pool.update([lease("a"), lease("b")])
    return pool


@virtual
async def test_three_losses_in_a_row_eject_a_replica_and_an_answer_between_them_does_not() -> None:
    pool = two()
    for _ in range(2):
        on(pool, "a").release_lost()
    on(pool, "a").release_answered()
    for _ in range(2):
        on(pool, "a").release_lost()
    assert free(pool) == {"a": 8, "b": 8}
    on(pool, "a").release_lost()
    assert free(pool) == {"a": 0, "b": 8}
    assert pool.health.ejected == 1


@virtual
async def test_after_an_ejection_one_probe_then_one_more_with_each_answer_then_all() -> None:
    pool = two()
    on(pool, "a").release_unreached()
    await asyncio.sleep(1.01)
    assert free(pool)["a"] == 1
    on(pool, "a").release_answered()
    assert free(pool)["a"] == 2
    for _ in range(6):
        on(pool, "a").release_answered()
    assert free(pool)["a"] == 8
    # Trusted again: one lost request is nothing, and the next ejection is a short one.
    on(pool, "a").release_lost()
    assert free(pool)["a"] == 8
    on(pool, "a").release_unreached()
    await asyncio.sleep(1.01)
    assert free(pool)["a"] == 1


@virtual
async def test_ejections_grow_while_probes_fail_and_never_last_longer_than_five_seconds() -> None:
    """A-035: a replica that comes back is back in rotation within ten seconds."""
    pool = two()
    on(pool, "a").release_unreached()
    for seconds in (1.0, 2.0, 4.0, 5.0, 5.0):
        await asyncio.sleep(seconds - 0.1)
        assert free(pool)["a"] == 0
        await asyncio.sleep(0.2)
        assert free(pool)["a"] == 1
        on(pool, "a").release_lost()


@virtual
async def test_the_last_replica_is_not_ejected_for_what_it_loses() -> None:
    pool = two()
    for name in ("a", "b"):
        for _ in range(9):
            on(pool, name).release_lost()
            if name == "a" and not free(pool)["a"]:
                break
    assert free(pool) == {"a": 0, "b": 8}


@virtual
async def test_the_last_replica_is_left_alone_for_a_second_when_nobody_gets_there() -> None:
    """Requests then wait in the gateway, instead of being sent to a closed port again and again."""
    pool, _ = make()
    pool.update([lease("a")])
    for _ in range(3):
        taken(pool).release_unreached()
        hold = pool.hold(SEG, since=asyncio.get_running_loop().time())
        await asyncio.sleep(0.9)
        assert not hold.future.done()
        await asyncio.sleep(0.2)
        hold.future.result().release()


@virtual
async def test_a_replica_that_has_other_models_is_no_other_replica() -> None:
    pool, _ = make()
    pool.update([lease("a"), lease("b", ReplicaState.READY, "classifier")])
    for _ in range(5):
        on(pool, "a").release_lost()
    assert pool.try_reserve(SEG) is not None


@virtual
async def test_when_only_ejected_replicas_are_left_they_are_tried() -> None:
    pool = two()
    for _ in range(3):
        on(pool, "a").release_lost()
    pool.update([lease("a")])
    assert free(pool) == {"a": 1, "b": 0}


@virtual
async def test_deadlines_that_pass_count_only_against_a_replica_that_is_mute() -> None:
    pool = two()
    for _ in range(5):
        on(pool, "a").release_overdue()
    assert free(pool)["a"] == 8
    stuck = [on(pool, "a") for _ in range(4)]
    await asyncio.sleep(1.5)
    for reservation in stuck:
        reservation.release_overdue()
    assert free(pool) == {"a": 0, "b": 8}


@virtual
async def test_short_deadlines_show_a_mute_replica_too() -> None:
    pool = two()
    passed = 0
    while (one := pool.try_reserve(RequestHead("segmenter", replica="a"))) is not None:
        await asyncio.sleep(0.2)
        one.release_overdue()
        passed += 1
    assert passed == 7


@virtual
async def test_a_silent_replica_gets_requests_only_when_no_other_has_a_slot() -> None:
    """A-035: before anybody's patience is at an end."""
    pool = two()
    for _ in range(20):
        each = [on(pool, "a"), on(pool, "b")]
        await asyncio.sleep(0.005)
        for one in each:
            one.release_answered()
    frozen = on(pool, "a")
    await asyncio.sleep(0.2)
    busy = [taken(pool) for _ in range(9)]
    assert [one.replica.id for one in busy] == ["b"] * 8 + ["a"]
    for one in busy:
        one.release()
    frozen.release_answered()
    assert sorted(taken(pool).replica.id for _ in range(4)) == ["a", "a", "b", "b"]


@virtual
async def test_a_stream_makes_no_replica_look_silent() -> None:
    pool = two()
    on(pool, "a").release_answered()
    stream = pool.try_reserve(RequestHead("segmenter", slotted=False, replica="a"))
    await asyncio.sleep(60)
    assert stream is not None
    assert not pool.health.any_silent


def test_silence_is_measured_by_what_is_usual() -> None:
    assert not is_silent(100.0, None)
    assert is_silent(0.11, 0.001)
    assert not is_silent(0.09, 0.001)
    assert not is_silent(15.0, 1.0)
    assert is_silent(21.0, 1.0)


@given(st.lists(st.sampled_from(["answer", "failure", "probe"]), max_size=80), st.integers(1, 20))
def test_doubt_never_allows_more_than_the_limit_and_ends_with_answers(story: list[str], limit: int) -> None:
    doubt = Doubt()
    for event in story:
        if event == "failure":
            if doubt.on_failure():
                assert 1.0 <= doubt.eject() <= 5.0
        elif event == "probe" and doubt.allowed == 0:
            doubt.allowed = 1
        elif event == "answer" and doubt.on_answer(limit):
            doubt = Doubt()
        assert doubt.allowed is None or 0 <= doubt.allowed < max(limit, 2)
    if doubt.allowed == 0:
        doubt.allowed = 1
    assert any(doubt.on_answer(limit) for _ in range(limit + 1))


@pytest.mark.parametrize("release", ["release", "release_answered", "release_unreached", "release_lost"])
@virtual
async def test_every_way_gives_the_slot_back_once(release: str) -> None:
    pool = two()
    one, other = on(pool, "a"), on(pool, "b")
    for _ in range(2):
        getattr(one, release)()
        one.release_overdue()
    assert pool.in_flight == 1
    other.release_answered()
    assert pool.in_flight == 0
