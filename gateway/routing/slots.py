"""How many requests a replica takes at once: of each model as many as keep its batcher full, the rest wait here.

A request that waits in the gateway can still be ordered, cancelled and moved to another replica; one that waits in
Triton cannot. So a replica is given what it executes now, and as much again as it needs to go on without a pause.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from wire.membership import ReplicaLease

if TYPE_CHECKING:
    from gateway.routing.health import Doubt

#: What a replica works off in this time may be sent ahead whatever its batches: so short a wait in Triton is not
#: worth ordering, and a model that takes a tenth of a millisecond would idle between two requests. Seconds.
AHEAD_SECONDS = 0.02
#: How much one gap between two answers counts in the running mean of gaps.
_GAP_WEIGHT = 1 / 64
#: As good as no limit.
UNLIMITED = 2**31


class Slots:
    """A replica as the pool sees it: its lease, and the requests this gateway instance has on it."""

    __slots__ = (
        "by_model",
        "doubt",
        "gap",
        "heard_at",
        "in_flight",
        "lease",
        "limit",
        "mute_since",
        "silent",
        "unslotted",
    )

    def __init__(self, lease: ReplicaLease, limit: int) -> None:
        self.lease = lease
        self.in_flight = 0
        self.limit = limit
        """Requests it may have at once, of all models together; 0 while it is not to be picked."""
        self.doubt: Doubt | None = None
        """Set while the replica is not trusted, see health.py."""
        self.heard_at = 0.0
        """When it last answered, or got a request after having had none."""
        self.mute_since: float | None = None
        """When it got the first request after its last answer, if it had none then."""
        self.gap: float | None = None
        """Running mean of the time between two of its answers while it has something to answer. Seconds."""
        self.silent = False
        self.by_model: dict[str, ModelSlots] = {}
        self.unslotted = ModelSlots(self, 1, UNLIMITED)
        """Where requests count that take none of a model's slots."""

    @property
    def awaited(self) -> int:
        """Requests that it is expected to answer soon: not streams."""
        return self.in_flight - self.unslotted.in_flight

    def of(self, model: str) -> "ModelSlots":
        """The slots of one model."""
        found = self.by_model.get(model)
        if found is None:
            found = self.by_model[model] = ModelSlots(self, 1, UNLIMITED)
        return found


class ModelSlots:
    """One model on one replica: a place where a request may go."""

    __slots__ = ("_base", "_gap", "in_flight", "limit", "released_at", "replica", "width")

    def __init__(self, replica: Slots, width: int, base: int) -> None:
        self.replica = replica
        self.in_flight = 0
        self.width = width
        """Requests that it executes at once."""
        self.limit = base
        """Requests it may have at once."""
        self._base = base
        self._gap: float | None = None
        self.released_at: float | None = None
        """When it last freed a slot that others waited for; None when nobody waited the last time."""

    def resize(self, width: int, base: int) -> None:
        """What the model's config says."""
        self.width = width
        if base != self._base:
            self._base = self.limit = base
            self._gap = None

    def on_awaited_release(self, now: float) -> None:
        """A request is done and others wait: the time between two answers tells how fast the replica is, and not how
        few ask."""
        if self.released_at is not None:
            gap = now - self.released_at
            self._gap = gap if self._gap is None else self._gap + (gap - self._gap) * _GAP_WEIGHT
            self.limit = max(self._base, int(AHEAD_SECONDS / max(self._gap, 1e-6)))
        self.released_at = now


def widths(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Requests that one replica executes at once, for each model of which its Triton config tells.

    Each request counts as one, whatever its own batch: what is in a request is not read here. A model is left out
    where a bound would do harm or mean nothing: sequences wait in Triton for their own kind of slot, a decoupled model
    may take a request and return at once, and the steps of an ensemble must all be known.
    """
    found = {name: width for name, config in configs.items() if (width := _width(config)) is not None}
    for name, config in configs.items():
        if "ensemble_scheduling" in config:
            steps = [found.get(str(step.get("model_name"))) for step in config["ensemble_scheduling"].get("step", ())]
            if steps and None not in steps:
                # One request is in one step at a time: to keep all of them busy, each needs its own.
                found[name] = sum(step for step in steps if step is not None)
    return found


def slots_for(width: int, depth_factor: float) -> int:
    """Slots of a model that executes ``width`` requests at once."""
    return math.ceil(width * depth_factor)


def _width(config: Mapping[str, Any]) -> int | None:
    unbounded = ("sequence_batching", "ensemble_scheduling")
    decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    if decoupled or any(key in config for key in unbounded):
        return None
    # Without a dynamic batcher Triton executes one request at a time, whatever max_batch_size allows in it.
    batch = int(config.get("max_batch_size", 0)) if "dynamic_batching" in config else 1
    return max(1, batch) * max(1, _instances(config.get("instance_group", ())))


def _instances(groups: Iterable[Mapping[str, Any]]) -> int:
    return sum(
        int(group.get("count", 1)) * max(1, len(group.get("gpus", ())))
        for group in groups
        if not group.get("passive", False)
    )
