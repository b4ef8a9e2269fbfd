"""Whether, and when, a call to the gateway is made again. Pure: the clock and the dice are arguments."""

import re
from dataclasses import dataclass, replace

from wire.errors import ERRORS, ErrorKind

#: The first gap; each next one is twice as long, up to the greatest. Seconds.
_FIRST_GAP = 0.1
_GREATEST_GAP = 5.0
#: Callers that the gateway told the same time come back spread over this long after it. Seconds.
_SPREAD_SECONDS = 1.0
#: A call that cost this many replicas is at fault itself; trying on would take the pool down for everybody.
MOST_LOST_REPLICAS = 3
#: Triton's own answer, with status 500, when a process of its Python backend is dead: not the request is at fault, or
#: not this one. It says so to everybody until the replica has left, which is known to gateways within this time.
_BROKEN_REPLICA = re.compile(r"[Ss]tub process\b.*\b(?:not healthy|unhealthy)")
_BROKEN_SECONDS = 3.0
_NOT_OF_THE_REQUEST = frozenset((ErrorKind.REPLICA_LOST, ErrorKind.UNAUTHENTICATED, ErrorKind.FORBIDDEN))


@dataclass(frozen=True, slots=True)
class CallFailure:
    """One failed call.

    ``status`` is the HTTP status, None when no answer came (refused, cut off: the gateway is away or restarting).
    ``kind`` is the gateway's own word for it; None when the answer is Triton's, or there is none.
    """

    status: int | None
    kind: ErrorKind | None
    message: str
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Attempts:
    """What was tried so far for one call."""

    made: int = 0
    lost_replicas: int = 0

    def after(self, failure: CallFailure) -> "Attempts":
        # The request that breaks a replica gets the same answer as those that come after it, so each one counts. The
        # gap makes sure that the next one is of another replica.
        lost = self.lost_replicas + (failure.kind is ErrorKind.REPLICA_LOST or _says_replica_is_broken(failure))
        return replace(self, made=self.made + 1, lost_replicas=lost)


class InferenceFailed(Exception):
    """A call was given up. ``failure`` is the last one; ``attempts`` all of them."""

    def __init__(self, model: str, failure: CallFailure, attempts: Attempts) -> None:
        super().__init__(f"model {model}: {failure.message}")
        self.failure = failure
        self.attempts = attempts


@dataclass(frozen=True, slots=True)
class Retry:
    """Call again after this time."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not call again. ``out_of_time``: the failure would have been worth another try."""

    out_of_time: bool = False


def next_step(attempts: Attempts, failure: CallFailure, remaining_seconds: float, dice: float) -> Retry | GiveUp:
    """What to do after ``failure``.

    ``attempts`` includes the failed one; ``remaining_seconds`` is the time left to the job; ``dice`` in [0, 1) spreads
    callers that failed together.
    """
    if not _worth_another(failure) or attempts.lost_replicas >= MOST_LOST_REPLICAS:
        return GiveUp()
    # Doubling stops long before the exponent could grow without bound.
    gap = min(_GREATEST_GAP, _FIRST_GAP * 2.0 ** min(attempts.made - 1, 16))
    if _says_replica_is_broken(failure):
        least = _BROKEN_SECONDS
    else:
        # Those who were told the same time shall not all come at that time.
        least = 0.0 if failure.retry_after_seconds is None else failure.retry_after_seconds + dice * _SPREAD_SECONDS
    delay = max(gap * (0.5 + dice / 2), least)
    return Retry(delay) if delay < remaining_seconds else GiveUp(out_of_time=True)


def _worth_another(failure: CallFailure) -> bool:
    if failure.status is None:
        return True
    if failure.kind is not None:
        # A lost replica may have run the request. Handlers only ask for inference, which changes nothing on the
        # replica, so a job may ask twice; other callers of the gateway cannot assume that. A key that is not known is
        # the worker's fault, not the job's, and somebody will put it right.
        return ERRORS[failure.kind].retryable or failure.kind in _NOT_OF_THE_REQUEST
    # Triton's own 503: its batch queue is full, or the model is being loaded.
    return failure.status == 503 or _says_replica_is_broken(failure)


def _says_replica_is_broken(failure: CallFailure) -> bool:
    return failure.kind is None and failure.status == 500 and _BROKEN_REPLICA.search(failure.message) is not None
