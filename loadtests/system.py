"""A running system to measure: ``tidegate up`` with its own settings, ports and state folder, and its end."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loadtests.measured import Side
from loadtests.processes import descendants

_PORT_KEYS = ("http_port", "grpc_port", "metrics_port", "control_port")
_READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class System:
    """Addresses of a running system, how long its start took, and the process everything else descends from."""

    config: Path
    http: str
    grpc: str
    start_seconds: float
    supervisor: int

    def status(self) -> dict[str, Any]:
        """What ``tidegate status --json`` says."""
        out = subprocess.run(
            _tidegate("status", "--json", "--config", str(self.config)), capture_output=True, check=True
        )
        status: dict[str, Any] = json.loads(out.stdout)
        return status

    def replicas(self, count: int) -> list[Side]:
        """The Tritons behind the gateway, without it, once ``count`` are ready. Raises TimeoutError."""
        until = time.monotonic() + _READY_SECONDS
        while time.monotonic() < until:
            found = [replica for pool in self.status()["pools"] for replica in pool["replicas"]]
            ready = [one for one in found if one["state"] == "ready"]
            if len(ready) >= count:
                return [Side("direct", one["http_address"], one["grpc_address"]) for one in ready]
            time.sleep(0.3)
        raise TimeoutError(f"{count} replicas did not become ready within {_READY_SECONDS:.0f} s")

    def gateway(self) -> Side:
        """The data plane, with the processes it lives in."""
        instances = (one.pid for one in descendants(self.supervisor) if one.kind == "ray: gateway instance")
        return Side("gateway", self.http, self.grpc, tuple(instances))

    def triton_pid(self, replica: Side) -> int:
        """The process behind ``replica``."""
        port = replica.http.rsplit(":", 1)[1]
        for one in descendants(self.supervisor):
            if one.kind == "tritonserver" and f"--http-port={port}" in Path(f"/proc/{one.pid}/cmdline").read_text():
                return one.pid
        raise LookupError(f"no tritonserver at {replica.http}")


@contextmanager
def running_system(folder: Path, deployments: Path, **sections: dict[str, Any]) -> Iterator[System]:
    """Start the system in ``folder`` on free ports, serving ``deployments``; bring it down at the end.

    ``sections`` are further sections of ``tidegate.yaml``, e.g. ``workers={"processes": 0}``.

    Raises:
        subprocess.CalledProcessError: the system did not come up; its words are on standard error.
    """
    ports = dict(zip((*_PORT_KEYS, "store"), free_ports(5), strict=True))
    settings: dict[str, Any] = {
        "state_dir": str(folder / "state"),
        "deployments_dir": str(deployments.resolve()),
        "store": {"embedded_port": ports.pop("store")},
        **sections,
        "gateway": ports | sections.get("gateway", {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "tidegate.yaml"
    config.write_text(yaml.safe_dump(settings))
    begin = time.perf_counter()
    subprocess.run(_tidegate("up", "--detach", "--config", str(config)), check=True)
    started = time.perf_counter() - begin
    try:
        record = json.loads((folder / "state" / "up.json").read_text())
        yield System(
            config, f"127.0.0.1:{ports['http_port']}", f"127.0.0.1:{ports['grpc_port']}", started, int(record["pid"])
        )
    finally:
        subprocess.run(_tidegate("down", "--config", str(config)), check=True)


def _tidegate(*args: str) -> list[str]:
    return [sys.executable, "-m", "tidegate", *args]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody has taken just now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def machine() -> str:
    """One line about this machine, for the table's head."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f} at start, Python {sys.version.split()[0]}"
