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

_PORT_KEYS = ("http_port", "grpc_port", "metrics_port", "control_port")


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


@contextmanager
def running_system(folder: Path, deployments: Path, **sections: dict[str, Any]) -> Iterator[System]:
    """Start the system in ``folder`` on free ports, serving ``deployments``; bring it down at the end.

    ``sections`` are further sections of ``tidegate.yaml``, e.g. ``workers={"processes": 0}``.

    Raises:
        subprocess.CalledProcessError: the system did not come up; its words are on standard error.
    """
    ports = dict(zip((*_PORT_KEYS, "store"), _free_ports(5), strict=True))
    settings: dict[str, Any] = {
        "state_dir": str(folder / "state"),
        "deployments_dir": str(deployments.resolve()),
        "store": {"embedded_port": ports.pop("store")},
        "gateway": ports,
        **sections,
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


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def machine() -> str:
    """One line about this machine, for the table's head."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f} at start, Python {sys.version.split()[0]}"
