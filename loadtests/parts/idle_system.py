"""Start time and memory of the whole system with its pool at zero, against a bare Ray Serve application."""

import time
from pathlib import Path

from loadtests.measured import Side
from loadtests.processes import descendants
from loadtests.report import Outcome, at_most
from loadtests.serve import plain_serve
from loadtests.setup import Setup
from loadtests.system import running_system

NAME = "idle"
#: What a start stirs up settles: what is measured is the idle system. Seconds.
_SETTLE_SECONDS = 3.0
#: The bare application calls nothing, so there is nothing behind it.
_NOWHERE = Side("nowhere", "127.0.0.1:9", "127.0.0.1:9")


def measure(setup: Setup) -> Outcome:
    outcome = Outcome(NAME)
    bare = [_bare_serve(), _bare_serve()]
    bare_seconds = [seconds for seconds, _ in bare]
    with running_system(setup.folder / "idle", Path("deployments")) as system:
        time.sleep(_SETTLE_SECONDS)
        processes = descendants(system.supervisor)
    by_kind: dict[str, int] = {}
    for process in processes:
        by_kind[process.kind] = by_kind.get(process.kind, 0) + process.rss_bytes
    ray = sum(size for kind, size in by_kind.items() if kind.startswith("ray:") or kind == "gateway driver")
    rest = sum(by_kind.values()) - ray
    outcome.figure("idle: bare Ray Serve start", bare_seconds, "s")
    outcome.figure("idle: up start", [system.start_seconds], "s")
    starts = [system.start_seconds / seconds for seconds in bare_seconds]
    outcome.target("idle: up start / bare Ray Serve start", starts, "ratio", at_most(1.5))
    outcome.figure("idle: bare Ray Serve memory", [size / 1e6 for _, size in bare], "MB")
    outcome.figure("idle: memory of Ray and gateway", [ray / 1e6], "MB")
    outcome.target("idle: memory of the rest of the system", [rest / 1e6], "MB", at_most(400))
    for kind, size in sorted(by_kind.items(), key=lambda item: -item[1]):
        outcome.figure(f"idle: memory of {kind}", [size / 1e6], "MB")
    return outcome


def _bare_serve() -> tuple[float, int]:
    """Seconds to start, and resident bytes of, a Ray Serve application that is not called."""
    with plain_serve(_NOWHERE) as serve:
        time.sleep(_SETTLE_SECONDS)
        return serve.start_seconds, sum(one.rss_bytes for one in descendants(serve.root))
