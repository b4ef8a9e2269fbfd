"""How many slots a model has, and which replica gets the next request."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.policy import Policy, pack, spread
from gateway.routing.slots import AHEAD_SECONDS, UNLIMITED, ModelSlots, Slots, slots_for, widths
from wire.membership import ReplicaLease, ReplicaState

BATCHED: dict[str, Any] = {"max_batch_size": 32, "dynamic_batching": {}, "instance_group": [{"count": 2}]}


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (BATCHED, 64),
        ({**BATCHED, "instance_group": [{"count": 2, "kind": "KIND_GPU", "gpus": [0, 1, 2]}]}, 192),
        ({**BATCHED, "instance_group": [{"count": 1}, {"count": 3}, {"count": 5, "passive": True}]}, 128),
        ({**BATCHED, "instance_group": []}, 32),
        ({"max_batch_size": 32, "instance_group": [{"count": 2}]}, 2),
        ({"max_batch_size": 0, "dynamic_batching": {}}, 1),
        ({}, 1),
    ],
)
def test_a_model_executes_a_batch_per_instance_and_one_request_without_a_batcher(
    config: dict[str, Any], width: int
) -> None:
    assert widths({"m": config}) == {"m": width}


def test_sequences_and_decoupled_models_have_no_slots_of_their_own() -> None:
    """Requests of a sequence wait in Triton for each other, and a decoupled model may take all and answer later."""
    assert widths({"s": {"sequence_batching": {}}, "d": {"model_transaction_policy": {"decoupled": True}}}) == {}
    assert widths({"m": {"model_transaction_policy": {"decoupled": False}}}) == {"m": 1}


def test_an_ensemble_has_the_slots_of_its_steps_if_all_are_known() -> None:
    ensemble = {"ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}]}}
    assert widths({"a": BATCHED, "b": {}, "e": ensemble}) == {"a": 64, "b": 1, "e": 65}
    assert widths({"a": BATCHED, "e": ensemble}) == {"a": 64}


def test_the_depth_factor_is_rounded_up() -> None:
    assert [slots_for(width, 1.5) for width in (1, 2, 32)] == [2, 3, 48]


def test_a_fast_model_gets_more_slots_while_others_wait_and_a_slow_one_does_not() -> None:
    fast, slow = place(base=2), place(base=2)
    for tick in range(500):
        fast.on_awaited_release(tick * 0.0005)
        slow.on_awaited_release(tick * 0.5)
    assert fast.limit == pytest.approx(AHEAD_SECONDS / 0.0005, abs=1)
    assert slow.limit == 2


def test_the_first_answer_after_a_quiet_time_says_nothing_of_speed() -> None:
    calm = place(base=2)
    calm.on_awaited_release(0.0)
    calm.released_at = None
    calm.on_awaited_release(1000.0)
    calm.on_awaited_release(1000.0005)
    assert calm.limit == pytest.approx(AHEAD_SECONDS / 0.0005, abs=1)


def test_another_config_starts_anew() -> None:
    changed = place(base=2)
    for tick in range(100):
        changed.on_awaited_release(tick * 0.0005)
    changed.resize(1, 2)
    assert changed.limit > 2
    changed.resize(4, 8)
    assert (changed.width, changed.limit) == (4, 8)


def test_the_configs_of_the_shipped_pool_are_as_triton_tells_them() -> None:
    """Triton answers with JSON what config.pbtxt says; this is the part of it that is read here."""
    said = json.loads(
        '{"name":"classifier","max_batch_size":32,"dynamic_batching":{"preferred_batch_size":[],"preserve_ordering":false,'
        '"max_queue_delay_microseconds":2000},"instance_group":[{"name":"classifier","kind":"KIND_CPU","count":1,"gpus":[],'
        '"passive":false}],"model_transaction_policy":{"decoupled":false}}'
    )
    assert "max_batch_size: 32" in Path("deployments/vision/models/classifier/config.pbtxt").read_text()
    assert widths({"classifier": said}) == {"classifier": 32}


# -- policies ---------------------------------------------------------------------------------------------


def place(
    name: str = "a", *, in_flight: int = 0, base: int = UNLIMITED, width: int = 1, replica_limit: int = 64
) -> ModelSlots:
    replica = Slots(ReplicaLease(id=name, pool="p", state=ReplicaState.READY), replica_limit)
    replica.in_flight = in_flight
    found = ModelSlots(replica, width, base)
    found.in_flight = in_flight
    return found


def send(policy: Policy, places: list[ModelSlots], count: int) -> list[str]:
    """Who gets the next ``count`` requests."""
    got = []
    for turn in range(count):
        picked = policy(places, turn)
        if picked is None:
            break
        picked.in_flight += 1
        picked.replica.in_flight += 1
        got.append(picked.replica.lease.id)
    return got


def test_spread_picks_the_fewest_in_flight_and_equals_take_turns() -> None:
    three = [place("a", in_flight=2), place("b", in_flight=1), place("c", in_flight=1)]
    assert sorted(send(spread, three, 4)) == ["a", "b", "c", "c"] or sorted(send(spread, three, 0)) == []
    idle = [place(name) for name in "abc"]
    assert [picked.replica.lease.id for turn in range(4) if (picked := spread(idle, turn))] == ["a", "b", "c", "a"]
    assert spread([], 7) is None
    assert pack([], 7) is None


def test_pack_fills_a_batch_then_the_next_replica_then_the_next_batch() -> None:
    two = [place(name, width=4, base=8) for name in "ab"]
    assert "".join(send(pack, two, 99)) == "aaaabbbbaaaabbbb"


def test_pack_leaves_a_replica_idle_while_another_has_room_in_its_batch() -> None:
    two = [place(name, width=4, base=8) for name in "ab"]
    for _ in range(50):
        assert send(pack, two, 3) == ["a"] * 3
        two[0].in_flight = two[0].replica.in_flight = 0
    assert two[1].in_flight == 0


@st.composite
def pools(draw: st.DrawFn) -> list[ModelSlots]:
    return [
        place(
            str(index),
            in_flight=draw(st.integers(0, 12)),
            base=draw(st.integers(1, 16)),
            width=draw(st.integers(1, 8)),
            replica_limit=draw(st.integers(0, 20)),
        )
        for index in range(draw(st.integers(0, 5)))
    ]


@pytest.mark.parametrize("policy", [spread, pack])
@given(places=pools(), turn=st.integers(0, 10**6))
def test_no_policy_goes_above_slots_or_refuses_while_there_are_some(
    policy: Policy, places: list[ModelSlots], turn: int
) -> None:
    free = [p for p in places if p.in_flight < p.limit and p.replica.in_flight < p.replica.limit]
    picked = policy(places, turn)
    assert picked in free if free else picked is None


@given(count=st.integers(1, 6), turns=st.integers(0, 200), seed=st.integers(0, 99))
def test_spread_balances_within_one_whatever_ends_in_between(count: int, turns: int, seed: int) -> None:
    chance = random.Random(seed)
    places = [place(str(index)) for index in range(count)]
    for turn in range(turns):
        picked = spread(places, turn)
        if picked is None:
            break
        before = {p.replica.in_flight for p in places}
        assert picked.replica.in_flight == min(before)
        picked.in_flight += 1
        picked.replica.in_flight += 1
    loads = [p.replica.in_flight for p in places]
    assert max(loads) - min(loads) <= 1
    chance.shuffle(places)
    assert sum(loads) == min(turns, 64 * count)


@given(width=st.integers(1, 8), depth=st.integers(1, 3), count=st.integers(1, 5), load=st.integers(0, 100))
def test_pack_uses_as_few_replicas_as_batches_need(width: int, depth: int, count: int, load: int) -> None:
    places = [place(str(index), width=width, base=width * depth) for index in range(count)]
    sent = len(send(pack, places, load))
    used = [p.in_flight for p in places]
    assert sent == min(load, width * depth * count)
    assert sum(1 for n in used if n) == min(count, -(-sent // width))
    assert used == sorted(used, reverse=True)
