"""One slow replica of three: stopped for two seconds at random, again and again, under callers who keep coming.

Few calls meet the stopped replica, whoever balances: by least requests it is avoided as soon as one to three calls wait
there. So callers come one by one, not in crowds, and the stops are frequent: then even one call a stop is more than
one in a hundred, and the 99th percentile tells how long it waits. (At 40 calls/s that one is less than one in a
hundred, and the percentile of a gateway that counts exactly looks good without any ejection.)
"""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from loadtests import open_loop
from loadtests.envoy import envoy
from loadtests.measured import Measured, Side
from loadtests.report import Outcome, at_most
from loadtests.rounds import in_turns, p99_ms
from loadtests.setup import Setup
from loadtests.work import DEPLOYMENTS, http_echo

NAME = "slow-replica"
_REPLICAS = 3
_ROUNDS = 3
_SECONDS = 20.0
_PER_SECOND = 15.0
_STOPPED_SECONDS = 2.0
#: Bounds of the pause between two stops. Seconds.
_PAUSE_SECONDS = (0.5, 2.5)
_LIMIT = 0.3
#: The echo takes 2 ms; a call that waits this long is better sent to another replica.
_FIRST_BYTE_SECONDS = 0.2
_POOL: dict[str, object] = {
    "models": [{"name": "ident", "repeatable": True}],
    "routing": {"first_byte_limit_seconds": _FIRST_BYTE_SECONDS},
    "scaling": {"min_replicas": _REPLICAS, "max_replicas": _REPLICAS},
}


def measure(setup: Setup) -> Outcome:
    outcome = Outcome(NAME)
    with setup.system("slow", setup.pool("slow", DEPLOYMENTS / "bench", _POOL)) as system:
        replicas = system.replicas(_REPLICAS)
        victim = system.triton_pid(replicas[0])
        rounds = iter(range(1_000_000))

        def run(side: Side, seconds: float) -> Measured:
            # Every side gets the same arrivals and the same stops in the same round.
            seed = next(rounds) // len(sides)
            with _stopped_at_random(victim, random.Random(f"stops {seed}")):
                return open_loop.run(
                    http_echo(16), side, per_second=_PER_SECOND, seconds=seconds, rng=random.Random(f"calls {seed}")
                )

        with envoy(setup.folder / "envoy-slow", replicas) as proxy:
            sides = [system.gateway(), proxy]
            name = f"one slow replica of {_REPLICAS}, {_PER_SECOND:g} calls/s"
            series = in_turns(name, sides, _ROUNDS, _SECONDS, run)
    outcome.add(series)
    ratios = series.ratio("gateway", "envoy", p99_ms)
    outcome.target(f"{name}: p99 gateway/envoy", ratios, "ratio", at_most(_LIMIT))
    return outcome


@contextmanager
def _stopped_at_random(pid: int, rng: random.Random) -> Iterator[None]:
    """Inside, the process stops for two seconds at random times."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.wait(rng.uniform(*_PAUSE_SECONDS)):
            os.kill(pid, signal.SIGSTOP)
            over.wait(_STOPPED_SECONDS)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
