"""The gateway beside Triton itself over both protocols, for a tiny and a large body and one to many callers.

By our own client for every cell, so that protocols and sizes can be read beside each other.
"""

from loadtests.measured import Measured, Side
from loadtests.report import Outcome
from loadtests.rounds import Series, in_turns
from loadtests.setup import Setup
from loadtests.work import Work, grpc_echo, http_echo

NAME = "hop"
_ROUNDS = 2
_SECONDS = 2.0
_CALLERS = (1, 16, 64)
_VALUES = {"64 bytes": 16, "12 MB": 3_000_000}
#: Over gRPC, callers beyond these share connections. Connections.
_CHANNELS = 8


def measure(setup: Setup) -> Outcome:
    outcome = Outcome(NAME)
    for size, values in _VALUES.items():
        for work in (http_echo(values), grpc_echo(values)):
            for callers in _CALLERS:
                outcome.add(_series(setup, f"{work.protocol} {size}, {callers} callers", work, callers))
    return outcome


def _series(setup: Setup, name: str, work: Work, callers: int) -> Series:
    connections = callers if work.protocol == "http" else min(callers, _CHANNELS)

    def run(side: Side, seconds: float) -> Measured:
        return setup.closed_loop.run(
            work, side, connections=connections, streams=callers // connections, seconds=seconds
        )

    sides = [side for side in setup.sides if side.name in ("direct", "gateway")]
    return in_turns(name, sides, _ROUNDS, _SECONDS, run)
