"""What may be done about the faults of replicas: which requests may run twice and how many, and what an answer means
in which a replica sends a request away. Pure, one object a pool and gateway instance."""

from enum import Enum

from wire.pools import PoolSettings

#: Repeats that are allowed at once, whatever went before: one replica's worth of broken connections, not an outage's.
_BURST = 10.0


class RetryBudget:
    """A token bucket: each request puts in a share of a repeat, each repeat takes out a whole one. So however long
    replicas fail, repeats add no more than that share to their load."""

    def __init__(self, share: float) -> None:
        """``share``: repeats per request."""
        self._share = share
        self._left = _BURST if share else 0.0

    def on_request(self) -> None:
        self._left = min(self._left + self._share, max(_BURST, self._share))

    def spend(self) -> bool:
        """Whether one more repeat is within the budget; it is taken out then."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Faults:
    """What a pool's settings say about faults."""

    def __init__(self, settings: PoolSettings) -> None:
        routing = settings.routing
        self.repeatable = frozenset(model.name for model in settings.models if model.repeatable)
        """Models that may run twice for one request."""
        self.budget = RetryBudget(routing.retry_budget_share)
        self.first_byte_limit_seconds = routing.first_byte_limit_seconds
        """A replica that has a whole request begins to answer within this time; 0: whenever it likes."""


class SentAway(Enum):
    """Why a replica did not run a request that is none of a caller's faults."""

    QUEUE_FULL = "its batch queue is full"
    NOT_LOADED = "it is unloading the model, or has not loaded it yet"


def sent_away(*, unavailable: bool, message: bytes) -> SentAway | None:
    """What Triton means by an error: ``unavailable`` (503, UNAVAILABLE) or not found (404, NOT_FOUND). None: it is
    about the request, or about something that may have run."""
    if unavailable:
        return SentAway.QUEUE_FULL if b"xceeds maximum queue size" in message else None
    if b"has no available versions" in message:
        return SentAway.NOT_LOADED
    unknown = b"unknown model: '" in message and b"' is not found" in message and b" version " not in message
    return SentAway.NOT_LOADED if unknown else None
