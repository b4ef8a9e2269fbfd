"""Processes of this host, read from /proc: whose they are, and that none is left."""

import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Environment variable that every process below a supervisor carries: the path of its tidegate.yaml.
INSTALLATION_VARIABLE = "TIDEGATE_INSTALLATION"
#: Environment variable that names the supervisor's child a process descends from.
CHILD_VARIABLE = "TIDEGATE_CHILD"


@dataclass(frozen=True, slots=True)
class Process:
    """One process. ``start_time`` (clock ticks since boot) tells it from a later one with the same ``pid``."""

    pid: int
    start_time: int
    command: tuple[str, ...]

    @property
    def is_replica(self) -> bool:
        return "run" in self.command and "replica" in self.command

    def __str__(self) -> str:
        return f"{' '.join(self.command)[:120] or '(no command line)'} (pid {self.pid})"


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of ``pid``; None when there is no such process or it is a zombie.

    A process whose first thread has ended while others run looks like a zombie, but still holds its files and ports.
    """
    try:
        # The name in brackets may hold blanks and brackets itself: count from the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "X" or (fields[0] == "Z" and not _has_other_threads(pid)):
        return None
    return int(fields[19])


def _has_other_threads(pid: int) -> bool:
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def resident_bytes(pid: int) -> int | None:
    """Resident memory of ``pid``; None when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def children_of_all() -> dict[int, list[int]]:
    """Every process of this host that has children -> those."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry))
    return children


def memory_bytes(pid: int, children: Mapping[int, Sequence[int]], apart: Collection[int] = ()) -> int | None:
    """Memory of ``pid`` and of all processes below it, but for those ``apart`` and what is below them.

    Memory that processes share is counted once, as the share of each. None when ``pid`` is gone.
    """
    own = _share_bytes(pid)
    if own is None:
        return None
    below = [child for child in children.get(pid, ()) if child not in apart]
    return own + sum(memory_bytes(child, children, apart) or 0 for child in below)


def _share_bytes(pid: int) -> int | None:
    try:
        found = re.search(r"(?m)^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return resident_bytes(pid)  # another user's, gone, or a kernel without it
    return int(found[1]) * 1024 if found else resident_bytes(pid)


def processes_of(config_path: Path, *, child: str | None = None) -> list[Process]:
    """Every living process below a supervisor of ``config_path``, by what it inherited; ``child`` narrows it."""
    wanted = {f"{INSTALLATION_VARIABLE}={config_path}".encode()}
    if child is not None:
        wanted.add(f"{CHILD_VARIABLE}={child}".encode())
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = set(Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"))
            if not wanted <= environment:
                continue
            raw = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue  # gone, or another user's
        started = start_time(int(entry))
        if started is not None:
            command = tuple(part.decode("utf-8", "replace") for part in raw.split(b"\0") if part)
            found.append(Process(int(entry), started, command))
    return found


def is_alive(process: Process) -> bool:
    return start_time(process.pid) == process.start_time


def send(process: Process, number: int) -> None:
    """Signal ``process`` if it is still the one that was found."""
    if is_alive(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def end_all(processes: Iterable[Process], *, polite_seconds: float) -> list[Process]:
    """SIGTERM, and SIGKILL to those that are there after ``polite_seconds``; blocks. Returns what survived that."""
    remaining = list(processes)
    for number, seconds in ((signal.SIGTERM, polite_seconds), (signal.SIGKILL, 5.0)):
        for process in remaining:
            send(process, number)
        limit = time.monotonic() + seconds
        while (remaining := [process for process in remaining if is_alive(process)]) and time.monotonic() < limit:
            time.sleep(0.05)
    return remaining
