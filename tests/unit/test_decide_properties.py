"""What holds of every decision, over random stories."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.decision.decide import decide
from autoscaler.decision.memory import Memory
from autoscaler.decision.observation import Observation, SeenGateway, SeenQueue, SeenReplica
from tests.unit.autoscaler_story import BEGIN, DRAINING, FAILED, READY, STARTING
from wire.membership import PoolLoad
from wire.pools import ScalingSettings

counts = st.integers(0, 60)
maybe = st.none() | counts


@st.composite
def policies(draw: st.DrawFn) -> ScalingSettings:
    low = draw(st.integers(0, 3))
    return ScalingSettings(
        min_replicas=low,
        max_replicas=draw(st.integers(max(1, low), 6)),
        target_demand_per_replica=draw(st.integers(1, 20)),
        scale_to_zero_delay_seconds=draw(st.sampled_from([0.0, 5.0, 30.0])),
        scale_down_delay_seconds=draw(st.sampled_from([0.0, 5.0, 15.0])),
    )


loads = st.builds(
    PoolLoad,
    held_interactive=st.sampled_from([0, 0, 1, 30]),
    held_job=st.sampled_from([0, 0, 1, 30]),
    in_flight_interactive=st.sampled_from([0, 0, 2]),
    in_flight_job=st.sampled_from([0, 0, 2]),
    requests_total=counts,
    idle_seconds=st.none() | st.floats(0, 100),
)
gateways = st.builds(SeenGateway, st.sampled_from(["g1", "g2"]), st.booleans(), loads)
replicas = st.builds(
    SeenReplica,
    st.sampled_from(["r1", "r2", "r3", "r4"]),
    st.sampled_from([READY, READY, STARTING, DRAINING, FAILED, None]),
    age_seconds=st.floats(0, 1000),
    ready_at=st.none() | st.floats(BEGIN - 100, BEGIN + 100),
    in_flight=maybe,
)
observations = st.builds(
    Observation,
    queues=st.lists(
        st.builds(SeenQueue, st.just("q"), st.sampled_from([0, 0, 7, None]), st.sampled_from([0, 3, None])), max_size=2
    ).map(tuple),
    gateways=st.none() | st.lists(gateways, max_size=2, unique_by=lambda one: one.instance).map(tuple),
    activation=st.sampled_from([False, False, True, None]),
    replicas=st.none() | st.lists(replicas, max_size=4, unique_by=lambda one: one.id).map(tuple),
)
stories = st.lists(st.tuples(st.sampled_from([0.1, 1.0, 7.0, 40.0]), observations), min_size=1, max_size=12)


def told(policy: ScalingSettings, story: list[tuple[float, Observation]]) -> Any:
    """Every (time, observation, memory before, decision, memory after) of a story."""
    memory, now = Memory.fresh(BEGIN), BEGIN
    for after, seen in story:
        now += after
        decision, later = decide(policy, seen, memory, now)
        yield now, seen, memory, decision, later
        memory = later


@settings(max_examples=150, deadline=None)
@given(policies(), stories)
def test_bounds_and_zero(policy: ScalingSettings, story: list[tuple[float, Observation]]) -> None:
    for _, seen, before, decision, _ in told(policy, story):
        assert policy.min_replicas <= decision.target <= policy.max_replicas
        assert decision.explanation
        if decision.load.demand > 0 or decision.load.activation:
            assert decision.target >= 1
        if decision.load.unknown:
            assert decision.target >= min(len(seen.capacity), policy.max_replicas)
            if seen.replicas is None and before.held is not None:
                assert decision.target >= before.held
        if decision.target == 0 and seen.capacity:
            assert not any(replica.is_starting for replica in seen.capacity)


@settings(max_examples=100, deadline=None)
@given(policies(), stories)
def test_pure_and_deterministic(policy: ScalingSettings, story: list[tuple[float, Observation]]) -> None:
    assert list(told(policy, story)) == list(told(policy, story))


@settings(max_examples=100, deadline=None)
@given(policies(), stories)
def test_memory_survives_the_store_at_every_tick(
    policy: ScalingSettings, story: list[tuple[float, Observation]]
) -> None:
    for *_, after in told(policy, story):
        assert Memory.model_validate_json(after.model_dump_json()) == after


@settings(max_examples=150, deadline=None)
@given(policies(), stories, st.integers(0, 50), st.integers(0, 50))
def test_more_demand_never_means_fewer(
    policy: ScalingSettings, story: list[tuple[float, Observation]], more_jobs: int, more_requests: int
) -> None:
    for now, seen, before, decision, _ in told(policy, story):
        queues = tuple(replace(one, lag=None if one.lag is None else one.lag + more_jobs) for one in seen.queues)
        busier = seen.gateways and tuple(
            replace(
                one,
                load=one.load.model_copy(
                    update={
                        "held_interactive": one.load.held_interactive + more_requests,
                        "held_job": one.load.held_job + more_requests,
                    }
                ),
            )
            for one in seen.gateways
        )
        more, _ = decide(policy, replace(seen, queues=queues, gateways=busier), before, now)
        assert more.target >= decision.target
