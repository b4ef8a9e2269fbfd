"""Ports that the gateway opens: refused early, and in one sentence, when another program has one."""

import socket

from gateway.settings import GatewaySettings


class PortTakenError(Exception):
    """A port cannot be opened; the text is one sentence for people."""


def refuse_taken_ports(settings: GatewaySettings) -> None:
    """Raises PortTakenError before anything is started.

    Instances share their ports with SO_REUSEPORT, so a foreign program with that option would go unnoticed, and Serve
    would notice a taken port only after ten seconds. A bind without it tells at once.
    """
    for key in ("http_port", "grpc_port", "metrics_port", "control_port"):
        port = getattr(settings, key)
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.host, port))
            except OSError as error:
                raise PortTakenError(f"gateway.{key}: port {port} on {settings.host}: {error.strerror}") from error
