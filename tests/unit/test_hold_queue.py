"""Who gets the next slot: classes and tenants by weight, then whose time is up first."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.fairness import Turns
from gateway.routing.queue import HoldQueue, RequestHead

_NUMBERS = count()


@dataclass(eq=False)
class Held:
    """A held request."""

    head: RequestHead
    since: float = 0.0
    until: float = 100.0
    number: int = field(default_factory=lambda: next(_NUMBERS))


def held(
    model: str | None = "m", *, batch: bool = False, tenant: str = "", since: float = 0.0, until: float = 100.0
) -> Held:
    return Held(RequestHead(model, batch=batch, tenant=tenant), since, until)


def queue_of(
    *holds: Held, interactive_weight: float = 4.0, tenant_weight: Callable[[str], float] = lambda _: 1.0
) -> HoldQueue[Held]:
    queue: HoldQueue[Held] = HoldQueue(interactive_weight, tenant_weight)
    for hold in holds:
        queue.add(hold)
    return queue


def served(queue: HoldQueue[Held], slots: int, *, models: frozenset[str] | None = None) -> list[Held]:
    """Those who get the next ``slots`` slots; ``models``: only these have any."""
    got: list[Held] = []

    def find(head: RequestHead) -> bool | None:
        return None if len(got) >= slots or (models is not None and head.model not in models) else True

    queue.serve(find, lambda hold, _: got.append(hold))
    return got


# -- classes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [4.0, 1.0, 0.25])
def test_while_both_classes_wait_they_share_by_weight_in_both_directions(weight: float) -> None:
    queue = queue_of(*(held(batch=n % 2 == 1) for n in range(400)), interactive_weight=weight)
    got = Counter(hold.head.batch for hold in served(queue, 100))
    assert got[False] / got[True] == pytest.approx(weight, rel=0.06)


def test_a_class_that_waits_alone_gets_every_slot_and_saves_nothing_up() -> None:
    queue = queue_of(*(held(batch=True) for _ in range(300)))
    assert len(served(queue, 100)) == 100
    for _ in range(300):
        queue.add(held())
    got = Counter(hold.head.batch for hold in served(queue, 100))
    assert got[False] == pytest.approx(80, abs=2)


def test_a_flood_of_one_class_does_not_starve_the_other_for_a_moment() -> None:
    queue = queue_of(*(held() for _ in range(1000)))
    served(queue, 100)
    late = held(batch=True)
    queue.add(late)
    assert late in served(queue, 5)


# -- tenants ----------------------------------------------------------------------------------------------


def test_tenants_share_a_class_by_weight_however_many_requests_each_has() -> None:
    weights = {"a": 2.0, "b": 1.0, "": 1.0}
    flood = [held(tenant="a") for _ in range(900)] + [held(tenant="b") for _ in range(300)]
    queue = queue_of(*flood, *(held() for _ in range(100)), tenant_weight=weights.__getitem__)
    assert Counter(hold.head.tenant for hold in served(queue, 80)) == {"a": 40, "b": 20, "": 20}


def test_one_request_of_a_quiet_tenant_goes_before_the_flood_of_another() -> None:
    queue = queue_of(*(held(tenant="flood") for _ in range(500)))
    served(queue, 50)
    queue.add(quiet := held(tenant="quiet"))
    assert quiet in served(queue, 2)


def test_leaving_and_coming_back_gains_nothing() -> None:
    """A tenant whose requests come one by one has no more of the slots than one that queues them."""
    queue = queue_of(*(held(tenant="steady") for _ in range(200)), held(tenant="hasty"))
    got: Counter[str] = Counter()
    for _ in range(100):
        (one,) = served(queue, 1)
        got[one.head.tenant] += 1
        if one.head.tenant == "hasty":
            queue.add(held(tenant="hasty"))
    assert abs(got["steady"] - got["hasty"]) <= 1


# -- inside a flow ----------------------------------------------------------------------------------------


def test_inside_a_flow_the_one_whose_time_is_up_first_goes_first_then_the_one_that_came_first() -> None:
    late, urgent, older, younger = (
        held(since=0, until=120),
        held(since=5, until=6),
        held(since=1, until=50),
        held(since=2, until=50),
    )
    assert served(queue_of(late, younger, urgent, older), 4) == [urgent, older, younger, late]


def test_who_waits_for_a_model_without_slots_does_not_stop_the_others() -> None:
    stuck = [held("a", tenant=tenant, batch=batch) for tenant in ("x", "y") for batch in (True, False)] * 1
    queue = queue_of(*stuck, last := held("b", tenant="x", batch=True, until=1000))
    assert served(queue, 10, models=frozenset("b")) == [last]
    assert sorted(hold.number for hold in served(queue, 10)) == sorted(hold.number for hold in stuck)
    assert len(queue) == 0


def test_a_question_about_a_model_does_not_wait_behind_requests_for_its_slots() -> None:
    asking = Held(RequestHead("m", slotted=False))
    queue = queue_of(held("m"), asking)
    got: list[Held] = []
    queue.serve(lambda head: None if head.slotted else True, lambda hold, _: got.append(hold))
    assert got == [asking]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.booleans(), st.sampled_from(["", "x", "y"]), st.integers(0, 9)), max_size=60
    ),
    st.integers(0, 99),
)
def test_everybody_is_served_once_or_leaves_and_nothing_is_lost_count_of(
    drawn: list[tuple[str, bool, str, int]], seed: int
) -> None:
    chance = random.Random(seed)
    holds = [held(model, batch=batch, tenant=tenant, until=until) for model, batch, tenant, until in drawn]
    queue = queue_of()
    there: set[int] = set()
    for hold in holds:
        queue.add(hold)
        there.add(hold.number)
        if chance.random() < 0.3:
            for one in served(queue, chance.randrange(3), models=frozenset(chance.choice(["a", "b", "ab"]))):
                there.remove(one.number)
        leaving = chance.choice(holds)
        if leaving.number in there and chance.random() < 0.3:
            queue.remove(leaving)
            there.remove(leaving.number)
        assert len(queue) == len(there)
    assert {hold.number for hold in served(queue, 100)} == there
    assert (len(queue), queue.count(batch=True), queue.jobs) == (0, 0, 0)


class Compared(float):
    """A time that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Compared.compared += 1
        return super().__eq__(other)

    def __lt__(self, other: float) -> bool:
        Compared.compared += 1
        return super().__lt__(other)

    __hash__ = float.__hash__


def test_thousands_that_wait_make_no_operation_slow() -> None:
    """A hundred times as many that wait cost a few comparisons more."""

    def cost(waiting: int) -> int:
        chance = random.Random(1)
        queue = queue_of(
            *(held(tenant=str(n % 20), batch=n % 3 == 0, until=Compared(chance.random())) for n in range(waiting))
        )
        Compared.compared = 0
        for _ in range(500):
            (one,) = served(queue, 1)
            queue.add(one)
            queue.remove(one)
            queue.add(one)
        return Compared.compared

    assert cost(20_000) < 4 * cost(200)


def test_coming_and_going_leaves_nothing_behind() -> None:
    """At zero nobody is served, and callers come and give up for as long as they like."""
    queue = queue_of()
    for _ in range(1000):
        hold = held(tenant="x")
        queue.add(hold)
        queue.remove(hold)
    assert len(queue._classes._heap) < 40
    assert len(queue._tenants[False]._heap) < 40


def test_turns_of_nobody_are_nobodys() -> None:
    turns: Turns[str] = Turns(lambda _: 1.0)
    assert turns.first(lambda _: True) is None
    turns.enter("a")
    assert turns.first(lambda _: False) is None
    assert turns.first(lambda _: True) == "a"
    turns.leave("a")
    assert "a" not in turns
    assert turns.first(lambda _: True) is None
