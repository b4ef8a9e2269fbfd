"""Where sequences are (A-030), in virtual time: pools of one or two gateway instances, a store that is a dictionary."""

import asyncio
import json
from typing import Any

import pytest

from gateway.routing.pool import Pool, RequestHead
from gateway.routing.sequences import (
    IDLE_MARGIN_SECONDS,
    SEQUENCES_LIMIT,
    SequencePart,
    rendezvous,
    sequence_models,
    sequence_part,
)
from tests.unit.test_placement import Connections, Request
from tests.unit.test_pool import lease, make, virtual
from wire.errors import ErrorKind, TidegateError
from wire.membership import Catalogue, ModelCatalogue, ReplicaLease, ReplicaState

IDLE_SECONDS = 20.0
DRAINING, FAILED = ReplicaState.DRAINING, ReplicaState.FAILED


def catalogue(**batching: Any) -> Catalogue:
    """Of ``segmenter``, a sequence model, and ``classifier``."""
    config = {"sequence_batching": {"max_sequence_idle_microseconds": int(IDLE_SECONDS * 1e6)} | batching}
    models = {
        name: ModelCatalogue(metadata_http="", config_http=json.dumps(said), metadata_grpc="", config_grpc="")
        for name, said in (("segmenter", config), ("classifier", {}))
    }
    return Catalogue(server_metadata_http="", server_metadata_grpc="", models=models)


class Store:
    """The store as sequences use it."""

    def __init__(self) -> None:
        self.there: dict[str, str] = {}
        self.away = False
        self.asked = 0

    async def _answer(self) -> None:
        self.asked += 1
        await asyncio.sleep(0.001)
        if self.away:
            raise TidegateError(ErrorKind.STORE_UNAVAILABLE, "away")

    async def claim(self, pool: str, model: str, name: str, replica: str, seconds: float) -> str:
        await self._answer()
        return self.there.setdefault(name, replica)

    async def put(self, pool: str, model: str, name: str, replica: str, seconds: float) -> None:
        await self._answer()
        self.there[name] = replica

    async def get(self, pool: str, model: str, name: str) -> str | None:
        await self._answer()
        return self.there.get(name)

    async def drop(self, pool: str, model: str, name: str) -> None:
        await self._answer()
        self.there.pop(name, None)


class Instance:
    """A gateway instance: its pool, and connections that are always open."""

    def __init__(self, store: Store | None, *leases: ReplicaLease, **routing: Any) -> None:
        self.pool, _ = make(**routing)
        self.pool.sequences.places = store
        self.pool.update(leases)
        self.pool.sequences.on_catalogue(catalogue())
        self.connections = Connections(seconds=0.0)

    def begin(self, name: str, *flags: str) -> Request:
        request = Request(self.pool, self.connections, RequestHead("segmenter"))
        request.follow(SequencePart("segmenter", name, "start" in flags, "end" in flags))
        return request

    async def ask(self, name: str, *flags: str) -> str | ErrorKind | None:
        """The replica that a request went to, with a good answer; or what kind of error it got."""
        request = self.begin(name, *flags)
        await asyncio.sleep(0.05)
        if request.sent_to:
            request.answered()
            await asyncio.sleep(0.01)
            return request.sent_to[-1]
        return request.kind


def three() -> list[ReplicaLease]:
    return [lease("a"), lease("b"), lease("c")]


def chosen(name: str, *replicas: str) -> str:
    found = rendezvous("segmenter", name, replicas)
    assert found is not None
    return found


def name_for(replica: str, *replicas: str) -> str:
    return next(name for name in (f"n:{number}" for number in range(1, 10**6)) if chosen(name, *replicas) == replica)


def test_names_spread_and_move_only_where_they_must() -> None:
    names = [f"n:{number}" for number in range(3000)]
    before = {name: chosen(name, "a", "b", "c") for name in names}
    assert all(800 < list(before.values()).count(replica) < 1200 for replica in "abc")
    after = {name: chosen(name, "d", "c", "b", "a") for name in names}
    assert all(after[name] in (before[name], "d") for name in names)
    assert rendezvous("segmenter", "n:1", []) is None


def test_sequence_models_are_told_by_their_config() -> None:
    assert sequence_models(catalogue()) == {"segmenter": IDLE_SECONDS}
    assert sequence_models(catalogue(max_sequence_idle_microseconds=0)) == {"segmenter": 1.0}
    assert sequence_models(None) == {}


def test_numbers_and_texts_are_two_kinds_of_names() -> None:
    names = [sequence_part("m", {"sequence_id": given}) for given in (5, "5", -1, 2**64 - 1)]
    assert [part and part.id for part in names] == ["n:5", "s:5", f"n:{2**64 - 1}", f"n:{2**64 - 1}"]


@pytest.mark.parametrize("with_store", [False, True])
def test_instances_agree(with_store: bool) -> None:
    """Each request of a sequence may come to another instance."""

    @virtual
    async def story() -> None:
        store = Store() if with_store else None
        one, two = Instance(store, *three()), Instance(store, *reversed(three()))
        for number in range(30):
            name = f"s:{number}"
            places = [
                await one.ask(name, "start"),
                await two.ask(name),
                await two.ask(name),
                await one.ask(name, "end"),
            ]
            assert len(set(places)) == 1 and places[0] in ("a", "b", "c")
        assert not one.pool.in_flight and not two.pool.in_flight

    story()


@virtual
async def test_a_replica_that_came_later_takes_nothing_over() -> None:
    store = Store()
    one, two = Instance(store, lease("a"), lease("b")), Instance(store, lease("a"), lease("b"))
    name = name_for("c", "a", "b", "c")
    first = await one.ask(name, "start")
    for instance in (one, two):
        instance.pool.update(three())
    assert [await two.ask(name), await one.ask(name), await two.ask(name)] == [first] * 3
    # Once it has ended, its name may be used again, and then picks the new replica; both hear of it.
    await one.ask(name, "end")
    assert await one.ask(name, "start") == "c"
    assert store.there[name] == "c"


@virtual
async def test_what_was_known_before_replicas_changed_is_looked_up() -> None:
    """Ended and started anew at the other instance, on a replica that came meanwhile."""
    store = Store()
    one, two = Instance(store, lease("a"), lease("b")), Instance(store, lease("a"), lease("b"))
    name = name_for("c", "a", "b", "c")
    await one.ask(name, "start")
    await two.ask(name)
    for instance in (one, two):
        instance.pool.update(three())
    await one.ask(name, "end")
    await one.ask(name, "start")
    assert await two.ask(name) == "c"


@virtual
async def test_the_store_is_not_asked_for_each_request() -> None:
    store = Store()
    one = Instance(store, *three())
    for flags in (("start",), *((),) * 50, ("end",)):
        await one.ask("n:1", *flags)
    assert store.asked <= 3


@virtual
async def test_with_the_store_away_names_decide() -> None:
    store = Store()
    store.away = True
    one, two = Instance(store, *three()), Instance(store, *three())
    assert await one.ask("n:1", "start") == await two.ask("n:1") == chosen("n:1", "a", "b", "c")


@virtual
async def test_a_start_on_a_live_name_stays_in_place() -> None:
    store = Store()
    one = Instance(store, lease("a"))
    two = Instance(store, *three())
    name = name_for("b", "a", "b", "c")
    await one.ask(name, "start")
    assert await two.ask(name, "start") == "a"


@virtual
async def test_running_sequences_finish_where_a_replica_drains_and_new_ones_start_elsewhere() -> None:
    one = Instance(Store(), *three())
    running, new = name_for("a", "a", "b", "c"), name_for("a", "a", "b")
    await one.ask(running, "start")
    one.pool.update([lease("a", DRAINING), lease("b"), lease("c")])
    assert one.pool.sequences.holds("a")
    assert await one.ask(running) == "a"
    assert await one.ask(new, "start") in ("b", "c")
    told: list[bool] = []
    one.pool.subscribe(lambda pool: told.append(pool.sequences.holds("a")))
    assert await one.ask(running, "end") == "a"
    assert told == [False]
    assert await one.ask(running, "start") in ("b", "c")


@virtual
async def test_an_idle_sequence_keeps_no_draining_replica() -> None:
    one = Instance(None, *three())
    await one.ask("n:1", "start")
    replica = chosen("n:1", "a", "b", "c")
    one.pool.update([lease(each, DRAINING if each == replica else ReplicaState.READY) for each in "abc"])
    told: list[bool] = []
    one.pool.subscribe(lambda pool: told.append(pool.sequences.holds(replica)))
    await asyncio.sleep(IDLE_SECONDS + IDLE_MARGIN_SECONDS + 2)
    assert told == [False] and not len(one.pool.sequences)


@pytest.mark.parametrize("how", ["gone", "failed", "model gone"])
def test_a_sequence_whose_replica_died_is_lost_and_never_restarted_silently(how: str) -> None:
    @virtual
    async def story() -> None:
        store = Store()
        one, two = Instance(store, *three()), Instance(store, *three())
        name = name_for("a", "a", "b", "c")
        await one.ask(name, "start")
        left = [lease("b"), lease("c")]
        if how == "failed":
            left.append(lease("a", FAILED))
        elif how == "model gone":
            left.append(lease("a", ReplicaState.READY, "classifier"))
        for instance in (one, two):
            instance.pool.update(left)
            assert await instance.ask(name) is ErrorKind.SEQUENCE_LOST
        assert await two.ask(name, "start") in ("b", "c")
        assert await one.ask(name) == await two.ask(name)

    story()


@virtual
async def test_those_that_wait_for_a_replica_hear_that_it_died() -> None:
    one = Instance(None, *three(), max_in_flight_per_replica=1)
    name, other = name_for("a", "a", "b", "c"), "s:" + name_for("a", "a", "b", "c")
    await one.ask(name, "start")
    busy = one.begin(name)
    await asyncio.sleep(0.01)
    waiting = one.begin(name)
    starting = next(
        one.begin(each, "start") for each in (f"{other}{n}" for n in range(99)) if chosen(each, "a", "b", "c") == "a"
    )
    await asyncio.sleep(0.01)
    assert busy.sent_to == ["a"] and not waiting.sent_to and not starting.sent_to and one.pool.held == 2
    one.pool.update([lease("b"), lease("c")])
    await asyncio.sleep(0.01)
    assert waiting.kind is ErrorKind.SEQUENCE_LOST
    assert starting.sent_to in (["b"], ["c"])  # nothing of it was anywhere
    assert busy.error is None  # its own connection will tell


@virtual
async def test_a_start_that_cannot_reach_its_replica_goes_elsewhere_and_one_under_way_does_not() -> None:
    one = Instance(Store(), *three())
    name = name_for("a", "a", "b", "c")
    one.connections.down = ("a",)
    place = await one.ask(name, "start")
    assert place in ("b", "c") and await one.ask(name) == place
    one.connections.down = ()
    await asyncio.sleep(1.1)
    again = f"{name}0"
    while chosen(again, "a", "b", "c") != "a":
        again += "0"
    assert await one.ask(again, "start") == "a"
    one.connections.down = ("a",)
    request = one.begin(again)
    await asyncio.sleep(0.5)
    assert not request.sent_to and one.pool.held == 1
    one.connections.down = ()
    await asyncio.sleep(2)
    assert request.sent_to == ["a"]


@virtual
async def test_a_sequence_that_started_with_no_replica_there_is_where_it_got_its_slot() -> None:
    store = Store()
    one, two = Instance(store), Instance(store)
    name = name_for("b", "a", "b")
    request = one.begin(name, "start")
    await asyncio.sleep(0.01)
    one.pool.update([lease("a")])
    await asyncio.sleep(0.01)
    request.answered()
    for instance in (one, two):
        instance.pool.update([lease("a"), lease("b")])
    assert request.sent_to == ["a"] and await one.ask(name) == await two.ask(name) == "a"


@virtual
async def test_a_caller_who_leaves_while_the_store_is_asked_takes_nothing_with_him() -> None:
    one = Instance(Store(), *three())
    request = one.begin("n:1", "start")
    request.cancel()
    await asyncio.sleep(1)
    assert not request.sent_to and not one.pool.in_flight and not one.pool.held


@virtual
async def test_the_table_is_bounded() -> None:
    one = Instance(None, lease("a"))
    sequences = one.pool.sequences
    for number in range(SEQUENCES_LIMIT + 5):
        sequences.join(SequencePart("segmenter", f"n:{number}", True, False), "a", None)
    assert len(sequences) == SEQUENCES_LIMIT


@virtual
async def test_a_stream_takes_its_sequences_along() -> None:
    one = Instance(Store(), *three())
    sequences = one.pool.sequences
    name = name_for("a", "a", "b", "c")
    sequences.on_stream(SequencePart("segmenter", name, True, False), "b")
    await asyncio.sleep(0.01)
    assert await one.ask(name) == "b"
    with pytest.raises(TidegateError) as elsewhere:
        sequences.on_stream(SequencePart("segmenter", name, False, False), "c")
    assert elsewhere.value.kind is ErrorKind.BAD_REQUEST
    one.pool.update([lease("b", DRAINING), lease("c")])
    sequences.on_stream(SequencePart("segmenter", name, False, False), "b")
    with pytest.raises(TidegateError) as leaving:
        sequences.on_stream(SequencePart("segmenter", "n:1", True, False), "b")
    assert leaving.value.kind is ErrorKind.DRAINING
    sequences.on_stream(SequencePart("segmenter", name, False, True), "b")
    assert not sequences.holds("b")


def test_a_pool_without_sequence_models_looks_at_nothing() -> None:
    @virtual
    async def story() -> None:
        pool: Pool
        pool, _ = make()
        pool.update(three())
        assert not pool.sequences.models

    story()
