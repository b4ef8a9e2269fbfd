"""Whose turn it is: members share what there is in proportion to their weights. Pure.

Stride scheduling (Waldspurger and Weihl, 1995) with the virtual clock of start-time fair queueing (Goyal, Vin and
Cheng, 1996): each turn moves a member's mark on by 1 / weight, and the lowest mark is next. A member that has nothing
to do saves nothing up: when it comes back, its mark is at least where the clock is.
"""

import heapq
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Mark, a number that makes equals come in order of entry, member.
_Entry = tuple[float, int, K]


class Turns(Generic[K]):
    """See the module. ``weight`` tells a member's weight, above 0. Each operation costs O(log members)."""

    def __init__(self, weight: Callable[[K], float]) -> None:
        self._weight = weight
        self._heap: list[_Entry[K]] = []
        self._entries: dict[K, _Entry[K]] = {}
        self._left_at: dict[K, float] = {}
        self._clock = 0.0
        self._numbers = count()

    def __contains__(self, member: K) -> bool:
        return member in self._entries

    def enter(self, member: K) -> None:
        """From now on it takes part."""
        self._put(member, max(self._clock, self._left_at.pop(member, 0.0)))

    def leave(self, member: K) -> None:
        """It has nothing to do any more. What it took beyond its share is not forgotten until the others caught up."""
        self._left_at[member] = self._entries.pop(member)[0]

    def first(self, may: Callable[[K], bool]) -> K | None:
        """Whose turn it is, of those who ``may``; None when nobody may. Takes no turn: see :meth:`took`."""
        if len(self._entries) == 1:
            (alone,) = self._entries
            return alone if may(alone) else None
        skipped: list[_Entry[K]] = []
        found = None
        while self._heap and found is None:
            entry = self._heap[0]
            if self._entries.get(entry[2]) is not entry:
                heapq.heappop(self._heap)  # it has left, or moved on
            elif may(entry[2]):
                found = entry[2]
            else:
                skipped.append(heapq.heappop(self._heap))
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def took(self, member: K) -> None:
        """It has taken a turn."""
        mark = self._entries[member][0]
        self._clock = max(self._clock, mark)
        self._put(member, mark + 1.0 / self._weight(member))

    def _put(self, member: K, mark: float) -> None:
        entry = self._entries[member] = (mark, next(self._numbers), member)
        heap, members = self._heap, len(self._entries)
        if members == 1:
            heap.clear()  # one that is alone needs no order
        elif members - 1 <= len(heap) <= 2 * members + 16:
            heapq.heappush(heap, entry)
        else:
            heap[:] = self._entries.values()
            heapq.heapify(heap)
