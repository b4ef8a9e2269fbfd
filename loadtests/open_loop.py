"""Callers who come when they come: an open loop over HTTP at a given mean rate, for latencies as people feel them.

Arrivals are independent of answers, and a latency counts from the arrival, so that time spent waiting behind a slow
answer is not left out of the figures.
"""

import asyncio
import random
import time
from contextlib import AsyncExitStack

import uvloop

from loadtests.closed_loop import Call, http_caller
from loadtests.measured import Measured, Side, percentiles
from loadtests.work import Work


def run(work: Work, side: Side, *, per_second: float, seconds: float, rng: random.Random) -> Measured:
    """Send ``work`` with exponentially distributed pauses drawn from ``rng``; returns when all is answered."""
    return uvloop.run(_run(work, side, per_second, seconds, rng))


async def _run(work: Work, side: Side, rate: float, seconds: float, rng: random.Random) -> Measured:
    latencies: list[float] = []
    failures = 0
    free: list[Call] = []

    async with AsyncExitStack() as stack:

        async def one(arrived: float) -> None:
            nonlocal failures
            call = free.pop() if free else await http_caller(stack, side.http, work, 0)
            if await call():
                free.append(call)
            else:
                failures += 1
            latencies.append(time.perf_counter() - arrived)

        begin = arrival = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while (arrival := arrival + rng.expovariate(rate)) < begin + seconds:
                await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
                group.create_task(one(arrival))
        elapsed = time.perf_counter() - begin
    return Measured(len(latencies), failures, elapsed, *percentiles(latencies))
