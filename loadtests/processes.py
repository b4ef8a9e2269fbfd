"""CPU time and memory of the system's processes, read from ``/proc``."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process: what it is in one word, and its resident memory in bytes."""

    pid: int
    kind: str
    rss_bytes: int


def descendants(root: int) -> list[Process]:
    """``root`` and every process below it, children of children included."""
    parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    family = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            break
        family |= more
    return [Process(pid, _kind(pid), rss_bytes(pid)) for pid in sorted(family) if Path(f"/proc/{pid}").exists()]


def cpu_seconds(pids: Iterable[int]) -> float:
    """User plus system time of ``pids`` so far; processes that are gone count nothing."""
    return sum(sum(user_and_system_seconds(pid)) for pid in pids)


def user_and_system_seconds(pid: int) -> tuple[float, float]:
    """CPU time of all threads so far, in the program and in the kernel; zeros for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0, 0.0
    return int(fields[11]) / _TICKS, int(fields[12]) / _TICKS


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def rss_bytes(pid: int) -> int:
    """Resident memory now; 0 for a process that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _kind(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return "gone"
    for needle, kind in _KINDS:
        if needle in words:
            return kind
    return words.split(" ", 1)[0].rsplit("/", 1)[-1] or "kernel"


#: First match wins; what is Ray's is told apart from what is ours.
_KINDS = (
    ("tidegate run supervisor", "supervisor"),
    ("tidegate run gateway", "gateway driver"),
    ("tidegate-ray-watch", "gateway driver"),
    ("tidegate run autoscaler", "autoscaler"),
    ("tidegate run worker", "worker"),
    ("tidegate run replica", "replica agent"),
    ("ray::ServeReplica", "ray: gateway instance"),
    ("ray::ProxyActor", "ray: serve proxy"),
    ("ray::ServeController", "ray: serve controller"),
    ("ray::", "ray: agents"),
    ("gcs_server", "ray: gcs"),
    ("raylet/raylet", "ray: raylet"),
    ("/ray/", "ray: other"),
    ("triton_python_backend_stub", "triton stub"),
    ("tritonserver", "tritonserver"),
    ("valkey-server", "valkey"),
)
