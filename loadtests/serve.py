"""Starts and stops :mod:`loadtests.plain_serve`."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loadtests.measured import Side
from loadtests.processes import descendants
from loadtests.system import free_ports


@dataclass(frozen=True, slots=True)
class PlainServe:
    """Ray Serve with a pass-through application: where it is, how long its start took, all its processes."""

    side: Side
    start_seconds: float
    root: int


@contextmanager
def plain_serve(upstream: Side) -> Iterator[PlainServe]:
    """Ray Serve's own proxy and a pass-through application in front of ``upstream``; HTTP only.

    Raises:
        RuntimeError: it did not start.
    """
    port = free_ports(1)[0]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the child)
    child = subprocess.Popen(
        [sys.executable, "-m", "loadtests.plain_serve", str(port), upstream.http],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        seconds = next((float(line.split()[1]) for line in child.stdout if line.startswith("SECONDS")), None)
        if seconds is None:
            code = child.wait()
            log.seek(0)
            raise RuntimeError(f"a plain Ray Serve application did not start (exit code {code}): {log.read()[-2000:]}")
        passing = ("ray: serve proxy", "ray: gateway instance")
        pids = tuple(one.pid for one in descendants(child.pid) if one.kind in passing)
        yield PlainServe(Side("ray serve", f"127.0.0.1:{port}", "", pids), seconds, child.pid)
    finally:
        child.stdin.close()
        child.wait(timeout=60)
        log.close()
