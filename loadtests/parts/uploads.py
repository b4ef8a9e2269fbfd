"""Large bodies: 12 MB in and out, and what sixteen of them do to a proxy whose replica takes nothing."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack

from loadtests.closed_loop import http_caller
from loadtests.measured import Side
from loadtests.processes import rss_bytes
from loadtests.report import Outcome, at_least, at_most
from loadtests.rounds import in_turns, per_second
from loadtests.setup import Setup
from loadtests.work import Work, http_echo

NAME = "uploads"
_ROUNDS = 5
_SECONDS = 3.0
_CALLERS = 4
_VALUES = 3_000_000
_STALLED_CALLERS = 16
_STALLED_SECONDS = 2.0
_STALLED_LIMIT_MB = 64.0


def measure(setup: Setup) -> Outcome:
    outcome, work = Outcome(NAME), http_echo(_VALUES)
    pid = setup.echo.triton_pid(setup.sides[0])
    for side in setup.sides[1:]:
        growth, failures = asyncio.run(_stalled(work, side, pid))
        name = f"{_STALLED_CALLERS} uploads of 12 MB to a stalled replica: {side.name}"
        if side.name == "gateway":
            outcome.target(f"{name} growth", [growth], "MB", at_most(_STALLED_LIMIT_MB))
            outcome.target(f"{name} failures", [failures], "requests", at_most(0))
        else:
            outcome.figure(f"{name} growth", [growth], "MB")
            outcome.figure(f"{name} failures", [failures], "requests")
    series = in_turns(
        f"http 12 MB, {_CALLERS} callers",
        setup.sides,
        _ROUNDS,
        _SECONDS,
        # By our own client: h2load answered nothing at all in some rounds with such bodies, before Triton itself too.
        lambda side, seconds: setup.closed_loop.run(work, side, connections=_CALLERS, seconds=seconds),
    )
    outcome.add(series)
    speed = series.ratio("gateway", "envoy", per_second)
    outcome.target(f"{series.name}: requests/s gateway/envoy", speed, "ratio", at_least(1.0))
    for side in setup.sides[1:]:
        outcome.figure(f"{series.name}: {side.name} memory after", [_rss_mb(side)], "MB")
    return outcome


async def _stalled(work: Work, side: Side, triton_pid: int) -> tuple[float, int]:
    """Megabytes by which the side grew while its replica took nothing, and how many answers were bad afterwards."""
    async with AsyncExitStack() as stack:
        calls = [await http_caller(stack, side.http, work, 0) for _ in range(_STALLED_CALLERS)]
        before = _rss_mb(side)
        os.kill(triton_pid, signal.SIGSTOP)
        try:
            running = [asyncio.create_task(call()) for call in calls]
            seen = []
            for _ in range(int(_STALLED_SECONDS / 0.05)):
                await asyncio.sleep(0.05)
                seen.append(_rss_mb(side))
        finally:
            os.kill(triton_pid, signal.SIGCONT)
        answers = await asyncio.gather(*running)
    return max(seen) - before, answers.count(False)


def _rss_mb(side: Side) -> float:
    return sum(rss_bytes(pid) for pid in side.pids) / 1e6
