"""Sides in turns, several rounds: what is compared comes from the same minute, and no side is always first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from loadtests.measured import Measured, Side
from loadtests.processes import cpu_seconds
from loadtests.work import Work

_WARM_SECONDS = 0.3


class Generator(Protocol):
    """What sends the requests: ``h2load``, or our own closed loop where that is not installed."""

    name: str

    def run(self, work: Work, side: Side, *, connections: int, streams: int = 1, seconds: float) -> Measured: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one side. ``cpu_us`` is what its proxy spent a request, in microseconds; 0 for Triton itself."""

    measured: Measured
    cpu_us: float


@dataclass(frozen=True)
class Series:
    """All rounds of one kind of work: ``samples[side][round]``."""

    name: str
    samples: dict[str, list[Sample]]

    def each(self, side: str, figure: Callable[[Sample], float]) -> list[float]:
        """One figure of each round."""
        return [figure(sample) for sample in self.samples[side]]

    def median(self, side: str, figure: Callable[[Sample], float]) -> float:
        return median(self.each(side, figure))

    def ratio(self, side: str, other: str, figure: Callable[[Sample], float]) -> list[float]:
        """``side`` over ``other``, round by round."""
        pairs = zip(self.each(side, figure), self.each(other, figure), strict=True)
        return [one / two for one, two in pairs]

    def failures(self, side: str) -> int:
        return sum(sample.measured.failures for sample in self.samples[side])


def per_second(sample: Sample) -> float:
    return sample.measured.per_second


def p50_ms(sample: Sample) -> float:
    return sample.measured.p50_seconds * 1e3


def p99_ms(sample: Sample) -> float:
    return sample.measured.p99_seconds * 1e3


def cpu_us(sample: Sample) -> float:
    return sample.cpu_us


def in_turns(
    name: str, sides: Sequence[Side], rounds: int, seconds: float, run: Callable[[Side, float], Measured]
) -> Series:
    """Run every side for ``seconds`` a round, each round beginning with another; before that, a moment to warm up.

    Raises:
        RuntimeError: a side answered nothing in a round; no figure could be made of the rest.
    """
    for side in sides:
        run(side, _WARM_SECONDS)
    samples: dict[str, list[Sample]] = {side.name: [] for side in sides}
    for number in range(rounds):
        first = number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            before = cpu_seconds(side.pids)
            measured = run(side, seconds)
            spent = cpu_seconds(side.pids) - before
            if not measured.requests:
                raise RuntimeError(f"{name}: {side.name} answered nothing in round {number + 1}")
            samples[side.name].append(Sample(measured, spent / measured.requests * 1e6))
    return Series(name, samples)
