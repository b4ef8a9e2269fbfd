"""The requests held for a slot: in order of arrival, found quickly by model.

One queue per model, because a request whose model has no free slot must not stop those behind it whose model
has one, and because looking for the next one must not walk past hundreds that cannot be served anyway.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Want = tuple[str | None, bool, str | None]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What routing needs to know of a request."""

    model: str | None
    """Model it is for; None for a request any replica of the pool can answer."""
    deadline: float | None = None
    """Loop time after which the caller has no use for an answer."""
    job: bool = False
    """True for a request that a job accounts for."""
    slotted: bool = True
    """Whether it takes one of its model's slots on a replica. A two-way stream and a question about a model take only
    one of all that the replica may have: they do not fill the model's batch."""
    replica: str | None = None
    """The one replica that may answer it, ready or draining, as it holds the request's sequence; None: any."""

    @property
    def want(self) -> Want:
        """What it waits for: equal for requests that the same slots can serve."""
        return self.model, self.slotted, self.replica


class Waiting(Protocol):
    """A held request as the queue sees it; ``since`` is when it arrived, by the pool's clock."""

    @property
    def head(self) -> RequestHead: ...

    @property
    def since(self) -> float: ...


W = TypeVar("W", bound=Waiting)
S = TypeVar("S")


class HoldQueue(Generic[W]):
    """See the module. Adding, removing and granting cost the same however many wait."""

    def __init__(self) -> None:
        self._by_want: dict[Want, OrderedDict[W, None]] = {}
        self._count = 0
        self.jobs = 0
        """How many of them a job accounts for."""

    def __len__(self) -> int:
        return self._count

    def add(self, hold: W) -> None:
        """To the end; before the others of its model if it arrived earlier (it was sent out once, in vain)."""
        queue = self._by_want.setdefault(hold.head.want, OrderedDict())
        goes_first = bool(queue) and hold.since < next(iter(queue)).since
        queue[hold] = None
        if goes_first:
            queue.move_to_end(hold, last=False)
        self._count += 1
        self.jobs += hold.head.job

    def remove(self, hold: W) -> None:
        queue = self._by_want[hold.head.want]
        del queue[hold]
        if not queue:
            del self._by_want[hold.head.want]
        self._count -= 1
        self.jobs -= hold.head.job

    def serve(self, find_slot: Callable[[RequestHead], S | None], grant: Callable[[W, S], None]) -> None:
        """Grant slots to the oldest requests for as long as ``find_slot`` has one for any of them."""
        candidates = [next(iter(queue)) for queue in self._by_want.values()]
        while candidates:
            oldest = min(candidates, key=lambda hold: hold.since)
            candidates.remove(oldest)
            slot = find_slot(oldest.head)
            if slot is None:
                continue
            self.remove(oldest)
            grant(oldest, slot)
            queue = self._by_want.get(oldest.head.want)
            if queue:
                candidates.append(next(iter(queue)))
