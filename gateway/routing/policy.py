"""Which replica gets the next request. Pure: places in, one of them out.

A place is one model on one replica (:class:`~gateway.routing.slots.ModelSlots`). None of the functions picks one
that is full, nor on a replica that is.
"""

from collections.abc import Callable, Sequence

from gateway.routing.slots import ModelSlots
from wire.pools import RoutingPolicy

#: Places in a stable order, and a number that grows by one with each pick; None when all are full.
Policy = Callable[[Sequence[ModelSlots], int], ModelSlots | None]


def spread(places: Sequence[ModelSlots], turn: int) -> ModelSlots | None:
    """The replica with the fewest requests in flight; equals take turns."""
    count = len(places)
    if count > 1:
        first = turn % count
        if first:
            places = [*places[first:], *places[:first]]
    picked, fewest = None, -1
    for place in places:
        load = place.replica.in_flight
        if (picked is None or load < fewest) and load < place.replica.limit and place.in_flight < place.limit:
            picked, fewest = place, load
    return picked


def pack(places: Sequence[ModelSlots], turn: int) -> ModelSlots | None:
    """The first replica that has a batch of the model to fill: the others come into play only when it is full, so
    that few replicas run full batches and the others can leave. ``turn`` does not matter: the order is stable."""
    picked, fewest = None, -1
    for place in places:
        batches = place.in_flight // place.width
        if (
            (picked is None or batches < fewest)
            and place.in_flight < place.limit
            and place.replica.in_flight < place.replica.limit
        ):
            picked, fewest = place, batches
    return picked


POLICIES: dict[RoutingPolicy, Policy] = {RoutingPolicy.SPREAD: spread, RoutingPolicy.PACK: pack}
