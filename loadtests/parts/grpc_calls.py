"""The price of the hop over gRPC: unary calls, and a decoupled model's stream of replies. 64 bytes each."""

from loadtests.report import Outcome, at_least, at_most
from loadtests.rounds import cpu_us, in_turns, per_second
from loadtests.setup import Setup
from loadtests.work import grpc_echo, grpc_repeat

NAME = "grpc"
_ROUNDS = 5
_SECONDS = 2.0
_CONNECTIONS, _STREAMS = 8, 8
_REPLIES = 100
#: A stream of 100 replies keeps Triton's stub busy; more streams at once would only wait there.
_STREAM_CONNECTIONS, _STREAM_STREAMS = 4, 2


def measure(setup: Setup) -> Outcome:
    outcome = Outcome(NAME)
    unary = in_turns(
        f"gRPC unary 64 bytes, {_CONNECTIONS} connections x {_STREAMS} streams",
        setup.sides,
        _ROUNDS,
        _SECONDS,
        lambda side, seconds: setup.generator.run(
            grpc_echo(16), side, connections=_CONNECTIONS, streams=_STREAMS, seconds=seconds
        ),
    )
    outcome.add(unary)
    speed, cost = unary.ratio("gateway", "envoy", per_second), unary.ratio("gateway", "envoy", cpu_us)
    outcome.target(f"{unary.name}: requests/s gateway/envoy", speed, "ratio", at_least(1.0))
    outcome.target(f"{unary.name}: CPU per request gateway/envoy", cost, "ratio", at_most(1.0))
    stream = in_turns(
        f"gRPC stream of {_REPLIES} replies, {_STREAM_CONNECTIONS} connections x {_STREAM_STREAMS} streams",
        setup.sides,
        _ROUNDS,
        _SECONDS,
        lambda side, seconds: setup.generator.run(
            grpc_repeat(16, _REPLIES), side, connections=_STREAM_CONNECTIONS, streams=_STREAM_STREAMS, seconds=seconds
        ),
    )
    outcome.add(stream)
    outcome.target(
        f"{stream.name}: streams/s gateway/envoy", stream.ratio("gateway", "envoy", per_second), "ratio", at_least(1.0)
    )
    return outcome
