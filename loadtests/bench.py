"""``make bench``: what the gateway costs, side by side with the Triton behind it, and what an idle system weighs.

Each pair of figures comes from the same minute: direct and gateway take turns, several rounds, and the table shows
the median of the rounds with their spread and the ratio pair by pair. The echo model ``ident`` does no work, so the
gateway's share is as large as it can be; CPU seconds are the gateway's own processes, per 1,000 requests.
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from loadtests import report
from loadtests.closed_loop import Measured, Side, run
from loadtests.processes import cpu_seconds, descendants
from loadtests.system import System, machine, running_system

#: FP32 values per request: 64 bytes, and 12 MB.
_BODIES = {"tiny": 16, "12MB": 3_000_000}
_CALLERS = (1, 16, 64)
_ROUNDS = 3
_SECONDS = 2.0
_DEPLOYMENTS = Path(__file__).parent / "deployments"

#: A Ray Serve application that does nothing, started the plain way: what our start is compared with.
_BARE_SERVE = """
import time; begin = time.perf_counter()
import ray
from ray import serve
ray.init(num_cpus=2, log_to_driver=False, object_store_memory=100 * 2**20)
serve.start(http_options={"host": "127.0.0.1", "port": PORT})
@serve.deployment
class Bare:
    async def __call__(self): return "ok"
serve.run(Bare.bind(), name="bare", route_prefix="/")
print("SECONDS", time.perf_counter() - begin, flush=True)
import sys; sys.stdin.read()
serve.shutdown(); ray.shutdown()
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One protocol, body and number of callers, measured on both sides."""

    protocol: str
    body: str
    callers: int
    direct: list[Measured]
    gateway: list[Measured]
    cpu_per_1000: list[float]

    @property
    def name(self) -> str:
        return f"{self.protocol} {self.body} c={self.callers}"


def main() -> int:
    """Run everything; exit code 1 if a request failed on either side."""
    console = Console(width=140)
    console.print(f"bench: {machine()}; {_ROUNDS} rounds of {_SECONDS:g} s a side, in turns")
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        bare = [_bare_serve(), _bare_serve()]
        rows = _idle_rows(Path(folder) / "idle", median(seconds for seconds, _ in bare), bare[0][1], console)
        with running_system(Path(folder) / "bench", _DEPLOYMENTS, workers={"processes": 0}, queues={}) as system:
            direct = _direct_side(system)
            cells = [
                _measure(protocol, body, callers, direct, system)
                for protocol in ("http", "grpc")
                for body in _BODIES
                for callers in _CALLERS
            ]
    _print_cells(cells, console)
    rows += [row for cell in cells for row in _cell_rows(cell)]
    console.print(f"written to {report.write('bench', rows, Path('reports'))}")
    failures = sum(one.failures for cell in cells for one in (*cell.direct, *cell.gateway))
    return 1 if failures else 0


def _direct_side(system: System) -> Side:
    """The Triton behind the gateway, once it is ready."""
    for _ in range(600):
        for pool in system.status()["pools"]:
            for replica in pool["replicas"]:
                if replica["state"] == "ready":
                    return Side("direct", replica["http_address"], replica["grpc_address"])
        time.sleep(0.2)
    raise TimeoutError("no replica became ready within two minutes")


def _measure(protocol: str, body: str, callers: int, direct: Side, system: System) -> Cell:
    gateway = Side("gateway", system.http, system.grpc)
    instances = [one.pid for one in descendants(system.supervisor) if one.kind == "ray: gateway instance"]
    cell = Cell(protocol, body, callers, [], [], [])
    for _ in range(_ROUNDS):
        cell.direct.append(run(protocol, direct, values=_BODIES[body], callers=callers, seconds=_SECONDS))
        before = cpu_seconds(instances)
        measured = run(protocol, gateway, values=_BODIES[body], callers=callers, seconds=_SECONDS)
        cell.gateway.append(measured)
        cell.cpu_per_1000.append((cpu_seconds(instances) - before) / measured.requests * 1000)
    return cell


def _cell_rows(cell: Cell) -> list[report.Row]:
    ratios = [gateway.per_second / direct.per_second for gateway, direct in zip(cell.gateway, cell.direct, strict=True)]
    return [
        report.plain(f"{cell.name} direct", median(one.per_second for one in cell.direct), "requests/s"),
        report.plain(f"{cell.name} gateway", median(one.per_second for one in cell.gateway), "requests/s"),
        report.plain(f"{cell.name} gateway/direct", median(ratios), "ratio"),
        report.plain(f"{cell.name} direct p50", median(one.p50_seconds for one in cell.direct) * 1e3, "ms"),
        report.plain(f"{cell.name} gateway p50", median(one.p50_seconds for one in cell.gateway) * 1e3, "ms"),
        report.plain(f"{cell.name} gateway CPU", median(cell.cpu_per_1000), "s per 1000 requests"),
        report.at_most(
            f"{cell.name} failures", sum(one.failures for one in (*cell.direct, *cell.gateway)), "requests", 0
        ),
    ]


def _print_cells(cells: list[Cell], console: Console) -> None:
    table = Table("", "direct req/s", "gateway req/s", "ratio", "direct p50 ms", "gateway p50 ms", "gateway CPU s/1000")
    for cell in cells:
        ratios = [one.per_second / two.per_second for one, two in zip(cell.gateway, cell.direct, strict=True)]
        table.add_row(
            cell.name,
            report.spread([one.per_second for one in cell.direct]),
            report.spread([one.per_second for one in cell.gateway]),
            report.spread(ratios),
            report.spread([one.p50_seconds * 1e3 for one in cell.direct]),
            report.spread([one.p50_seconds * 1e3 for one in cell.gateway]),
            report.spread(cell.cpu_per_1000),
        )
    console.print(table)


# -- the idle system ----------------------------------------------------------------------------------------


def _idle_rows(folder: Path, bare_seconds: float, bare_bytes: int, console: Console) -> list[report.Row]:
    """Start time and memory of the whole system with its pool at zero, against a bare Ray Serve application."""
    with running_system(folder, Path("deployments")) as system:
        time.sleep(3.0)  # let the start settle: what is measured is the idle system
        processes = descendants(system.supervisor)
    by_kind: dict[str, int] = {}
    for process in processes:
        by_kind[process.kind] = by_kind.get(process.kind, 0) + process.rss_bytes
    table = Table("process", "resident MB", title="idle system, pool at zero")
    for kind, size in sorted(by_kind.items(), key=lambda item: -item[1]):
        table.add_row(kind, f"{size / 1e6:.0f}")
    console.print(table)
    ray = sum(size for kind, size in by_kind.items() if kind.startswith("ray:") or kind == "gateway driver")
    rest = sum(by_kind.values()) - ray
    return [
        report.plain("bare Ray Serve start", bare_seconds, "s"),
        report.plain("up start", system.start_seconds, "s"),
        report.at_most("up start / bare Ray Serve start", system.start_seconds / bare_seconds, "ratio", 1.5),
        report.plain("bare Ray Serve memory", bare_bytes / 1e6, "MB"),
        report.plain("idle memory, Ray and gateway", ray / 1e6, "MB"),
        report.at_most("idle memory, the rest of the system", rest / 1e6, "MB", 400),
        *(report.plain(f"idle memory, {kind}", size / 1e6, "MB") for kind, size in sorted(by_kind.items())),
    ]


def _bare_serve() -> tuple[float, int]:
    """Seconds to start, and resident bytes of, a Ray Serve application that does nothing."""
    code = _BARE_SERVE.replace("PORT", "18000")
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith("SECONDS"):
                time.sleep(3.0)
                return float(line.split()[1]), sum(one.rss_bytes for one in descendants(child.pid))
        raise RuntimeError(f"a bare Ray Serve application did not start (exit code {child.wait()})")
    finally:
        child.stdin.close()
        child.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main())
