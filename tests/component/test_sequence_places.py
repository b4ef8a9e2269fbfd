"""Where sequences are, in a real Valkey."""

import asyncio

from stores.sequences import SequencePlaces
from stores.store import Store


async def test_who_starts_a_sequence_first_settles_its_place(store: Store) -> None:
    """A-030: two gateway instances, one sequence."""
    one, two = SequencePlaces(store), SequencePlaces(store)
    name = ("vision", "seq", "s:\ud800 any text" + "x" * 1000)
    assert await one.get(*name) is None
    assert await one.claim(*name, "a", 60.0) == "a"
    assert await two.claim(*name, "b", 60.0) == "a"
    assert await two.get(*name) == "a"
    assert await two.get("vision", "seq", "n:1") is None and await two.get("vision", "other", name[2]) is None
    await two.put(*name, "b", 60.0)
    assert await one.get(*name) == "b"
    await one.drop(*name)
    assert await two.get(*name) is None


async def test_a_place_is_forgotten_with_its_sequence(store: Store) -> None:
    places = SequencePlaces(store)
    await places.claim("vision", "seq", "n:1", "a", 0.05)
    await asyncio.sleep(0.2)
    assert await places.get("vision", "seq", "n:1") is None
