"""The price of the hop over HTTP: an echo of 64 bytes, so that almost nothing but passing on is measured."""

from loadtests.measured import Measured, Side
from loadtests.report import Outcome, at_least, at_most
from loadtests.rounds import Series, cpu_us, in_turns, p50_ms, p99_ms, per_second
from loadtests.setup import Setup
from loadtests.work import http_echo

NAME = "http"
_ROUNDS = 5
_SECONDS = 2.0
_CALLERS = (1, 16, 64)
#: What one lone call may cost more than without a proxy. Milliseconds.
_HOP_MS = 0.35


def measure(setup: Setup) -> Outcome:
    outcome = Outcome(NAME)
    for callers in _CALLERS:
        series = _series(setup, callers)
        outcome.add(series)
        _targets(outcome, series, callers)
    return outcome


def _series(setup: Setup, callers: int) -> Series:
    name = f"http 64 bytes, {callers} caller{'s' * (callers > 1)}"
    work = http_echo(16)

    def run(side: Side, seconds: float) -> Measured:
        return setup.generator.run(work, side, connections=callers, seconds=seconds)

    return in_turns(name, [*setup.sides, setup.serve], _ROUNDS, _SECONDS, run)


def _targets(outcome: Outcome, series: Series, callers: int) -> None:
    name = series.name
    if callers == 1:
        pairs = zip(series.each("gateway", p50_ms), series.each("direct", p50_ms), strict=True)
        outcome.target(f"{name}: p50 gateway/envoy", series.ratio("gateway", "envoy", p50_ms), "ratio", at_most(1.0))
        outcome.target(f"{name}: p50 gateway-direct", [one - two for one, two in pairs], "ms", at_most(_HOP_MS))
        return
    outcome.target(f"{name}: p99 gateway/envoy", series.ratio("gateway", "envoy", p99_ms), "ratio", at_most(1.0))
    if callers == max(_CALLERS):
        speed, cost = series.ratio("gateway", "envoy", per_second), series.ratio("gateway", "envoy", cpu_us)
        outcome.target(f"{name}: requests/s gateway/envoy", speed, "ratio", at_least(1.1))
        outcome.target(f"{name}: CPU per request gateway/envoy", cost, "ratio", at_most(1.0))
