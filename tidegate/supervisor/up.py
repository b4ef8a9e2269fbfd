"""The life of a running system: check, start, wait until ready, watch, drain in order."""

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from replicas.leftovers import sweep
from stores.embedded import embedded_command
from stores.installation import claim
from stores.store import Store
from tidegate.launch import addresses, run_command
from tidegate.logs import LineFormatter
from tidegate.settings import Loaded
from tidegate.supervisor.children import Child, Children, ChildSpec, become_reaper
from tidegate.supervisor.models import lay_out_models
from tidegate.supervisor.notify import Notifier
from tidegate.supervisor.ports import ports_to_bind, sentence, taken_ports
from tidegate.supervisor.processes import (
    INSTALLATION_VARIABLE,
    end_all,
    is_alive,
    processes_of,
    send,
    start_time,
)
from tidegate.supervisor.readiness import still_waiting_for
from tidegate.supervisor.record import UpError, hold_state_dir, read_record, write_record
from wire.errors import TidegateError

log = logging.getLogger(__name__)

#: Longest wait for everything to be ready.
_START_LIMIT_SECONDS = 180.0
#: Starts of one child that may fail before the system is up.
_START_FAILURES = 2
_SWEEP_SECONDS = 60.0
#: What just ended may hold its ports for a moment longer.
_PORTS_SECONDS = 1.0
#: What leaving takes beyond the drain limits: stopping Triton, Ray's own shutdown.
_LEAVE_SECONDS = 15.0


async def run_supervisor(loaded: Loaded, *, notify_fd: int | None, log_level: str) -> int:
    """Run the system until it is told to stop. Returns 0 after a drain, 1 when it could not run."""
    notifier = Notifier(notify_fd)
    try:
        with hold_state_dir(loaded.state_dir):
            _log_to_file(loaded.logs_dir / "supervisor.log", log_level)
            return await Supervisor(loaded, notifier).run()
    except UpError as error:
        notifier.failed(str(error))
        return 1


class Supervisor:
    """All processes of one installation."""

    def __init__(self, loaded: Loaded, notifier: Notifier) -> None:
        self._loaded = loaded
        self._notifier = notifier
        self._began = time.monotonic()
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._phase = "starting"
        self._ray_dir: Path | None = None
        self._lifeline, self._lifeline_held = os.pipe()
        environment = os.environ | {INSTALLATION_VARIABLE: str(loaded.config_path)}
        self._children = Children(environment, loaded.logs_dir, self._write_record)
        self._store = Store.connect(loaded.system.store, client_name="tidegate-supervisor")

    async def run(self) -> int:
        become_reaper()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled)
        self._children.watch()
        try:
            await self._clear_what_a_dead_system_left()
            self._make_ray_dir()
            self._lay_out()
            await self._check_ports()
            await self._start()
            failure = await self._until_ready()
            if failure is not None:
                raise UpError(failure)
            if not self._stop.is_set():
                self._phase = "running"
                self._write_record()
                self._notifier.ready(addresses(self._loaded), time.monotonic() - self._began)
                await self._watch()
        except UpError:
            self._force.set()  # it never was up: nobody's work is waited for
            raise
        finally:
            await self._drain()
        return 0

    def _signalled(self) -> None:
        (self._force if self._stop.is_set() else self._stop).set()

    # ------------------------------------------------------------------ start

    async def _clear_what_a_dead_system_left(self) -> None:
        """A supervisor that was killed leaves processes that are on their way out: see them off."""
        left = processes_of(self._loaded.config_path)
        if left:
            self._notifier.waiting([f"{len(left)} processes of an earlier run to leave"])
            log.warning("an earlier run left: %s", "; ".join(map(str, left)))
            survivors = await asyncio.to_thread(end_all, left, polite_seconds=10.0)
            if survivors:
                raise UpError(f"processes of an earlier run do not end: {'; '.join(map(str, survivors))}")
        stale = read_record(self._loaded.state_dir)
        if stale is not None:
            shutil.rmtree(str(stale.get("ray_dir") or ""), ignore_errors=True)
        sweep(self._loaded.run_dir)

    def _make_ray_dir(self) -> None:
        """Made only when it is removed in every case, and recorded at once for the case that we are killed."""
        try:
            self._ray_dir = Path(tempfile.mkdtemp(prefix="tg-"))
        except OSError as error:
            raise UpError(f"no folder can be made in {tempfile.gettempdir()}: {error.strerror}") from error
        self._write_record()

    def _lay_out(self) -> None:
        self._notifier.waiting(["the model files to be laid out"])
        for warning in lay_out_models(self._loaded):
            log.warning(warning)
            self._notifier.warning(warning)

    async def _check_ports(self) -> None:
        limit = time.monotonic() + _PORTS_SECONDS
        while taken := taken_ports(ports_to_bind(self._loaded.system)):
            if time.monotonic() > limit or self._stop.is_set():
                raise UpError(sentence(taken))
            await asyncio.sleep(0.05)

    async def _start(self) -> None:
        """The store first, everybody needs it; then all others at once."""
        store = self._loaded.system.store
        if store.url is None:
            try:
                command = tuple(embedded_command(self._loaded.state_dir, store))
            except TidegateError as error:
                raise UpError(error.message) from error
            self._children.start(ChildSpec("store", command, drain_seconds=10.0))
        else:
            await self._store_answers()
        # The others import and start Ray meanwhile; each waits for the store by itself.
        system = self._loaded.system
        self._children.start(
            ChildSpec(
                "gateway",
                self._role("gateway", "--ray-dir", str(self._ray_dir)),
                drain_seconds=system.gateway.drain_limit_seconds + _LEAVE_SECONDS,
                after_exit=self._clear_ray,
            )
        )
        await self._store_answers()
        self._children.start(
            ChildSpec(
                "autoscaler",
                self._role("autoscaler", "--lifeline-fd", str(self._lifeline)),
                drain_seconds=10.0,
                pass_fds=(self._lifeline,),
            )
        )
        for name in self._worker_names:
            self._children.start(
                ChildSpec(
                    name,
                    self._role("worker", "--name", name),
                    drain_seconds=system.workers.drain_limit_seconds + _LEAVE_SECONDS,
                )
            )

    async def _store_answers(self) -> None:
        embedded = self._loaded.system.store.url is None
        limit = time.monotonic() + (30.0 if embedded else self._loaded.system.store.timeout_seconds)
        while not self._stop.is_set():
            try:
                await self._store.ping()
                if embedded:
                    with suppress(TidegateError):  # one that takes no writes now is told later, by who needs them
                        await claim(self._store, str(self._loaded.config_path))
                return
            except TidegateError as error:
                self._notifier.waiting(["the store"])
                if time.monotonic() > limit:
                    words = f"; its log ends with: {self._children.last_words('store')}" if embedded else ""
                    raise UpError(f"{error.message}{words}") from error
                await asyncio.sleep(0.02)

    async def _until_ready(self) -> str | None:
        """Wait; why it failed, or None when everything is ready or we were told to stop."""
        limit = time.monotonic() + _START_LIMIT_SECONDS
        while not self._stop.is_set():
            for name, child in self._children.all.items():
                if child.failures >= _START_FAILURES:
                    return f"{name} does not start ({child.last_exit}): {self._children.last_words(name)}"
            waiting = await still_waiting_for(self._loaded, self._store, self._worker_names)
            if not waiting:
                return None
            self._notifier.waiting(waiting)
            if time.monotonic() > limit:
                return f"not ready after {_START_LIMIT_SECONDS:g} s: still waiting for {', '.join(waiting)}"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.1)
        return None

    # ------------------------------------------------------------------ run

    async def _watch(self) -> None:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _SWEEP_SECONDS)
            sweep(self._loaded.run_dir)

    # ------------------------------------------------------------------ stop

    async def _drain(self) -> None:
        """Each part leaves before what it needs: a claimed job calls the gateway, the gateway's requests are on
        replicas, a held request needs the autoscaler until the gateway has let go of it, and all need the store."""
        workers = [self._children.all[name] for name in self._worker_names if name in self._children.all]
        self._phase = "draining"
        await self._stop_children("workers finish their jobs", workers)
        await self._stop_children("the gateway finishes its requests", self._named("gateway"))
        self._clear_ray()
        await self._stop_children("the autoscaler leaves", self._named("autoscaler"))
        await self._stop_replicas()
        os.close(self._lifeline_held)
        os.close(self._lifeline)
        await self._store.close()
        await self._stop_children("the store writes its data and leaves", self._named("store"))
        left = processes_of(self._loaded.config_path)
        if left:
            log.error("still there after the drain, and ended now: %s", "; ".join(map(str, left)))
            await asyncio.to_thread(end_all, left, polite_seconds=1.0)
        if self._ray_dir is not None:
            shutil.rmtree(self._ray_dir, ignore_errors=True)
        sweep(self._loaded.run_dir)
        log.info("the system is down")

    def _named(self, name: str) -> list[Child]:
        child = self._children.all.get(name)
        return [] if child is None else [child]

    async def _stop_children(self, words: str, children: list[Child]) -> None:
        if children:
            self._tell_draining(words)
            await asyncio.gather(*(self._children.stop(child, self._force) for child in children))

    async def _stop_replicas(self) -> None:
        """SIGTERM, and a second one (which forces) when their patience is over or ours is."""
        replicas = [process for process in processes_of(self._loaded.config_path) if process.is_replica]
        if not replicas:
            return
        self._tell_draining(f"{len(replicas)} replicas finish what is in flight")
        patience = max(pool.replica.drain_limit_seconds for pool in self._loaded.pools.values()) + _LEAVE_SECONDS
        for seconds in (patience, 5.0):
            for process in replicas:
                send(process, signal.SIGTERM)
            began = time.monotonic()
            while any(map(is_alive, replicas)) and time.monotonic() - began < seconds:
                await asyncio.sleep(0.05)
                if seconds == patience and self._force.is_set() and time.monotonic() - began > 0.2:
                    break
            replicas = [process for process in replicas if is_alive(process)]

    def _tell_draining(self, words: str) -> None:
        self._phase = f"draining: {words}"
        log.info(words)
        self._notifier.draining(words)
        self._write_record()

    # ------------------------------------------------------------------ parts

    @property
    def _worker_names(self) -> tuple[str, ...]:
        return tuple(f"worker-{number}" for number in range(1, self._loaded.system.workers.processes + 1))

    def _role(self, role: str, *more: str) -> tuple[str, ...]:
        return (*run_command(self._loaded, role), *more)

    def _clear_ray(self) -> None:
        """Behind a gateway that has left: nothing of its Ray may stay, neither processes nor files."""
        left = processes_of(self._loaded.config_path, child="gateway")
        if left:
            log.warning("the gateway left %d processes behind; they are ended", len(left))
            end_all(left, polite_seconds=0.0)
        for entry in self._ray_dir.iterdir() if self._ray_dir is not None and self._ray_dir.exists() else ():
            shutil.rmtree(entry, ignore_errors=True)

    def _write_record(self) -> None:
        write_record(
            self._loaded.state_dir,
            {
                "pid": os.getpid(),
                "start_time": start_time(os.getpid()),
                "config": str(self._loaded.config_path),
                "phase": self._phase,
                "addresses": addresses(self._loaded),
                "ray_dir": None if self._ray_dir is None else str(self._ray_dir),
                "processes": [child.as_record() for child in self._children.all.values()],
            },
        )


def _log_to_file(path: Path, level: str) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(LineFormatter("supervisor"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
