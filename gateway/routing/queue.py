"""The requests held for a slot, and which of them gets the next one.

First whose turn it is: the classes ``interactive`` and ``batch`` share slots by weight, and inside a class the tenants
do. Then what is most urgent: of the requests of one tenant in one class, the one whose time is up first. A request
whose model has no free slot does not stop the others, and whoever waits alone gets everything.
"""

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from gateway.routing.fairness import Turns

#: What a request waits for: equal for requests that the same slots can serve.
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
    batch: bool = False
    """Its class: ``batch``, else ``interactive``."""
    tenant: str = ""
    """Whose it is; "" for everybody who is not known by name."""
    body_bytes: int = 0
    """Length of its body, as far as it is known beforehand."""

    @property
    def want(self) -> Want:
        """What it waits for."""
        return self.model, self.slotted, self.replica


class Waiting(Protocol):
    """A held request as the queue sees it."""

    @property
    def head(self) -> RequestHead: ...

    @property
    def since(self) -> float:
        """When it arrived, by the pool's clock."""

    @property
    def until(self) -> float:
        """When its time is up, by the pool's clock."""


W = TypeVar("W", bound=Waiting)
S = TypeVar("S")


class HoldQueue(Generic[W]):
    """See the module. Each operation costs O(log n) of the requests that wait, and of the tenants that do.

    ``interactive_weight``: turns of class interactive for each of class batch, while both wait.
    ``tenant_weight``: the weight of a tenant inside a class.
    """

    def __init__(self, interactive_weight: float, tenant_weight: Callable[[str], float]) -> None:
        self._classes: Turns[bool] = Turns(lambda batch: 1.0 if batch else interactive_weight)
        self._tenants: dict[bool, Turns[str]] = {batch: Turns(tenant_weight) for batch in (False, True)}
        self._flows: dict[tuple[bool, str], _Flow[W]] = {}
        self._wanted: dict[bool, dict[Want, int]] = {False: {}, True: {}}
        self._counts = {False: 0, True: 0}
        self.jobs = 0
        """How many of them a job accounts for."""

    def __len__(self) -> int:
        return self._counts[False] + self._counts[True]

    def count(self, *, batch: bool) -> int:
        """How many of one class wait."""
        return self._counts[batch]

    def add(self, hold: W) -> None:
        head = hold.head
        flow = self._flows.get((head.batch, head.tenant))
        if flow is None:
            if not self._counts[head.batch]:
                self._classes.enter(head.batch)
            self._tenants[head.batch].enter(head.tenant)
            flow = self._flows[head.batch, head.tenant] = _Flow()
        flow.add(hold)
        wanted = self._wanted[head.batch]
        wanted[head.want] = wanted.get(head.want, 0) + 1
        self._counts[head.batch] += 1
        self.jobs += head.job

    def remove(self, hold: W) -> None:
        head = hold.head
        flow = self._flows[head.batch, head.tenant]
        flow.remove(hold)
        wanted = self._wanted[head.batch]
        wanted[head.want] -= 1
        if not wanted[head.want]:
            del wanted[head.want]
        self._counts[head.batch] -= 1
        self.jobs -= head.job
        if not flow:
            del self._flows[head.batch, head.tenant]
            self._tenants[head.batch].leave(head.tenant)
            if not self._counts[head.batch]:
                self._classes.leave(head.batch)

    def serve(self, find_slot: Callable[[RequestHead], S | None], grant: Callable[[W, S], None]) -> None:
        """Grant slots for as long as ``find_slot`` has one for any of those who wait."""
        blocked: set[Want] = set()
        while (hold := self._next(blocked)) is not None:
            slot = find_slot(hold.head)
            if slot is not None:
                self._classes.took(hold.head.batch)
                self._tenants[hold.head.batch].took(hold.head.tenant)
                self.remove(hold)
                grant(hold, slot)
            elif len(self._flows) == 1 and len(self._wanted[hold.head.batch]) == 1:
                return
            else:
                blocked.add(hold.head.want)

    def _next(self, blocked: Collection[Want]) -> W | None:
        """The request whose turn it is, of those who want something else than ``blocked``."""
        if len(self._flows) == 1:
            (flow,) = self._flows.values()
            return flow.first(blocked)
        batch = self._classes.first(
            lambda batch: not blocked or any(want not in blocked for want in self._wanted[batch])
        )
        if batch is None:
            return None
        tenant = self._tenants[batch].first(lambda tenant: self._flows[batch, tenant].has(blocked))
        return None if tenant is None else self._flows[batch, tenant].first(blocked)


class _Flow(Generic[W]):
    """The waiting requests of one tenant in one class."""

    def __init__(self) -> None:
        self._by_want: dict[Want, _Deadlines[W]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_want)

    def add(self, hold: W) -> None:
        self._by_want.setdefault(hold.head.want, _Deadlines()).add(hold)

    def remove(self, hold: W) -> None:
        deadlines = self._by_want[hold.head.want]
        deadlines.remove(hold)
        if not deadlines:
            del self._by_want[hold.head.want]

    def has(self, blocked: Collection[Want]) -> bool:
        return not blocked or any(want not in blocked for want in self._by_want)

    def first(self, blocked: Collection[Want]) -> W | None:
        if len(self._by_want) == 1 and not blocked:
            (only,) = self._by_want.values()
            return only.first()
        firsts = [deadlines.first() for want, deadlines in self._by_want.items() if want not in blocked]
        return min(firsts, key=lambda hold: (hold.until, hold.since)) if firsts else None


class _Deadlines(Generic[W]):
    """Requests that want the same: the one whose time is up first, of equals the one that arrived first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, W]] = []
        self._there: set[W] = set()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._there)

    def add(self, hold: W) -> None:
        self._there.add(hold)
        heapq.heappush(self._heap, (hold.until, hold.since, next(self._numbers), hold))

    def remove(self, hold: W) -> None:
        """What is removed stays in the heap until it comes up, or makes up most of it."""
        self._there.remove(hold)
        if len(self._heap) > 2 * len(self._there) + 16:
            self._heap = [entry for entry in self._heap if entry[3] in self._there]
            heapq.heapify(self._heap)

    def first(self) -> W:
        while self._heap[0][3] not in self._there:
            heapq.heappop(self._heap)
        return self._heap[0][3]
