"""The replica's Triton: one that we launch as our child, or one that runs already (attached)."""

import asyncio
import ctypes
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from replicas import leftovers, sockets
from replicas.addresses import AttachAddresses
from replicas.triton import Triton
from replicas.watch import dead_stubs
from replicas.wheel import CannotLaunch, find_wheel, lay_out_server, library_folder
from wire.pools import PoolSettings

_log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_PORT_TRIES = 5
_LOOK_SECONDS = 0.01
#: What Triton gives its models to end in. Nothing is in flight by then, or the drain limit has passed.
_EXIT_SECONDS = 5
_KEPT_LOGS = 20
_REPOSITORY = "models"
_PR_SET_PDEATHSIG = 1


class TritonEnded(Exception):
    """Triton is gone; the message is one sentence."""


class TritonServer(Protocol):
    """What the agent needs of its Triton, however it came to be."""

    addresses: AttachAddresses
    check_mark: str | None
    """The replica's mark where the known-answer check belongs to this Triton's start; None where it does not."""

    async def answers(self) -> None:
        """Return when Triton answers. Raises CannotLaunch or TritonEnded."""

    async def ended(self) -> str:
        """Return when Triton is gone: one sentence that says how."""

    def checked(self) -> None:
        """The known-answer check is done, so its Python backend is loaded."""

    def dead_stubs(self) -> Collection[int]:
        """Process ids of its Python stubs that died; none where they cannot be seen."""

    async def live(self, limit_seconds: float) -> bool:
        """Whether it answers within this time, on a connection that is closed again."""

    async def stop(self, forced: asyncio.Event) -> None:
        """Let it end and clear away all it had; at once when ``forced`` is set. Does nothing to an attached one."""

    def kill(self) -> None:
        """End it now and clear away all it had; may block for a moment. Does nothing to an attached one."""


class LaunchedTriton:
    """A tritonserver that is our child: its own process group, dead when we die, on loopback ports of its own.

    It runs in a directory of its own, so relative paths in ``triton_args`` mean files there.
    """

    def __init__(self, *, repository: Path, run_dir: Path, replica_id: str, settings: PoolSettings) -> None:
        """Starts it at once: what is imported later is imported while it comes up.

        Must be called in the main thread, which lives as long as the process: the kernel ties the child to the thread.

        Raises:
            CannotLaunch: no tritonserver here, or this system lacks what it needs.
            OSError: the run directory cannot be written, or the program not be run.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Triton is tied to the thread that launches it, so that must be the main thread")
        self._run_dir, self._repository, self._settings = run_dir, repository, settings
        self._owner = leftovers.this_process()
        self._directory = leftovers.replica_dir(run_dir, self._owner)
        self._log_path = _log_path(run_dir, replica_id)
        _lay_out_directory(self._directory, repository)
        on_path = shutil.which("tritonserver")
        self._mark = leftovers.mark(run_dir, self._owner)
        self.check_mark = None if on_path else self._mark
        self._arguments = self._installed(on_path) if on_path else self._from_wheel()
        self._log_start = 0
        self._spawn()

    def _installed(self, program: str) -> list[str]:
        self._environment = _environment(None)
        return [program]

    def _from_wheel(self) -> list[str]:
        root = find_wheel()
        self._environment = _environment(library_folder(root))
        program = lay_out_server(root, self._directory)
        server = program.parent.relative_to(self._directory)
        return [str(program), f"--backend-directory={server / 'backends'}", f"--cache-directory={server / 'caches'}"]

    def _spawn(self) -> None:
        http, grpc, metrics = sockets.free_ports(3)
        self._ports = (http, grpc, metrics)
        self.addresses = AttachAddresses(*(f"{_HOST}:{port}" for port in self._ports))
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self._arguments + self._options(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._directory,
                process_group=0,
                preexec_fn=_die_with_parent(),
            )
        self._handle = os.pidfd_open(self._process.pid)

    def _options(self) -> list[str]:
        memory = self._settings.memory
        options = [
            f"--model-repository={_REPOSITORY}",
            "--model-control-mode=explicit",
            # Strict readiness turns the server unready while any model loads, and for ever after one failed load.
            "--strict-readiness=false",
            "--exit-on-error=false",
            f"--exit-timeout-secs={_EXIT_SECONDS}",
            "--rate-limit=execution_count",
            f"--pinned-memory-pool-byte-size={memory.pinned_pool_bytes}",
            f"--backend-config=python,shm-region-prefix-name={self._mark}",
            f"--backend-config=python,shm-default-byte-size={memory.shm_default_bytes}",
        ]
        for name, port in zip(("http", "grpc", "metrics"), self._ports, strict=True):
            options += [f"--{name}-address={_HOST}", f"--{name}-port={port}"]
        if all(_says_it_all(self._repository / model) for model in self._settings.model_names):
            # Completing a config starts each Python-backed model one more time: seconds of every cold start.
            options.append("--disable-auto-complete-config")
        return options + list(self._settings.replica.triton_args)

    async def answers(self) -> None:
        for _ in range(_PORT_TRIES):
            # The metrics port is opened last. The process itself must listen on all three: somebody else may answer
            # on a port that it lost to him.
            while self._process.poll() is None:
                if sockets.accepts(self._ports[-1]) and sockets.listens_on(self._process.pid, self._ports):
                    return
                await asyncio.sleep(_LOOK_SECONDS)
            said = self._log_path.read_bytes()[self._log_start :].decode("utf-8", "replace")
            if "already in use" not in said and "Address already" not in said:
                raise TritonEnded(_how_it_ended(self._process.returncode, said))
            os.close(self._handle)
            self._spawn()
        ports = ", ".join(str(port) for port in self._ports)
        raise CannotLaunch(f"other processes took the ports of Triton {_PORT_TRIES} times, the last ones were {ports}")

    async def ended(self) -> str:
        await _readable(self._handle)
        code = self._process.wait()
        return _how_it_ended(code, self._log_path.read_bytes()[self._log_start :].decode("utf-8", "replace"))

    def checked(self) -> None:
        leftovers.note_loaded(self._directory)

    def dead_stubs(self) -> Collection[int]:
        return dead_stubs(self._process.pid)

    async def live(self, limit_seconds: float) -> bool:
        return await Triton(self.addresses).live(limit_seconds)

    async def stop(self, forced: asyncio.Event) -> None:
        if self._process.poll() is None and not forced.is_set():
            self._process.send_signal(signal.SIGTERM)
            gone, at_once = asyncio.create_task(_readable(self._handle)), asyncio.create_task(forced.wait())
            await asyncio.wait({gone, at_once}, timeout=_EXIT_SECONDS + 3, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            at_once.cancel()
        self.kill()

    def kill(self) -> None:
        # The group outlives its leader as long as a stub is in it, so its number cannot be another's yet.
        if self._process.returncode is None or leftovers.processes_of(self._run_dir, self._owner):
            with suppress(ProcessLookupError):  # all of it is gone
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        leftovers.clear(self._run_dir, self._owner)


class AttachedTriton:
    """A Triton that somebody else runs, as in a pod of two containers. It is never stopped from here."""

    check_mark: str | None = None
    _look_seconds = 1.0
    _missed_looks = 3

    def __init__(self, addresses: AttachAddresses) -> None:
        self.addresses = addresses

    async def answers(self) -> None:
        while not await Triton(self.addresses).live():  # noqa: ASYNC110 - another process cannot set an event
            await asyncio.sleep(0.1)

    async def ended(self) -> str:
        missed = 0
        while missed < self._missed_looks:
            await asyncio.sleep(self._look_seconds)
            missed = 0 if await Triton(self.addresses).live() else missed + 1
        return f"Triton at {self.addresses.http} no longer answers"

    def checked(self) -> None:
        pass

    def dead_stubs(self) -> Collection[int]:
        return ()  # they are processes of another container

    async def live(self, limit_seconds: float) -> bool:
        del limit_seconds
        return True  # ``ended`` looks already

    async def stop(self, forced: asyncio.Event) -> None:
        del forced

    def kill(self) -> None:
        pass


def _lay_out_directory(directory: Path, repository: Path) -> None:
    """Where Triton runs. It gets relative paths only: its Python backend hangs for ever on a path with a space, and
    fails on one that is not ASCII, wherever the user's folders stand."""
    directory.mkdir(parents=True)
    (directory / _REPOSITORY).symlink_to(repository.resolve())


def _die_with_parent() -> Callable[[], None]:
    """To run in the forked child: the kernel kills it when this process dies, however that happens."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return in_child


def _environment(library_dir: str | None) -> dict[str, str]:
    environment = dict(os.environ)  # noqa: TID251 - handed on to the child; no setting is taken from it
    # The stub embeds the first python3 on PATH and must find this environment's packages.
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), *os.get_exec_path()])
    environment["OPENBLAS_NUM_THREADS"] = "1"  # else every stub starts a pool of threads
    if library_dir:
        known = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = library_dir if not known else f"{library_dir}:{known}"
    return environment


def _says_it_all(model: Path) -> bool:
    """Whether the model's config.pbtxt leaves nothing to complete: it names backend, inputs and outputs."""
    try:
        text = (model / "config.pbtxt").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    text = re.sub(r"#.*", "", text)
    return all(
        re.search(rf"(?m)^\s*(?:{key})\s*[:\[{{]", text)
        for key in ("backend|platform", "input", "output", "max_batch_size")
    )


def _log_path(run_dir: Path, replica_id: str) -> Path:
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    # Each replica has a log of its own and a pool that breathes has many; the newest are kept.
    logs = sorted(folder.glob("*.triton.log"), key=lambda path: path.stat().st_mtime)
    for old in logs[: -_KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    return folder / f"{replica_id}.triton.log"


def _how_it_ended(code: int, log: str) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    errors = re.findall(r'(?m)^E\d{4} [^\]]*\] "?(.+?)"?$', log)
    if code >= 0 and not errors:
        errors = [line for line in log.splitlines() if line.strip()][-1:]
    return f"Triton {how}" + (f": {errors[-1]}" if errors and code >= 0 else "")


async def _readable(handle: int) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(handle)
