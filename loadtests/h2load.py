"""The load generator of the side-by-side benchmarks: h2load (Debian package ``nghttp2-client``), a closed loop in C++.

It speaks HTTP/1.1, and HTTP/2 so well that a request with gRPC's five-byte prefix is a gRPC call. It takes any 2xx for
success, and a gRPC error is a 200; so the answers' bytes are counted against what one good answer has.

When its time is up h2load leaves with calls under way. Over gRPC that cancels them, and Triton 2.51 dies of that now
and then (signal 11, no proxy needed); so there it is told a number of requests instead, from the rate seen last.
"""

import math
import re
import shutil
import subprocess
from pathlib import Path

from loadtests.measured import Measured, Side, percentiles
from loadtests.work import Work

_TOTALS = re.compile(r"requests: \d+ total, \d+ started, (\d+) done, (\d+) succeeded")
_FINISHED = re.compile(r"finished in ([0-9.]+)(us|ms|s|m)\b")
_DATA = re.compile(r"headers \(space savings [^)]*\), [^ ]+ \((\d+)\) data")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
#: Beyond its duration, a run that takes this long is stuck. Seconds.
_PATIENCE_SECONDS = 60.0


def installed() -> bool:
    return shutil.which("h2load") is not None


class H2load:
    """See the module. ``folder`` gets the bodies and logs."""

    name = "h2load"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answer_bytes: dict[Work, int] = {}
        self._rates: dict[tuple[Work, str], float] = {}

    def run(self, work: Work, side: Side, *, connections: int, streams: int = 1, seconds: float) -> Measured:
        """``connections`` x ``streams`` callers for about ``seconds``; only the first body of ``work`` is sent.

        Raises:
            RuntimeError: h2load failed, or said something unexpected.
        """
        log = self._folder / "h2load.log"
        log.unlink(missing_ok=True)
        load = ["-c", str(connections), "-m", str(streams), f"--log-file={log}"]
        if work.protocol == "http":
            load += ["-D", f"{seconds * 1000:.0f}ms"]
        else:
            callers = connections * streams
            known = self._rates.get((work, side.name))
            load += ["-n", str(callers if known is None else max(callers, round(known * seconds)))]
        out = self._h2load(work, side, load, seconds + _PATIENCE_SECONDS)
        done, succeeded, data = _totals(out)
        if work.protocol == "grpc":
            seconds = _seconds(out)
            self._rates[work, side.name] = done / seconds
        latencies = [int(line.rsplit(None, 1)[1]) * 1e-6 for line in log.read_text().splitlines()]
        missing_bytes = self._bytes_of_one(work, side) * succeeded - data
        short = math.ceil(missing_bytes / max(1, self._answer_bytes[work])) if missing_bytes > 0 else 0
        return Measured(done, done - succeeded + short, seconds, *percentiles(latencies))

    def _bytes_of_one(self, work: Work, side: Side) -> int:
        if work not in self._answer_bytes:
            done, succeeded, data = _totals(self._h2load(work, side, ["-n", "1"], _PATIENCE_SECONDS))
            if done != 1 or succeeded != 1 or data < len(work.bodies[0]) // 4:
                raise RuntimeError(f"{side.name} does not answer {work.path} as it should: {data} bytes")
            self._answer_bytes[work] = data
        return self._answer_bytes[work]

    def _h2load(self, work: Work, side: Side, load: list[str], limit_seconds: float) -> str:
        body = self._folder / "h2load.body"
        body.write_bytes(work.framed_body)
        headers = [word for name, value in work.headers for word in ("-H", f"{name}: {value}")]
        version = ["--h1"] if work.protocol == "http" else []
        address = side.http if work.protocol == "http" else side.grpc
        command = ["h2load", *version, *load, *headers, "-d", str(body), f"http://{address}{work.path}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
        if ended.returncode:
            raise RuntimeError(f"h2load failed ({ended.returncode}): {ended.stderr.strip() or ended.stdout.strip()}")
        return ended.stdout


def _seconds(out: str) -> float:
    """How long the run took."""
    finished = _FINISHED.search(out)
    if finished is None:
        raise RuntimeError(f"h2load said something unexpected: {out}")
    return float(finished[1]) * _UNITS[finished[2]]


def _totals(out: str) -> tuple[int, int, int]:
    """Requests done, requests with a 2xx, bytes of answers."""
    totals, data = _TOTALS.search(out), _DATA.search(out)
    if totals is None or data is None:
        raise RuntimeError(f"h2load said something unexpected: {out}")
    return int(totals[1]), int(totals[2]), int(data[1])
