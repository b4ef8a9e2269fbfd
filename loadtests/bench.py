"""``make bench``: what the gateway costs beside bare Triton, beside Envoy and beside Ray Serve's own proxy.

All sides are driven by the same generator and stand before the same Triton, take turns, several rounds, and the tables
show medians with their spread and ratios round by round. Everything the gateway does is on. Client, proxy and Triton
share the machine, so read the ratios.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from loadtests import report
from loadtests.parts import classifier, connections, grpc_calls, hop, idle_system, slow_replica, tiny_http, uploads
from loadtests.report import Outcome
from loadtests.setup import Setup
from loadtests.system import machine

_PARTS: dict[str, Callable[[Setup], Outcome]] = {
    part.NAME: part.measure
    for part in (idle_system, hop, tiny_http, uploads, grpc_calls, connections, classifier, slow_replica)
}
_REPORTS = Path("reports")


def main(argv: list[str]) -> int:
    """Run the parts asked for; exit code 1 if a request failed that may not."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench", description="Side-by-side benchmarks.")
    parser.add_argument("--only", action="append", choices=list(_PARTS), help="run this part alone; may be repeated")
    chosen = parser.parse_args(argv).only or list(_PARTS)
    console = Console(width=140)
    outcomes = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the stack, so that nothing is left running
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder, ExitStack() as stack:
        setup = Setup(Path(folder), stack)
        console.print(f"bench: {machine()}; load from {setup.generator.name}")
        for part in chosen:
            begin = time.perf_counter()
            outcomes.append(_PARTS[part](setup))
            report.show(outcomes[-1], console)
            written = report.write(outcomes[-1:], list(_PARTS), _REPORTS)  # at once: a later part may fail
            console.print(f"{part}: {time.perf_counter() - begin:.0f} s")
    console.print(f"written to {written}")
    return 0 if all(outcome.all_answered for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
