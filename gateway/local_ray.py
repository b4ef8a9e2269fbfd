"""Ray on this machine, as small and as quick as one Serve application allows, and gone without a trace afterwards.

``ray.init`` also starts a dashboard server, a cluster autoscaler and a log monitor, even where each is of no use
(``include_dashboard=False`` still starts the server, for usage reports). They cost some 300 MB and two seconds, so a
subclass of Ray's own node leaves them out. That reaches into Ray's private modules, which is why Ray is pinned to one
minor version and why nothing else does it.
"""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

#: Serve and its actors exchange small messages; tensors never enter Ray. Bytes.
_OBJECT_STORE_BYTES = 80 * 2**20
#: Longest wait for Ray's daemon on a busy machine. Seconds.
_START_SECONDS = 90.0

#: Read by Ray's processes when they start. Nothing calls home; nothing is collected that nobody reads.
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Ray runs workers at nice 15, so that they give way to itself; to us an instance is what callers wait for.
    "RAY_worker_niceness": "0",
    # Ray's own log files live and end with the gateway; they may not fill a disk meanwhile.
    "RAY_ROTATION_MAX_BYTES": str(10 * 2**20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}


def prepare_environment(import_root: Path) -> None:
    """What Ray's processes shall inherit: its switches, and where our packages are found."""
    environment = os.environ  # noqa: TID251 (the only way to hand these to Ray's processes)
    environment.update(_RAY_ENVIRONMENT)
    if not any(name.startswith("RAY_AUTH_") for name in environment):
        # Ray's ports take orders from whoever holds this word; without one given it would keep one in the home folder.
        environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(import_root) not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([str(import_root), *paths])


class LocalRay:
    """Ray on this machine, with its sockets and logs in ``ray_dir``."""

    def __init__(self, ray_dir: Path) -> None:
        self._ray_dir = ray_dir
        self._watch: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start Ray and connect to it. Call it on the main thread: the kernel ends Ray's processes when the thread that
        started them ends."""
        import ray

        with _lean_node():
            ray.init(
                address="local",
                num_cpus=0,  # no idle workers are started ahead; the actors of Serve and ours ask for no CPU
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(self._ray_dir),
            )
        self._watch = _watch_over_agents()

    @property
    def alive(self) -> bool:
        """False when one of Ray's own processes has ended."""
        import ray
        from ray._private import worker

        node = worker._global_node
        return bool(ray.is_initialized() and node is not None and not node.dead_processes())

    def stop(self, *, patience_seconds: float) -> None:
        """End Ray, every process it started and its files. What does not end by itself in time gets SIGKILL."""
        import ray

        family = descendants(os.getpid())
        if self._watch is not None:
            self._watch.kill()
            self._watch.communicate()
        with contextlib.suppress(Exception):
            ray.shutdown()
        end_processes(family, patience_seconds=patience_seconds)
        shutil.rmtree(self._ray_dir, ignore_errors=True)


def descendants(pid: int) -> dict[int, int]:
    """Every living descendant of ``pid`` with its start time in clock ticks: together they name a process for good."""
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None:
                children.setdefault(stat[0], []).append((int(entry.name), stat[1]))
    found: dict[int, int] = {}
    queue = [pid]
    while queue:
        for child, started in children.get(queue.pop(), []):
            found[child] = started
            queue.append(child)
    return found


def end_processes(family: dict[int, int], *, patience_seconds: float) -> None:
    """Wait for these processes to end, then SIGKILL those that are still the ones they were."""
    until = time.monotonic() + patience_seconds
    left = family
    while left and time.monotonic() < until:
        left = {pid: started for pid, started in left.items() if _is_alive(pid, started)}
        time.sleep(0.02)
    for pid, started in left.items():
        if _is_alive(pid, started):
            log.warning("event=ray-process-killed pid=%d", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    while any(_is_alive(pid, started) for pid, started in left.items()) and time.monotonic() < until + 1:
        time.sleep(0.02)


def _is_alive(pid: int, started: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[1] == started


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start time of a process; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else (int(fields[1]), int(fields[19]))


def _watch_over_agents() -> "subprocess.Popen[bytes]":
    """See to it that Ray's agents end when this process is killed.

    The kernel then ends Ray's daemon, and with it all workers; but its two agents first try for minutes to report the
    loss. A shell that waits for the end of this process ends them.
    """
    agents = [str(pid) for child in descendants(os.getpid()) for pid in _children(child)]
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read _; kill -9 "$@" 2>/dev/null', "tidegate-ray-watch", *agents],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _children(pid: int) -> list[int]:
    return [child for child in descendants(pid) if (_stat(child) or (0, 0))[0] == pid]


@contextlib.contextmanager
def _lean_node() -> Iterator[None]:
    """Inside, Ray starts the processes it cannot do without, no others, and waits for them with patience."""
    from ray._private import node, services

    class LeanNode(node.Node):
        def start_api_server(self, **_: Any) -> None:
            self._webui_url = ""

        def start_monitor(self) -> None:
            """Machines are not Ray's to start."""

        def start_log_monitor(self) -> None:
            """The instances write to our own standard error."""

    def get_node(gcs_address: str, node_id: str) -> Any:
        # Ray asks without a pause, and so takes a processor from those it waits for; and it gives up after 30 s.
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                return ask(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    full = node.Node
    ask: Callable[[str, str], Any] = services.get_node
    setattr(node, "Node", LeanNode)  # noqa: B010 (a class cannot be assigned to under mypy)
    services.get_node = get_node
    try:
        yield
    finally:
        setattr(node, "Node", full)  # noqa: B010
        services.get_node = ask
