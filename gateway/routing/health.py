"""What replicas do with their requests tells how they are: those that fail are left alone for a while.

* A replica that could not be reached is ejected at once: nothing is picked for it. One that lost three requests in a
  row, or let them pass their deadlines without a word for a second, too, unless no other replica could take its work.
* An ejection lasts one second, each further one twice as long as the last, up to five. Then one request is sent as a
  probe; with each answer the replica may have one more at once, so that a fresh one is not flooded, until it may have
  all and is trusted again. A failure before that is the next ejection.
* A replica that has requests and says nothing for much longer than it used to take is not ejected, but gets requests
  only when no other has a slot: it hangs, or works on something long.

An answer is an answer, whatever its status: a full queue, an unknown model or a wrong request is no illness.
(Outlier detection with growing ejection times is Envoy's; growth by answers is TCP's slow start.)
"""

import asyncio
from collections.abc import Callable, Mapping

from gateway.routing.slots import Slots
from wire.membership import ReplicaState

#: Failures in a row after which a replica is ejected.
_FAILURES = 3
#: The first ejection, and the longest. Seconds.
_FIRST_EJECTION_SECONDS = 1.0
_LONGEST_EJECTION_SECONDS = 5.0
#: A deadline that passes says something of a replica only if it has not answered anybody for so long. Seconds.
_MUTE_SECONDS = 1.0
#: A replica is silent after so many times its usual gap between answers, but not before _LEAST_SILENCE_SECONDS.
_SILENCE_FACTOR = 20.0
_LEAST_SILENCE_SECONDS = 0.1
#: How often silence is looked for, while there are requests on replicas. Seconds.
_LISTEN_SECONDS = 0.05
#: How much one gap counts in the running mean.
_GAP_WEIGHT = 1 / 16


class Doubt:
    """Why a replica is not, or not fully, trusted. Pure."""

    __slots__ = ("allowed", "ejections", "failures")

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self.ejections = 0
        """Since it was last trusted."""
        self.allowed: int | None = None
        """Requests it may have at once; 0 while ejected; None: it was not ejected."""

    def eject(self) -> float:
        """Returns how long. Seconds."""
        self.failures = 0
        self.ejections += 1
        self.allowed = 0
        return min(_LONGEST_EJECTION_SECONDS, _FIRST_EJECTION_SECONDS * 2.0 ** (self.ejections - 1))

    def on_answer(self, limit: int) -> bool:
        """An answer came; True when the replica is trusted again: it may have ``limit`` requests at once."""
        self.failures = 0
        if self.allowed:
            self.allowed += 1
        return self.allowed is None or self.allowed >= limit

    def on_failure(self) -> bool:
        """True when it is to be ejected."""
        self.failures += 1
        return self.allowed != 0 and (self.failures >= _FAILURES or self.allowed is not None)


def is_silent(waited_seconds: float, usual_gap_seconds: float | None) -> bool:
    """Whether a replica that has requests, and gave its last answer so long ago, takes longer than it used to."""
    usual = 0.0 if usual_gap_seconds is None else usual_gap_seconds
    return usual_gap_seconds is not None and waited_seconds > max(_LEAST_SILENCE_SECONDS, usual * _SILENCE_FACTOR)


class Health:
    """See the module. ``limit`` is what a trusted replica may have at once; ``on_room`` is called when one may have
    more than before."""

    def __init__(
        self, replicas: Mapping[str, Slots], limit: int, *, clock: Callable[[], float], on_room: Callable[[], None]
    ) -> None:
        self._replicas = replicas
        self._limit = limit
        self._clock = clock
        self._on_room = on_room
        self._listening = False
        self.ejections_total = 0
        """Since this instance started."""
        self.any_silent = False

    @property
    def ejected(self) -> int:
        """Replicas that are left alone now."""
        return sum(1 for slots in self._replicas.values() if not slots.limit)

    # -- what became of a request -------------------------------------------------------------------------

    def on_first(self, slots: Slots) -> None:
        """A replica that had nothing to do gets a request."""
        slots.heard_at = self._clock()
        if slots.mute_since is None:
            slots.mute_since = slots.heard_at
        if not self._listening:
            self._listening = True
            asyncio.get_running_loop().call_later(_LISTEN_SECONDS, self._listen)

    def on_answer(self, slots: Slots, now: float, *, timed: bool) -> None:
        """``timed``: not of a stream, so that the time it took tells how fast the replica is."""
        if timed:
            gap = now - slots.heard_at
            slots.gap = gap if slots.gap is None else slots.gap + (gap - slots.gap) * _GAP_WEIGHT
            slots.silent = False
        slots.heard_at = now
        slots.mute_since = None
        doubt = slots.doubt
        if doubt is not None:
            if doubt.on_answer(self._limit):
                slots.doubt = None
                slots.limit = self._limit
            elif doubt.allowed is not None:
                slots.limit = doubt.allowed

    def on_lost(self, slots: Slots) -> None:
        """It broke a request off."""
        slots.doubt = slots.doubt or Doubt()
        if slots.doubt.on_failure() and self._another_than(slots):
            self._eject(slots)

    def on_overdue(self, slots: Slots) -> None:
        """It let a deadline pass."""
        since = slots.heard_at if slots.mute_since is None else slots.mute_since
        if self._clock() - since >= _MUTE_SECONDS:
            self.on_lost(slots)

    def on_unreached(self, slots: Slots) -> None:
        """No connection: whoever is sent there must go elsewhere, so that it is ejected even if it is the last."""
        if slots.limit:
            slots.doubt = slots.doubt or Doubt()
            if not self._another_than(slots):
                slots.doubt.ejections = 0
            self._eject(slots)

    def on_replicas(self) -> None:
        """Replicas came or went. When only ejected ones are left, they are tried rather than nobody."""
        ready = [slots for slots in self._replicas.values() if slots.lease.state is ReplicaState.READY]
        if ready and not any(slots.limit for slots in ready):
            for slots in ready:
                self._probe(slots)

    # -- what follows -------------------------------------------------------------------------------------

    def _eject(self, slots: Slots) -> None:
        assert slots.doubt is not None
        self.ejections_total += 1
        slots.limit = 0
        ejection = slots.doubt.eject()
        asyncio.get_running_loop().call_later(ejection, self._end_ejection, slots, slots.doubt.ejections)

    def _end_ejection(self, slots: Slots, number: int) -> None:
        if slots.doubt is not None and slots.doubt.allowed == 0 and slots.doubt.ejections == number:
            self._probe(slots)
            self._on_room()

    def _probe(self, slots: Slots) -> None:
        if slots.doubt is not None:
            slots.doubt.allowed = slots.limit = 1

    def _another_than(self, slots: Slots) -> bool:
        """Whether another replica could do the work of this one."""
        return any(
            other is not slots
            and other.limit > 0
            and other.lease.state is ReplicaState.READY
            and set(other.lease.models) >= set(slots.lease.models)
            for other in self._replicas.values()
        )

    def _listen(self) -> None:
        """Look for replicas that have fallen silent, as long as any has something to answer."""
        now = self._clock()
        busy = [slots for slots in self._replicas.values() if slots.awaited]
        for slots in busy:
            slots.silent = is_silent(now - slots.heard_at, slots.gap)
        self.any_silent = any(slots.silent for slots in busy)
        self._listening = bool(busy)
        if busy:
            asyncio.get_running_loop().call_later(_LISTEN_SECONDS, self._listen)
