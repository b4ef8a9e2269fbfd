"""What a replica leaves behind when it is killed hard, and clearing it away.

Everything that a replica's Triton owns carries a mark that names the installation and the replica's agent, as agent
process id and start time:

    processes   tritonserver and Python stubs have the mark in their command line
    /dev/shm    shared-memory regions have it as prefix of their name
    /tmp        the model of the self-check, in a directory that Triton made, has it in its first line
    <run_dir>/replicas/<mark>/   the directory that Triton runs from

One thing has no mark: the empty ``/tmp/python_env_XXXXXX`` that each Triton's Python backend makes when it is loaded
(Triton does not ask TMPDIR) and removes at an orderly end. One is a leftover when no living process can have made it: a
Triton makes it after its own start, and ours before :func:`note_loaded`. Removing an empty folder loses nothing.

So nobody has to keep a record that a hard kill could lose: a mark whose agent no longer lives is a leftover. The
installation is the run directory as seen from this pid namespace, because elsewhere its process ids mean nothing.
"""

import hashlib
import logging
import os
import re
import select
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_log = logging.getLogger(__name__)

_PROGRAMS = ("tritonserver", "triton_python_backend_stub")
_KILL_WAIT_SECONDS = 2.0
_LOADED = "loaded"
#: How far a clock may have been set between two times that are compared.
_CLOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Owner:
    """The agent process that a mark names. The start time tells it from a later process with the same id."""

    pid: int
    start_ticks: int
    """Clock ticks after boot at which the process started."""


@dataclass(slots=True)
class Swept:
    """What a sweep cleared away."""

    processes: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def this_process() -> Owner:
    """The owner that marks of this process name."""
    return Owner(os.getpid(), _start_ticks(os.getpid()) or 0)


def mark(run_dir: Path, owner: Owner) -> str:
    """The mark of ``owner``'s replica; ends with a separator so that no mark is the beginning of another."""
    return f"{_installation(run_dir)}{owner.pid}_{owner.start_ticks}_"


def replica_dir(run_dir: Path, owner: Owner) -> Path:
    """The directory that ``owner``'s Triton runs from."""
    return run_dir / "replicas" / mark(run_dir, owner)


def note_loaded(directory: Path) -> None:
    """Say that the Triton that runs from ``directory`` has loaded its Python backend by now."""
    (directory / _LOADED).touch()


def sweep(run_dir: Path, *, shm: Path = Path("/dev/shm"), tmp: Path = Path("/tmp")) -> Swept:
    """Clear away what replicas of this installation left whose agent no longer lives; everything else stays.

    Takes some milliseconds; longer (at most two seconds for each) only where a process has to be killed.
    """
    owners = {owner for _, owner in marked_processes(run_dir)}
    owners |= {owner for _, owner in marked_files(run_dir, shm)}
    owners |= {owner for _, owner in marked_files(run_dir, run_dir / "replicas")}
    owners |= {owner for _, owner in _marked_models(run_dir)}
    swept = Swept()
    for owner in owners:
        if _start_ticks(owner.pid) != owner.start_ticks:
            clear(run_dir, owner, swept=swept, shm=shm)
    swept.files += _remove_environments(run_dir, tmp)
    if swept.processes or swept.files:
        _log.warning(
            "cleared away what killed replicas left: %d processes, %d files", len(swept.processes), len(swept.files)
        )
    return swept


def clear(run_dir: Path, owner: Owner, *, swept: Swept | None = None, shm: Path = Path("/dev/shm")) -> Swept:
    """End every process and remove every file of ``owner``'s replica, whether the agent lives or not."""
    swept = swept or Swept()
    swept.processes += [pid for pid in processes_of(run_dir, owner) if _kill(run_dir, pid, owner)]
    deadline = time.monotonic() + _KILL_WAIT_SECONDS
    while time.monotonic() < deadline and processes_of(run_dir, owner):
        time.sleep(0.01)
    for path, whose in marked_files(run_dir, shm):
        if whose == owner:
            path.unlink(missing_ok=True)
            swept.files.append(path.name)
    for directory, whose in _marked_models(run_dir):
        if whose == owner:
            shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(replica_dir(run_dir, owner), ignore_errors=True)
    return swept


def processes_of(run_dir: Path, owner: Owner) -> list[int]:
    """The living processes of ``owner``'s Triton."""
    return [pid for pid, whose in marked_processes(run_dir) if whose == owner]


def _installation(run_dir: Path) -> str:
    namespace = os.readlink("/proc/self/ns/pid")
    digest = hashlib.sha256(f"{run_dir.resolve()} {namespace}".encode()).hexdigest()
    return f"tidegate_{digest[:10]}_"


def marked_processes(run_dir: Path) -> Iterator[tuple[int, Owner]]:
    """Living processes of this installation's Tritons, with the owner that their mark names."""
    installation = _installation(run_dir)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (owner := _owner_of_process(installation, entry)):
            yield int(entry), owner


def _owner_of_process(installation: str, pid: str) -> Owner | None:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return None  # gone, or not ours to read
    if os.path.basename(arguments[0]) not in _PROGRAMS:
        return None
    # A stub has its region's name as an argument of its own; tritonserver has the prefix as the value of an option.
    pattern = re.compile(rf"(?:^|=){installation}(\d+)_(\d+)_")
    for argument in arguments[1:]:
        if found := pattern.search(argument):
            return Owner(int(found[1]), int(found[2]))
    return None


def marked_files(run_dir: Path, directory: Path) -> Iterator[tuple[Path, Owner]]:
    """Files of ``directory`` that carry a mark of this installation, with the owner that it names."""
    pattern = re.compile(rf"{_installation(run_dir)}(\d+)_(\d+)_")
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        if found := pattern.match(name):
            yield directory / name, Owner(int(found[1]), int(found[2]))


def _marked_models(run_dir: Path) -> Iterator[tuple[Path, Owner]]:
    pattern = re.compile(rf"# {_installation(run_dir)}(\d+)_(\d+)_")
    for model in Path("/tmp").glob("folder??????/1/model.py"):
        try:
            with model.open(encoding="utf-8") as file:
                first = file.readline(200)
        except (OSError, UnicodeDecodeError):
            continue  # another user's, or just removed
        if found := pattern.match(first):
            yield model.parent.parent, Owner(int(found[1]), int(found[2]))


def _remove_environments(run_dir: Path, tmp: Path, clock_seconds: float = _CLOCK_SECONDS) -> list[str]:
    """Remove the empty ``python_env_XXXXXX`` in ``tmp`` that no living process can have made; their names."""
    folders: dict[Path, float] = {}
    for folder in tmp.glob("python_env_??????"):
        with suppress(OSError):  # another sweep was here
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                folders[folder] = found.st_mtime  # nobody has put anything in: that is when it was made
    if not folders:
        return []
    times = [(since - clock_seconds, until + clock_seconds) for since, until in _loading_times(run_dir)]
    removed = []
    for folder, made in folders.items():
        if not any(since <= made <= until for since, until in times):
            with suppress(OSError):  # not empty: in use, or not Triton's
                folder.rmdir()
                removed.append(folder.name)
    return removed


def _loading_times(run_dir: Path) -> Iterator[tuple[float, float]]:
    """For each living process that is a Triton, or may become one: the times between which it loads its Python backend,
    in Unix seconds."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    marked = dict(marked_processes(run_dir))
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if not _may_be_triton(pid) or (ticks := _start_ticks(pid)) is None:
            continue
        until = float("inf")
        if (owner := marked.get(pid)) is not None:
            with suppress(OSError):
                until = (replica_dir(run_dir, owner) / _LOADED).stat().st_mtime
        yield booted + ticks / os.sysconf("SC_CLK_TCK"), until


def _may_be_triton(pid: int) -> bool:
    """Whether the process has Triton's Python backend in it, or is a tritonserver that may still load it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if os.path.basename(file.read().split(b"\0")[0]) == b"tritonserver":
                return True
        with open(f"/proc/{pid}/maps", "rb") as file:
            return b"libtriton" in file.read()
    except OSError:
        return False  # gone, or another user's, whose folders are not ours to remove either


def _kill(run_dir: Path, pid: int, owner: Owner) -> bool:
    """SIGKILL ``pid`` if it still is a process of ``owner``'s: the handle is taken first, then looked at again."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _owner_of_process(_installation(run_dir), str(pid)) != owner:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], _KILL_WAIT_SECONDS)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _start_ticks(pid: int) -> int | None:
    """When the living process ``pid`` started; None if there is none, or only its unreaped remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything, parentheses included; the fields after it are plain.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
