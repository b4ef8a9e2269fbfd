"""Ports are looked at before anything starts, so that all taken ones are told at once and nothing is half up."""

import errno
import os
import socket
from collections.abc import Mapping

from tidegate.settings import SystemSettings, ports_of


def ports_to_bind(system: SystemSettings) -> dict[str, tuple[str, int]]:
    """Every port that the system listens on: the setting that names it -> address to bind, port."""
    hosts = {"store.embedded_port": "127.0.0.1"}
    return {key: (hosts.get(key, system.gateway.host), port) for key, port in ports_of(system).items()}


def taken_ports(ports: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Why each port (setting -> address to bind, port) cannot be had; empty when all are free."""
    taken = {}
    for setting, (host, port) in ports.items():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: a connection that lingers from the last run is not in the way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                in_use = error.errno == errno.EADDRINUSE
                words = "is taken" if in_use else f"cannot be opened ({os.strerror(error.errno or 0)})"
                taken[setting] = f"port {port} ({setting}) {words}"
    return taken


def sentence(taken: Mapping[str, str]) -> str:
    """All of them as one sentence."""
    return f"{', '.join(taken.values())}: stop the program that holds it, or set another port in tidegate.yaml"
