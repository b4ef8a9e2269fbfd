"""Replicas as processes on this machine.

Each runs in a session of its own and so outlives the autoscaler, whose successor finds it in ``/proc``. It ends by
SIGTERM (it drains first) or by itself when the lifeline, a pipe whose write end the supervisor holds, closes.
Nothing here ever kills one.
"""

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoscaler.backends.base import BackendError, RunningReplica
from autoscaler.backends.processes import ReplicaProcess, find_replicas, replica_arguments, terminate

#: How a replica is started, up to its own arguments.
REPLICA_COMMAND = (sys.executable, "-m", "tidegate", "run", "replica")
#: Logs of ended replicas that are kept, per pool.
_KEPT_LOGS = 20
_LAST_WORDS_BYTES = 4096


def _new_id(pool: str) -> str:
    return f"{pool}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class _Child:
    """A replica that this process started, and has to wait for when it ends."""

    pool: str
    process: subprocess.Popen[bytes]


class LocalBackend:
    """Starts, finds and drains the replica processes of one ``tidegate.yaml``."""

    def __init__(
        self,
        *,
        config: Path,
        run_dir: Path,
        lifeline_fd: int | None = None,
        command: Sequence[str] = REPLICA_COMMAND,
        new_id: Callable[[str], str] = _new_id,
    ) -> None:
        """``config`` names the installation: replicas started with it are ours. ``run_dir`` gets ``logs/``."""
        self._config = config.resolve()
        self._logs = run_dir / "logs"
        self._lifeline_fd = lifeline_fd
        self._command = tuple(command)
        self._new_id = new_id
        self._children: dict[str, _Child] = {}
        self._endings: dict[str, str] = {}
        self._told: set[str] = set()

    async def running(self, pool: str) -> list[RunningReplica]:
        return [
            RunningReplica(process.id, process.pool, process.age_seconds, stopping=process.id in self._told)
            for process in self._find()
            if process.pool == pool
        ]

    async def start(self, pool: str) -> str:
        replica_id = self._new_id(pool)
        arguments = replica_arguments(pool, replica_id, self._config, self._lifeline_fd)
        try:
            process = self._spawn(pool, replica_id, [*self._command, *arguments])
        except OSError as error:
            raise BackendError(f"a replica process could not be started: {error.strerror or error}") from error
        self._children[replica_id] = _Child(pool, process)
        return replica_id

    async def stop(self, replica_id: str) -> None:
        for process in self._find():
            if process.id == replica_id:
                self._tell(process)

    async def ending(self, replica_id: str) -> str | None:
        self._reap()
        return self._endings.get(replica_id)

    async def stop_all(self, *, limit_seconds: float, draining: Collection[str] = ()) -> list[str]:
        """Drain every replica of every pool and wait until they are gone; the ids of those that are still there.

        ``draining`` names those that drain already (by their lease): a second signal would force them.
        Replicas that appear meanwhile are drained too.
        """
        self._told.update(draining)
        deadline = asyncio.get_running_loop().time() + limit_seconds
        while living := self._find():
            for process in living:
                self._tell(process)
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(0.05)
        return [process.id for process in living]

    def _tell(self, process: ReplicaProcess) -> None:
        if process.id in self._told:
            return
        try:
            terminate(process, self._command, self._config)
        except OSError as error:
            raise BackendError(f"replica {process.id} could not be told to drain: {error.strerror}") from error
        self._told.add(process.id)

    def _find(self) -> list[ReplicaProcess]:
        self._reap()
        try:
            found = find_replicas(self._command, self._config)
        except OSError as error:
            raise BackendError(f"the processes of this machine cannot be listed: {error.strerror}") from error
        names = {process.id for process in found}
        # A child has no command line for an instant after it began, nor while it exits: it is there all the same.
        found += [
            ReplicaProcess(child.process.pid, replica_id, child.pool, age_seconds=0.0)
            for replica_id, child in self._children.items()
            if replica_id not in names
        ]
        self._told &= {process.id for process in found}
        return found

    def _spawn(self, pool: str, replica_id: str, command: list[str]) -> subprocess.Popen[bytes]:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._prune_logs(pool)
        with self._log(replica_id).open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if self._lifeline_fd is None else (self._lifeline_fd,),
            )

    def _reap(self) -> None:
        """Collect the exit status of children that ended; adopted replicas are the child of someone else."""
        for replica_id, child in list(self._children.items()):
            status = child.process.poll()
            if status is not None:
                del self._children[replica_id]
                self._endings[replica_id] = self._ending(replica_id, status)
        while len(self._endings) > _KEPT_LOGS:
            del self._endings[next(iter(self._endings))]

    def _ending(self, replica_id: str, status: int) -> str:
        how = f"exit status {status}" if status >= 0 else f"killed by signal {-status}"
        last_words = self._last_words(replica_id)
        return f"{how}: {last_words}" if last_words else how

    def _last_words(self, replica_id: str) -> str:
        try:
            with self._log(replica_id).open("rb") as log:
                log.seek(max(0, log.seek(0, 2) - _LAST_WORDS_BYTES))
                lines = log.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        return next((line.strip()[-200:] for line in reversed(lines) if line.strip()), "")

    def _log(self, replica_id: str) -> Path:
        return self._logs / f"replica-{replica_id}.log"

    def _prune_logs(self, pool: str) -> None:
        living = {self._log(process.id) for process in self._find()}
        ended = [log for log in self._logs.glob(f"replica-{pool}-*.log") if log not in living]
        for log in sorted(ended, key=lambda path: path.stat().st_mtime)[:-_KEPT_LOGS]:
            log.unlink(missing_ok=True)
