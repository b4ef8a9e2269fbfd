"""Which replica gets the next request. Pure: candidates in, one of them out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready replica that has the model and a free slot."""

    replica_id: str
    in_flight: int


def least_in_flight(candidates: Sequence[Candidate], turn: int) -> Candidate | None:
    """The candidate with the fewest requests in flight; equals take turns. None when there is none.

    ``turn`` grows by one with each pick, so that equal candidates share the load evenly.
    """
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    fewest = min(candidate.in_flight for candidate in candidates)
    equals = [candidate for candidate in candidates if candidate.in_flight == fewest]
    return equals[turn % len(equals)]
