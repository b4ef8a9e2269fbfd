"""The whole system for a test: started through its command line, with ports, settings and a state folder of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stores.settings import StoreSettings
from stores.store import Store
from tidegate.supervisor.processes import Process, processes_of

ROOT = Path(__file__).parents[2]
_PORTS = ("http_port", "grpc_port", "metrics_port", "control_port")


@dataclass(frozen=True, slots=True)
class System:
    """A running system."""

    config: Path
    settings: dict[str, Any]

    @property
    def http_address(self) -> str:
        return f"127.0.0.1:{self.settings['gateway']['http_port']}"

    @property
    def http_url(self) -> str:
        return f"http://{self.http_address}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.settings['gateway']['grpc_port']}"

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self.settings['gateway']['control_port']}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.settings['gateway']['metrics_port']}/metrics"

    @property
    def state_dir(self) -> Path:
        return self.config.parent / "state"

    @property
    def store_settings(self) -> StoreSettings:
        return StoreSettings.model_validate(self.settings["store"])

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Store]:
        """A connection to its store."""
        store = Store.connect(self.store_settings, client_name="test")
        try:
            yield store
        finally:
            await store.close()

    def command(self, *arguments: str) -> list[str]:
        """``tidegate ARGUMENTS`` for this system."""
        return [sys.executable, "-m", "tidegate", *arguments, "--config", str(self.config)]

    def tidegate(self, *arguments: str, check: bool = True, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, cwd=ROOT, timeout=timeout)
        if check and done.returncode != 0:
            raise AssertionError(f"tidegate {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.tidegate("status", "--json").stdout)
        return status

    def replicas(self, pool: str = "vision") -> list[dict[str, Any]]:
        """The leases of a pool."""
        (found,) = [row for row in self.status()["pools"] if row["name"] == pool]
        return list(found["replicas"])

    def pids(self, name: str) -> list[int]:
        """Processes by what ``status`` calls them: supervisor, store, gateway, autoscaler, worker-1, a replica's id."""
        return [row["pid"] for row in self.status()["processes"] if row["name"] == name and row["pid"]]

    def processes(self) -> list[Process]:
        """Every process below the supervisor, whoever started it."""
        return processes_of(self.config)

    def replica_pids(self) -> list[int]:
        """Agents of replicas."""
        return [process.pid for process in self.processes() if process.is_replica]

    def triton_pids(self) -> list[int]:
        """Triton servers of this system, found among all processes by the folder they run from."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                command = Path(f"/proc/{entry}/cmdline").read_bytes() if entry.isdigit() else b""
            except OSError:
                continue
            if b"tritonserver" in command.split(b"\0")[0] and str(self.state_dir).encode() in command:
                found.append(int(entry))
        return found

    def wait_until(self, condition: Callable[["System"], Any], seconds: float, what: str) -> Any:
        """The first true answer of ``condition``; fails naming ``what`` was awaited."""
        limit = time.monotonic() + seconds
        while not (answer := condition(self)):
            assert time.monotonic() < limit, f"{what}: not within {seconds:g} s; {self.last_words()}"
            time.sleep(0.1)
        return answer

    def wait_for_zero(self, seconds: float = 60) -> None:
        """Until no replica and no Triton exists."""
        self.wait_until(lambda it: not it.replica_pids() and not it.triton_pids(), seconds, "the pool at zero")

    def wait_for_ready(self, count: int = 1, seconds: float = 60) -> list[dict[str, Any]]:
        """Until at least ``count`` replicas are ready; their leases."""

        def ready(system: "System") -> list[dict[str, Any]]:
            leases = [lease for lease in system.replicas() if lease["state"] == "ready"]
            return leases if len(leases) >= count else []

        leases: list[dict[str, Any]] = self.wait_until(ready, seconds, f"{count} ready replicas")
        return leases

    def last_words(self) -> str:
        """The end of every log, for a failing test."""
        logs = sorted(self.state_dir.glob("**/*.log"))
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:]) for log in logs
        )


@contextmanager
def running_system(
    folder: Path,
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    pool: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[System]:
    """``tidegate up --detach`` in ``folder``; ``tidegate down`` at the end, after which no process may be left.

    ``settings`` are merged over sections of tidegate.yaml, ``pool`` over sections of the vision pool's pool.yaml.
    """
    system = prepare(folder, settings=settings, pool=pool)
    try:
        system.tidegate("up", "--detach")
        yield system
    except BaseException:
        sys.stderr.write(system.last_words() + "\n")
        raise
    finally:
        down = system.tidegate("down", check=False)
        left = [str(process) for process in system.processes()] + [f"triton {pid}" for pid in system.triton_pids()]
        assert down.returncode == 0, down.stdout + down.stderr
        assert "left behind" not in down.stdout, down.stdout
        assert not left, f"left behind: {left}"


def prepare(
    folder: Path,
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    pool: Mapping[str, Mapping[str, Any]] | None = None,
) -> System:
    """The settings of a system that is not started yet."""
    *ports, store_port = free_ports(5)
    document: dict[str, Any] = {
        "state_dir": "state",
        "store": {"embedded_port": store_port},
        "gateway": dict(zip(_PORTS, ports, strict=True)),
    }
    for section, values in (settings or {}).items():
        document[section] = {**document.get(section, {}), **values}
    _deployments(folder / "deployments" / "vision", pool or {})
    config = folder / "tidegate.yaml"
    config.write_text(yaml.safe_dump(document))
    return System(config.resolve(), document)


def _deployments(folder: Path, pool: Mapping[str, Mapping[str, Any]]) -> None:
    """The shipped pool with other settings; its models are the shipped files themselves."""
    shipped = ROOT / "deployments" / "vision"
    folder.mkdir(parents=True)
    document = yaml.safe_load((shipped / "pool.yaml").read_text())
    for section, values in pool.items():
        document[section] = {**document.get(section, {}), **values}
    (folder / "pool.yaml").write_text(yaml.safe_dump(document))
    for name in ("models", "sources.yaml"):
        (folder / name).symlink_to(shipped / name)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
