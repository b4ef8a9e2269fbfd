"""One pool as this gateway instance sees it: its replicas, their slots, and the requests held for one.

A request reserves a slot on a replica that has its model. Without a free one it is held (queue.py tells who is
next) until a slot frees, a replica becomes ready, or its time is up. Everything happens on one event
loop and every change is synchronous, so there is no moment at which a slot belongs to nobody.
"""

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Iterable

from gateway.routing.drain_rate import DrainRate
from gateway.routing.faults import Faults
from gateway.routing.health import Health
from gateway.routing.policy import POLICIES
from gateway.routing.queue import HoldQueue, RequestHead
from gateway.routing.quota import Quota
from gateway.routing.reservation import Hold, Reservation
from gateway.routing.sequences import Sequences
from gateway.routing.slots import UNLIMITED, ModelSlots, Slots, slots_for, widths
from wire.errors import ErrorKind, TidegateError
from wire.membership import Catalogue, PoolLoad, ReplicaLease, ReplicaState
from wire.pools import PoolSettings

#: Retry-After before any cold start was seen. Seconds.
_ASSUMED_COLD_START_SECONDS = 15.0
#: Callers often leave together (one process died, one timeout fits all). After one left a running request, held
#: requests get its slot this much later, so that those whose callers left too are gone by then. Seconds.
_ABANDON_GRACE_SECONDS = 0.1
#: Why a replica failed to start is told to callers for this long after it was last seen. Seconds.
_FAILURE_KEEP_SECONDS = 300.0
#: An absolute path, up to its last part. Callers need not know where our files are.
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"]+/)*")

__all__ = ["Hold", "Pool", "RequestHead", "Reservation"]

log = logging.getLogger(__name__)


class Pool:
    """See the module. ``clock`` is the loop's time; ``on_wanted`` is called when a request is held while no
    replica is ready, so that somebody asks the autoscaler for one."""

    def __init__(
        self, name: str, settings: PoolSettings, *, clock: Callable[[], float], on_wanted: Callable[[str], None]
    ) -> None:
        self.name = name
        self.settings = settings
        self.loaded: frozenset[str] = frozenset()
        """Models that operators have loaded beyond the settings."""
        self.unloaded: frozenset[str] = frozenset()
        """Models that operators have unloaded; no replica gets them back by itself."""
        self._catalogue: Catalogue | None = None
        self._clock = clock
        self._on_wanted = on_wanted
        self._replicas: dict[str, Slots] = {}
        self._leaving: dict[str, Slots] = {}
        self._policy = POLICIES[settings.routing.policy]
        limit = settings.routing.max_in_flight_per_replica
        self.health = Health(self._replicas, limit, clock=clock, on_room=self._dispatch)
        self._widths: dict[str, int] = {}
        # Where a request of a model may go: replicas in a stable order, the oldest first. None: any ready replica.
        self._places: dict[str | None, list[ModelSlots]] = {}
        self._unslotted: dict[str | None, list[ModelSlots]] = {}
        tenants = settings.routing.tenants
        self._quotas = {name: Quota(tenant) for name, tenant in tenants.items()}
        self._held: HoldQueue[Hold] = HoldQueue(
            settings.routing.interactive_weight, lambda name: tenants[name].weight if name in tenants else 1.0
        )
        self._drained = {False: DrainRate(), True: DrainRate()}
        self.sequences = Sequences(self, clock)
        self.faults = Faults(settings)
        self._listeners: list[Callable[[Pool], None]] = []
        self._turn = 0
        self._in_flight_jobs = 0
        self._in_flight = 0
        self._requests_total = 0
        self._last_active: float | None = None
        self._cold_start_seconds: float | None = None
        self._failure = ""
        self._failure_seen = -math.inf

    @property
    def catalogue(self) -> Catalogue | None:
        """What Triton says of itself and the pool's models; None until known."""
        return self._catalogue

    @catalogue.setter
    def catalogue(self, catalogue: Catalogue | None) -> None:
        if catalogue == self._catalogue:
            return
        self._catalogue = catalogue
        try:
            self._widths = (
                {}
                if catalogue is None
                else widths({name: json.loads(model.config_http) for name, model in catalogue.models.items()})
            )
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("event=catalogue-unreadable pool=%s error=%r", self.name, str(error))
            self._widths = {}
        self._map_places()
        self.sequences.on_catalogue(catalogue)
        self._dispatch()

    # -- what a door asks ---------------------------------------------------------------------------------

    def try_reserve(self, head: RequestHead, *, since: float | None = None) -> Reservation | None:
        """A slot right now, or None: then the request must be held (see :meth:`hold`).

        ``since`` (loop time of its arrival) marks a request that had a slot before, on a replica it did not reach.
        """
        quota = self._quotas.get(head.tenant) if since is None and self._quotas else None
        if quota is not None and quota.wait(head.body_bytes, self._clock()) > 0:
            return None  # hold() tells why
        place = self._pick(head)
        if place is None:
            return None
        if quota is not None:
            quota.take(head.body_bytes)
        self._requests_total += since is None
        return self._take(place, head, held_seconds=0.0 if since is None else self._clock() - since)

    def hold(self, head: RequestHead, *, since: float | None = None) -> Hold:
        """A place in the queue for a request that found no slot.

        ``since`` as in :meth:`try_reserve`: such a request keeps its place in the order of arrival, and the hold
        limit counts from there.

        Raises:
            TidegateError: QUOTA when its tenant has used up its own; HOLD_LIMIT when too many of its class are held;
                NO_REPLICA when holding is off; DEADLINE when the caller's time is up already.
        """
        routing = self.settings.routing
        now = self._clock()
        arrived = now if since is None else since
        quota = None if since is not None else self._quotas.get(head.tenant)
        if quota is not None and (wait := quota.wait(head.body_bytes, now)) > 0:
            # It wakes no pool, and keeps none awake: it is not going to be served.
            message = (
                f"tenant '{head.tenant}' has used up its quota of pool '{self.name}'; retry in {math.ceil(wait)} s"
            )
            raise TidegateError(ErrorKind.QUOTA, message, retry_after_seconds=max(1.0, wait))
        self._requests_total += since is None
        self._last_active = now
        if not self.has_ready_replica:
            self._on_wanted(self.name)
        if routing.hold_limit_seconds == 0:
            raise self.late_error(head, ErrorKind.NO_REPLICA)
        limit = routing.batch_hold_limit_requests if head.batch else routing.hold_limit_requests
        if since is None and self._held.count(batch=head.batch) >= limit:
            kind = "batch" if head.batch else "interactive"
            message = f"pool '{self.name}' holds {limit} requests of class {kind} already, its limit; try again later"
            raise TidegateError(ErrorKind.HOLD_LIMIT, message, retry_after_seconds=self.retry_after(batch=head.batch))
        until, late = arrived + routing.hold_limit_seconds, ErrorKind.NO_REPLICA
        if head.deadline is not None and head.deadline < until:
            until, late = head.deadline, ErrorKind.DEADLINE
        if until <= now:
            raise self.late_error(head, late)
        if quota is not None:
            quota.take(head.body_bytes)
        if not self._held.count(batch=head.batch):
            self._drained[head.batch].on_wait(now)
        hold = Hold(self, head, arrived, until, late)
        self._held.add(hold)
        return hold

    async def reserve(self, head: RequestHead) -> Reservation:
        """A slot, waiting for one as long as the hold limit and the deadline allow. Raises as :meth:`hold` does,
        and NO_REPLICA or DEADLINE when the wait was in vain. Cancelling the caller gives everything back."""
        reservation = self.try_reserve(head)
        if reservation is not None:
            return reservation
        hold = self.hold(head)
        try:
            # Shielded, so that cancelling us does not race with a grant: cancel() below sees either.
            return await asyncio.shield(hold.future)
        except asyncio.CancelledError:
            hold.cancel()
            raise

    @property
    def has_ready_replica(self) -> bool:
        return self.has_ready_replica_for(None)

    def who_answers_for(self, model: str) -> str | None:
        """The model that a replica must have to answer for one that operators have unloaded: the model itself where a
        replica has it still, else None: any replica says in Triton's own words that it is gone.

        Raises:
            TidegateError: NOT_FOUND, in the same words, where no replica is ready to say so.
        """
        if self.has_ready_replica_for(model):
            return model
        if not self.has_ready_replica:
            raise _has_no_versions(model)
        return None

    def has_ready_replica_for(self, model: str | None) -> bool:
        """Whether a ready replica has ``model`` loaded; None asks for any."""
        ready = (slots.lease for slots in self._replicas.values() if slots.lease.state is ReplicaState.READY)
        return any(model is None or model in lease.models for lease in ready)

    @property
    def has_coming_replica(self) -> bool:
        """Whether a replica is ready or about to be."""
        coming = (ReplicaState.READY, ReplicaState.WARMING, ReplicaState.STARTING)
        return any(slots.lease.state in coming for slots in self._replicas.values())

    @property
    def model_names(self) -> frozenset[str]:
        """The models that can be served: those of the settings, but for what operators have changed."""
        return (frozenset(self.settings.model_names) | self.loaded) - self.unloaded

    @property
    def replicas(self) -> list[ReplicaLease]:
        """Every replica known now, whatever its state."""
        return [slots.lease for slots in self._replicas.values()]

    @property
    def held(self) -> int:
        return len(self._held)

    def held_of(self, *, batch: bool) -> int:
        """Held requests of one class."""
        return self._held.count(batch=batch)

    def slots(self) -> dict[str, tuple[int, int]]:
        """Of each model that a ready replica has: slots, and how many of them are taken."""
        return {
            model: (
                sum(min(place.limit, place.replica.limit) for place in places),
                sum(place.in_flight for place in places),
            )
            for model, places in self._places.items()
            if model is not None
        }

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def retry_after_seconds(self) -> float:
        """A believable time until a replica that is not there yet is ready, and not gone again for want of work.
        Seconds."""
        cold_start = self._cold_start_seconds or _ASSUMED_COLD_START_SECONDS
        return max(1.0, min(cold_start, self.settings.scaling.scale_to_zero_delay_seconds))

    def retry_after(self, *, batch: bool) -> float:
        """A believable time until a request of the class finds room: as long as the queue now takes to get through,
        at the pace of late; without a replica, until there is one. Seconds."""
        pace = self._drained[batch].per_second(self._clock()) if self.has_ready_replica else None
        if pace is None:
            return self.retry_after_seconds
        waiting = max(1, self._held.count(batch=batch))
        return min(max(1.0, waiting / pace), max(1.0, self.settings.routing.hold_limit_seconds))

    def retry_after_full(self, *, batch: bool) -> float:
        """The same after a replica said that it is full: at once, that is in the shortest time that can be told, unless
        others wait here. Seconds."""
        return self.retry_after(batch=batch) if self._held.count(batch=batch) else 1.0

    def load(self) -> PoolLoad:
        """This instance's load on the pool, for the autoscaler."""
        busy = self._in_flight > 0 or len(self._held) > 0
        idle = 0.0 if busy else None if self._last_active is None else self._clock() - self._last_active
        return PoolLoad(
            held_interactive=len(self._held) - self._held.jobs,
            held_job=self._held.jobs,
            in_flight_interactive=self._in_flight - self._in_flight_jobs,
            in_flight_job=self._in_flight_jobs,
            in_flight_by_replica={
                key: slots.in_flight for key, slots in (self._replicas | self._leaving).items() if slots.in_flight
            },
            requests_total=self._requests_total,
            idle_seconds=idle,
        )

    # -- what membership tells ----------------------------------------------------------------------------

    def subscribe(self, listener: Callable[["Pool"], None]) -> None:
        """Call ``listener`` after each update of the pool's replicas."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[["Pool"], None]) -> None:
        self._listeners.remove(listener)

    def update(self, leases: Iterable[ReplicaLease]) -> None:
        """The pool's replicas as of now. One that is gone is no longer picked; what is in flight on it goes on,
        and counts again should the replica come back (its lease may have lapsed for a moment only)."""
        seen = {lease.id: lease for lease in leases}
        for gone in self._replicas.keys() - seen.keys():
            self._leaving[gone] = self._replicas.pop(gone)
        for replica_id, lease in seen.items():
            slots = self._replicas.get(replica_id) or self._leaving.pop(replica_id, None)
            if slots is None:
                slots = Slots(lease, self.settings.routing.max_in_flight_per_replica)
            slots.lease = lease
            self._replicas[replica_id] = slots
            if lease.ready_at is not None:
                self._cold_start_seconds = lease.ready_at - lease.started_at
                self._failure_seen = -math.inf
            elif lease.state is ReplicaState.FAILED and lease.reason is not None:
                self._failure = _FOLDERS.sub("", lease.reason)
                self._failure_seen = self._clock()
        self._leaving = {key: slots for key, slots in self._leaving.items() if slots.in_flight}
        self._map_places()
        self.health.on_replicas()
        self.sequences.on_replicas()
        self.announce()
        self._dispatch()

    def announce(self) -> None:
        """Tell who follows the pool that something changed."""
        for listener in self._listeners:
            listener(self)

    # -- slots and the queue ------------------------------------------------------------------------------

    def _map_places(self) -> None:
        """Which models are where, and how many slots each has: read once, so that picking is a look at a list."""
        routing = self.settings.routing
        self._places, self._unslotted = {None: []}, {None: []}
        for slots in sorted(self._replicas.values(), key=lambda slots: (slots.lease.started_at, slots.lease.id)):
            if slots.lease.state is not ReplicaState.READY:
                continue
            self._places[None].append(slots.unslotted)
            self._unslotted[None].append(slots.unslotted)
            for model in slots.lease.models:
                width = self._widths.get(model)
                place = slots.of(model)
                if width is None:
                    place.resize(routing.max_in_flight_per_replica, UNLIMITED)
                else:
                    place.resize(width, slots_for(width, routing.depth_factor))
                self._places.setdefault(model, []).append(place)
                self._unslotted.setdefault(model, []).append(slots.unslotted)

    def _pick(self, head: RequestHead) -> ModelSlots | None:
        if head.replica is not None:
            return self._pick_pinned(head, head.replica)
        places = (self._places if head.slotted else self._unslotted).get(head.model)
        if not places:
            return None
        picked = None
        if self.health.any_silent:
            picked = self._policy([place for place in places if not place.replica.silent], self._turn)
        if picked is None:
            picked = self._policy(places, self._turn)
        if picked is not None:
            self._turn += 1
        return picked

    def _pick_pinned(self, head: RequestHead, replica_id: str) -> ModelSlots | None:
        slots = self._replicas.get(replica_id)
        if slots is None or slots.lease.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            return None
        place = slots.of(head.model) if head.slotted and head.model is not None else slots.unslotted
        return place if slots.in_flight < slots.limit and place.in_flight < place.limit else None

    def _take(self, place: ModelSlots, head: RequestHead, *, held_seconds: float) -> Reservation:
        place.in_flight += 1
        replica = place.replica
        replica.in_flight += 1
        if replica.in_flight == 1:
            self.health.on_first(replica)
        self._in_flight += 1
        self._in_flight_jobs += head.job
        return Reservation(self, place, head, held_seconds)

    def on_answered(self, place: ModelSlots, head: RequestHead) -> None:
        self.health.on_answer(place.replica, self._clock(), timed=head.slotted)
        self.on_release(place, head)

    def on_release(self, place: ModelSlots, head: RequestHead) -> None:
        self._free(place, head)
        if self._held:
            place.on_awaited_release(self._clock())
            self._dispatch()
        else:
            place.released_at = None

    def on_abandon(self, place: ModelSlots, head: RequestHead) -> None:
        self._free(place, head)
        if self._held:
            asyncio.get_running_loop().call_later(_ABANDON_GRACE_SECONDS, self._dispatch)

    def _free(self, place: ModelSlots, head: RequestHead) -> None:
        place.in_flight -= 1
        place.replica.in_flight -= 1
        self._in_flight -= 1
        self._in_flight_jobs -= head.job
        self._last_active = self._clock()

    def _dispatch(self) -> None:
        """Give free slots to held requests."""
        self._held.serve(self._pick, self._grant)

    def _grant(self, hold: Hold, place: ModelSlots) -> None:
        now = self._clock()
        self._drained[hold.head.batch].on_grant(now)
        hold.grant(self._take(place, hold.head, held_seconds=now - hold.since))

    def refuse_unloaded(self) -> None:
        """Requests held for a model that operators have unloaded end as later ones do: nothing brings it back."""
        gone = {model for model in self.unloaded if not self.has_ready_replica_for(model)}
        if gone and self._held:
            self._held.serve(
                lambda head: True if head.model in gone else None,
                lambda hold, _: hold.refuse(_has_no_versions(hold.head.model or "")),
            )

    def refuse_held(self, error: TidegateError) -> None:
        """Every held request ends with ``error``."""
        self._held.serve(lambda _: True, lambda hold, _: hold.refuse(error))

    def on_hold_end(self, hold: Hold) -> None:
        self._held.remove(hold)
        self._last_active = self._clock()

    def late_error(self, head: RequestHead, kind: ErrorKind) -> TidegateError:
        if kind is ErrorKind.DEADLINE:
            return TidegateError(kind, f"the deadline passed while the request was held for pool '{self.name}'")
        what = f"no replica of pool '{self.name}' is ready"
        if self.has_ready_replica:
            what = f"no replica of pool '{self.name}' has a free slot for model '{head.model}'"
        elif self._clock() - self._failure_seen < _FAILURE_KEEP_SECONDS:
            what += f" (the last one that started failed: {self._failure})"
        retry_after = self.retry_after(batch=head.batch)
        return TidegateError(kind, f"{what}; retry in {math.ceil(retry_after)} s", retry_after_seconds=retry_after)


def _has_no_versions(model: str) -> TidegateError:
    """As Triton says it."""
    return TidegateError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{model}' has no available versions")
