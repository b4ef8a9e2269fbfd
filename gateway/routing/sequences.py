"""Which replica holds which sequence: one table a pool, for HTTP, gRPC and streams alike (docs/adr/0007-sequences.md).

A sequence starts on the replica that its name picks among the ready ones, so that gateway instances agree without
asking each other, and stays there. Where it stays is also written to the store, once: another instance, or one for
which the replicas have changed meanwhile, reads it there.
"""

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from wire.errors import ErrorKind, TidegateError
from wire.membership import Catalogue, ReplicaLease, ReplicaState

log = logging.getLogger(__name__)

SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")
#: A sequence is remembered for so much longer than its model keeps it idle: requests are under way, clocks differ.
IDLE_MARGIN_SECONDS = 10.0
#: What Triton takes where a model's config says nothing. Seconds.
_IDLE_SECONDS = 1.0
#: Sequences that one instance remembers of one pool; beyond, those idle longest are left to the store.
SEQUENCES_LIMIT = 65536
#: How often idle sequences are looked for. Seconds.
_SWEEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SequencePart:
    """What a request says of the sequence it belongs to."""

    model: str
    id: str
    """``n:`` and a number or ``s:`` and a text: to Triton 5 and "5" are two sequences."""
    start: bool
    end: bool

    def __str__(self) -> str:
        return f"sequence {self.id[2:]} of model '{self.model}'"


def sequence_part(model: str, parameters: Mapping[str, Any]) -> SequencePart | None:
    """What the parameters of a request say of its sequence; None where they name none that Triton would take."""
    named, start, end = (parameters.get(name) for name in SEQUENCE_PARAMETERS)
    if isinstance(named, str) and named:
        name = f"s:{named}"
    elif isinstance(named, int) and not isinstance(named, bool) and named:
        name = f"n:{named % 2**64}"
    else:
        return None
    return SequencePart(model, name, start is True, end is True)


class Places(Protocol):
    """Where sequences are, as all gateway instances know it; stores.sequences.SequencePlaces is one. Raises
    TidegateError when the store is away."""

    async def claim(self, pool: str, model: str, name: str, replica: str, seconds: float) -> str:
        """Write ``replica``, unless another is written; returns what is written then."""

    async def put(self, pool: str, model: str, name: str, replica: str, seconds: float) -> None: ...

    async def get(self, pool: str, model: str, name: str) -> str | None: ...

    async def drop(self, pool: str, model: str, name: str) -> None: ...


class Follower(Protocol):
    """A request of a sequence that is under way."""

    def on_sequence_replica(self, lost: TidegateError | None) -> None:
        """The sequence's replica takes no more new sequences; ``lost``: it is gone."""


class Replicas(Protocol):
    """The pool, as its sequences see it."""

    name: str

    @property
    def replicas(self) -> Iterable[ReplicaLease]: ...

    def announce(self) -> None:
        """Tell who follows the pool that something changed."""


class Sequence:
    """One live sequence, as this instance knows it."""

    __slots__ = ("followers", "key", "replica", "seen_at", "stored_at", "used_at")

    def __init__(self, key: tuple[str, str], replica: str, now: float) -> None:
        self.key = key
        self.replica = replica
        self.used_at = now
        self.stored_at = now
        self.seen_at = -1
        """At which count of changes of the pool's replicas its place was last known for sure."""
        self.followers: set[Follower] = set()


class Sequences:
    """See the module. ``clock`` is the loop's time."""

    def __init__(self, pool: Replicas, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self.places: Places | None = None
        self.models: dict[str, float] = {}
        """The pool's sequence models, as far as its catalogue is known: seconds for which each keeps an idle one."""
        self._table: OrderedDict[tuple[str, str], Sequence] = OrderedDict()
        self._ready: frozenset[tuple[str, str]] = frozenset()
        self._changes = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._table)

    def on_catalogue(self, catalogue: Catalogue | None) -> None:
        """Which of the pool's models are sequence models."""
        self.models = sequence_models(catalogue)
        self.on_replicas()

    def holds(self, replica_id: str) -> bool:
        """Whether a live sequence is on the replica."""
        return any(sequence.replica == replica_id for sequence in self._table.values())

    # -- a request of a sequence --------------------------------------------------------------------------

    def known_place(self, part: SequencePart) -> str | None:
        """The replica for a request, where this instance knows it for sure; None: ask :meth:`place`.

        Raises:
            TidegateError: SEQUENCE_LOST.
        """
        sequence = self._table.get((part.model, part.id))
        if sequence is None or sequence.seen_at != self._changes:
            return None
        if not part.start:
            self._check(sequence.replica, part)
            return sequence.replica
        return sequence.replica if sequence.replica in self._candidates(part.model) else None

    async def place(self, part: SequencePart, *, but: str | None = None) -> str | None:
        """The replica for a request, with a look into the store. None: no replica is ready, the first one will do.

        ``but``: a replica that could not be reached, for a sequence that starts. Raises as :meth:`known_place`.
        """
        known = self._table.get((part.model, part.id))
        candidates = [replica for replica in self._candidates(part.model) if replica != but]
        choice = rendezvous(part.model, part.id, candidates)
        if not part.start:
            replica = await self._ask(lambda places, *name: places.get(*name), part)
            if replica is None:
                # Nobody knows it: Triton says so in its own words. Or the store is away.
                replica = known.replica if known is not None else choice
        elif choice is None:
            return None
        else:
            wanted, seconds = choice, self._keep_seconds(part.model)
            replica = await self._ask(lambda places, *name: places.claim(*name, wanted, seconds), part)
            if replica is None:
                replica = known.replica if known is not None and known.replica in candidates else choice
            elif replica not in candidates:
                await self._ask(lambda places, *name: places.put(*name, wanted, seconds), part)
                replica = choice
        if replica is None:
            return None
        if not part.start:
            self._check(replica, part)
        return replica

    def join(self, part: SequencePart, replica: str, follower: Follower | None) -> Sequence:
        """A request goes to ``replica``, or waits for it: its sequence is there. ``follower``: who wants to know what
        becomes of that until he leaves."""
        key = (part.model, part.id)
        sequence = self._table.get(key)
        now = self._clock()
        if sequence is None:
            self._make_room()
            sequence = self._table[key] = Sequence(key, replica, now)
            if self._sweeper is None:
                self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
        sequence.replica = replica
        sequence.seen_at = self._changes
        sequence.used_at = now
        if follower is not None:
            sequence.followers.add(follower)
        self._table.move_to_end(key)
        if now - sequence.stored_at > self._keep_seconds(part.model) / 3:
            self.write(sequence)
        return sequence

    def on_stream(self, part: SequencePart, replica: str) -> None:
        """A request comes over a stream to ``replica``: a sequence that starts with it is there from now on.

        Raises:
            TidegateError: SEQUENCE_LOST where its replica is gone, DRAINING where the stream's takes no new sequence,
                BAD_REQUEST where it is on another replica.
        """
        key = (part.model, part.id)
        sequence = self._table.get(key)
        if part.start:
            if replica not in self._candidates(part.model):
                raise TidegateError(ErrorKind.DRAINING, "the replica of this stream is leaving; open a new stream")
        elif sequence is None:
            return  # Triton knows it, or says in its own words that nobody does
        elif sequence.replica != replica:
            self._check(sequence.replica, part)
            message = f"{part} is on another replica than this stream; open a stream for it"
            raise TidegateError(ErrorKind.BAD_REQUEST, message)
        moved = sequence is None or sequence.replica != replica
        sequence = self.join(part, replica, None)
        if moved:
            self.write(sequence)
        if part.end:
            self.leave(sequence, None, ended=True)

    def lives_on(self, key: tuple[str, str], replica: str) -> bool:
        """Whether the sequence ``key`` is live, and on ``replica``."""
        sequence = self._table.get(key)
        return sequence is not None and sequence.replica == replica

    def leave(self, sequence: Sequence, follower: Follower | None, *, ended: bool) -> None:
        """A request is over; ``ended``: the sequence with it."""
        if follower is not None:
            sequence.followers.discard(follower)
        if self._table.get(sequence.key) is not sequence:
            return
        sequence.used_at = self._clock()
        self._table.move_to_end(sequence.key)
        if ended:
            self._forget(sequence)
            self._write(lambda places, *name: places.drop(*name), sequence)

    def write(self, sequence: Sequence) -> None:
        """Tell the other instances where it is."""
        sequence.stored_at = self._clock()
        replica, seconds = sequence.replica, self._keep_seconds(sequence.key[0])
        self._write(lambda places, *name: places.put(*name, replica, seconds), sequence)

    # -- replicas -----------------------------------------------------------------------------------------

    def on_replicas(self) -> None:
        """The pool's replicas have changed: what started before may be elsewhere than its name says now."""
        if not self.models:
            return
        ready = frozenset(
            (lease.id, model)
            for lease in self._pool.replicas
            if lease.state is ReplicaState.READY
            for model in lease.models
            if model in self.models
        )
        if ready != self._ready:
            self._ready = ready
            self._changes += 1
        for sequence in [each for each in self._table.values() if each.followers]:
            if (sequence.replica, sequence.key[0]) in ready:
                continue
            lost = self._is_lost(sequence.replica, sequence.key[0])
            error = _lost(SequencePart(*sequence.key, start=False, end=False)) if lost else None
            for follower in list(sequence.followers):
                follower.on_sequence_replica(error)

    def _candidates(self, model: str) -> list[str]:
        """Where a sequence may start. Not those ejected by this instance only: all instances must agree."""
        return [
            lease.id for lease in self._pool.replicas if lease.state is ReplicaState.READY and model in lease.models
        ]

    def _is_lost(self, replica_id: str, model: str) -> bool:
        lease = next((lease for lease in self._pool.replicas if lease.id == replica_id), None)
        if lease is None or lease.state is ReplicaState.FAILED:
            return True
        return lease.state is ReplicaState.READY and model not in lease.models

    def _check(self, replica_id: str, part: SequencePart) -> None:
        if self._is_lost(replica_id, part.model):
            raise _lost(part)

    # -- the table ----------------------------------------------------------------------------------------

    def _keep_seconds(self, model: str) -> float:
        return self.models.get(model, _IDLE_SECONDS) + IDLE_MARGIN_SECONDS

    def _make_room(self) -> None:
        if len(self._table) >= SEQUENCES_LIMIT:
            oldest = next((each for each in self._table.values() if not each.followers), None)
            if oldest is not None:
                del self._table[oldest.key]

    def _forget(self, sequence: Sequence) -> None:
        del self._table[sequence.key]
        self._tell_if_free(sequence.replica)

    def _tell_if_free(self, replica_id: str) -> None:
        """A replica that drains waits for its last sequence."""
        drains = any(lease.id == replica_id and lease.state is ReplicaState.DRAINING for lease in self._pool.replicas)
        if drains and not self.holds(replica_id):
            self._pool.announce()

    def _sweep(self) -> None:
        """The table is in order of use: who looks from its front need not look at all of it."""
        now = self._clock()
        shortest = min(self.models.values(), default=_IDLE_SECONDS) + IDLE_MARGIN_SECONDS
        overdue = takewhile(lambda each: each.followers or now - each.used_at > shortest, self._table.values())
        for sequence in list(overdue):
            if not sequence.followers and now - sequence.used_at > self._keep_seconds(sequence.key[0]):
                self._forget(sequence)
        self._sweeper = None
        if self._table:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    # -- the store ----------------------------------------------------------------------------------------

    async def _ask(self, question: Callable[..., Awaitable[str | None]], part: SequencePart) -> str | None:
        """None also while the store is away: then the name alone decides, and what this instance knows."""
        if self.places is None:
            return None
        try:
            return await question(self.places, self._pool.name, part.model, part.id)
        except TidegateError as error:
            log.debug("event=sequence-store-away pool=%s error=%r", self._pool.name, error.message)
            return None

    def _write(self, order: Callable[..., Awaitable[None]], sequence: Sequence) -> None:
        if self.places is not None:
            task = asyncio.get_running_loop().create_task(self._carry_out(order, self.places, sequence.key))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _carry_out(self, order: Callable[..., Awaitable[None]], places: Places, key: tuple[str, str]) -> None:
        try:
            await order(places, self._pool.name, *key)
        except TidegateError as error:
            log.debug("event=sequence-store-away pool=%s error=%r", self._pool.name, error.message)


def rendezvous(model: str, sequence_id: str, replicas: Iterable[str]) -> str | None:
    """The replica that a sequence's name picks; whoever knows the same replicas picks the same. One replica more or
    less moves only those names that it wins or had won (highest random weight, Thaler and Ravishankar 1998)."""
    name = f"{model}\0{sequence_id}\0".encode()
    return max(replicas, key=lambda each: hashlib.blake2b(name + each.encode(), digest_size=8).digest(), default=None)


def sequence_models(catalogue: Catalogue | None) -> dict[str, float]:
    """The models whose config has sequence_batching, and for how many seconds each keeps an idle sequence."""
    found: dict[str, float] = {}
    for name, model in ({} if catalogue is None else catalogue.models).items():
        try:
            batching = json.loads(model.config_http).get("sequence_batching")
            if batching is not None:
                idle = int(batching.get("max_sequence_idle_microseconds", 0))
                found[name] = idle / 1e6 if idle else _IDLE_SECONDS
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("event=catalogue-unreadable model=%s error=%r", name, str(error))
    return found


def _lost(part: SequencePart) -> TidegateError:
    message = f"the replica that held {part} is gone, and the sequence's state with it; start the sequence again"
    return TidegateError(ErrorKind.SEQUENCE_LOST, message)
