"""Children of the supervisor: started, watched, restarted with back-off, stopped with patience and then without."""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.supervisor.processes import CHILD_VARIABLE

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

#: A child that ran this long has proved that it can: its next end is a first failure again.
_STEADY_SECONDS = 30.0
#: A log is set aside (one generation) when it is larger than this as its process starts.
_LOG_LIMIT_BYTES = 16 << 20


def backoff_seconds(failures: int) -> float:
    """Wait before the next start after this many failures in a row (1 = the first)."""
    return float(min(30.0, 0.25 * 2 ** min(failures, 10)))


def become_reaper() -> None:
    """Orphans among our descendants become our children instead of init's, so that none gets out of sight."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How one child is started and stopped."""

    name: str
    command: tuple[str, ...]
    drain_seconds: float
    """Patience after the first SIGTERM, before it is forced."""
    pass_fds: tuple[int, ...] = ()
    after_exit: Callable[[], None] | None = None
    """Tidies up behind a child that died, before it is started again."""


@dataclass(slots=True)
class Child:
    """One child and what became of it."""

    spec: ChildSpec
    process: subprocess.Popen[bytes] | None = None
    state: str = "not started"
    restarts: int = 0
    failures: int = 0
    last_exit: str | None = None
    stopping: bool = False
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self.process is None or self.process.returncode is not None else self.process.pid

    def as_record(self) -> dict[str, Any]:
        return {
            "name": self.spec.name,
            "pid": self.pid,
            "state": self.state,
            "restarts": self.restarts,
            "last_exit": self.last_exit,
        }


class Children:
    """All children of one supervisor. Must be used on the main thread: the death signal follows the forking thread."""

    def __init__(self, environment: Mapping[str, str], logs_dir: Path, changed: Callable[[], None]) -> None:
        self._environment = dict(environment)
        self._logs_dir = logs_dir
        self._changed = changed
        self.all: dict[str, Child] = {}

    def watch(self) -> None:
        """Learn of every child that ends; call once, with the loop running."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def start(self, spec: ChildSpec) -> Child:
        """Start a child and keep it running until it is stopped."""
        child = Child(spec)
        self.all[spec.name] = child
        self._spawn(child)
        child.keeper = asyncio.create_task(self._keep(child), name=f"keep {spec.name}")
        return child

    async def stop(self, child: Child, force: asyncio.Event) -> None:
        """SIGTERM; SIGTERM again when its patience is over or ``force`` is set; SIGKILL at last."""
        child.stopping = True
        child.state = "draining"
        self._changed()
        if child.pid is not None:
            _terminate(child)
            if not await _first(child.exited, force, child.spec.drain_seconds):
                log.warning("%s did not leave in time and is forced", child.spec.name)
                await asyncio.sleep(0.2)  # two signals in one moment would be seen as one
                _terminate(child)
                if not await _first(child.exited, None, 5.0) and child.pid is not None:
                    os.killpg(child.pid, signal.SIGKILL)
                    await child.exited.wait()
        if child.keeper is not None:
            child.keeper.cancel()
            await asyncio.gather(child.keeper, return_exceptions=True)
        child.state = "stopped"
        self._changed()

    def log_path(self, name: str) -> Path:
        return self._logs_dir / f"{name}.log"

    def last_words(self, name: str) -> str:
        """The last line a child logged, for people; empty when it said nothing."""
        try:
            lines = self.log_path(name).read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][-400:] if lines else ""

    def _spawn(self, child: Child) -> None:
        path = self.log_path(child.spec.name)
        if path.exists() and path.stat().st_size > _LOG_LIMIT_BYTES:
            path.replace(path.with_suffix(".log.1"))
        parent = os.getpid()

        def follow_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:  # it died between the fork and the line above
                os._exit(1)

        child.exited.clear()
        with path.open("ab") as output:
            child.process = subprocess.Popen(
                child.spec.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment | {CHILD_VARIABLE: child.spec.name},
                pass_fds=child.spec.pass_fds,
                # Its own session: a Ctrl-C in our terminal reaches us alone, and we drain in order.
                start_new_session=True,
                preexec_fn=follow_parent,
            )
        child.state = "running"
        log.info("%s started as pid %d", child.spec.name, child.process.pid)
        self._changed()

    async def _keep(self, child: Child) -> None:
        started = time.monotonic()
        while True:
            await child.exited.wait()
            if child.stopping:
                return
            child.failures = 1 if time.monotonic() - started > _STEADY_SECONDS else child.failures + 1
            wait = backoff_seconds(child.failures)
            child.state = f"waiting {wait:g} s to start again"
            level = logging.INFO if child.process is not None and child.process.returncode == 0 else logging.ERROR
            log.log(level, "%s ended (%s); starting it again in %g s", child.spec.name, child.last_exit, wait)
            self._changed()
            if child.spec.after_exit is not None:
                child.spec.after_exit()
            await asyncio.sleep(wait)
            if child.stopping:
                return
            child.restarts += 1
            started = time.monotonic()
            try:
                self._spawn(child)
            except OSError as error:
                child.last_exit = f"cannot be started: {error}"
                child.exited.set()

    def _reap(self) -> None:
        for child in self.all.values():
            process = child.process
            if process is not None and not child.exited.is_set() and process.poll() is not None:
                child.last_exit = _exit_words(process.returncode)
                child.exited.set()
        known = {child.process.pid for child in self.all.values() if child.process is not None}
        _reap_orphans(known)


def _terminate(child: Child) -> None:
    if child.process is not None:
        child.process.send_signal(signal.SIGTERM)


def _reap_orphans(known: set[int]) -> None:
    """Orphans that became ours are nobody's children but ours: collect them, leave our own to ``Popen.poll``."""
    for entry in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{entry}/children").read_text().split()
        except OSError:
            continue
        for pid in map(int, pids):
            if pid in known:
                continue
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _exit_words(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


async def _first(event: asyncio.Event, force: asyncio.Event | None, seconds: float) -> bool:
    """Whether ``event`` came within ``seconds`` and before ``force``."""
    waits = [asyncio.create_task(event.wait())]
    if force is not None:
        waits.append(asyncio.create_task(force.wait()))
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return event.is_set()
