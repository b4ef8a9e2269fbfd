"""The replica processes of one installation, found by what they were started with. Linux only.

There are no pid files: a file can be older or younger than its process, a command line cannot. A replica is a session
leader whose arguments are exactly ours, config path included, so that another installation's replicas, a shell that
mentions one, or a child that was forked and has not executed its own program yet are never taken for one.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_OPTIONS = {"--pool", "--id", "--config", "--lifeline-fd"}


@dataclass(frozen=True, slots=True)
class ReplicaProcess:
    """A living replica process."""

    pid: int
    id: str
    pool: str
    age_seconds: float


def replica_arguments(pool: str, replica_id: str, config: Path, lifeline_fd: int | None) -> list[str]:
    """The arguments that follow ``run replica``."""
    arguments = ["--pool", pool, "--id", replica_id, "--config", str(config)]
    return arguments if lifeline_fd is None else [*arguments, "--lifeline-fd", str(lifeline_fd)]


def find_replicas(command: Sequence[str], config: Path) -> list[ReplicaProcess]:
    """Every living replica started as ``command`` + :func:`replica_arguments` with this ``config``, oldest first.

    The interpreter's own path (the first word of ``command``) may differ: one file has many names.
    """
    uptime = float((_PROC / "uptime").read_text().split()[0])
    found = [process for pid in _pids() if (process := _replica(pid, command, config, uptime)) is not None]
    return sorted(found, key=lambda process: (-process.age_seconds, process.id))


def terminate(process: ReplicaProcess, command: Sequence[str], config: Path) -> None:
    """Send SIGTERM to exactly this replica: if it is gone and its pid taken by another process, nothing happens."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # Checked through the pidfd's lifetime: from here on the signal cannot reach a successor of the pid.
            now = _replica(process.pid, command, config, uptime=0.0)
            if now is not None and now.id == process.id:
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        finally:
            os.close(descriptor)


def _pids() -> Iterator[int]:
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            yield int(entry.name)


def _replica(pid: int, command: Sequence[str], config: Path, uptime: float) -> ReplicaProcess | None:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
        options = _options(words, command)
        if options is None or options.get("--config") != str(config) or os.getsid(pid) != pid:
            return None
        # The command's name (field 2) may hold anything, parentheses included: count from the last one.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, IndexError):
        return None  # it ended meanwhile, or belongs to someone else
    if fields[0] in ("Z", "X"):
        return None
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return ReplicaProcess(pid, options["--id"], options["--pool"], max(0.0, uptime - started))


def _options(words: list[str], command: Sequence[str]) -> dict[str, str] | None:
    """The options of a replica's command line; None if it is not one of ours."""
    count = len(command)
    if words[1:count] != list(command[1:]) or len(words) <= count:
        return None
    names, values = words[count::2], words[count + 1 :: 2]
    if len(names) != len(values) or not {"--pool", "--id", "--config"} <= set(names) <= _OPTIONS:
        return None
    return dict(zip(names, values, strict=True))
