"""Where one Triton answers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttachAddresses:
    """The front ends of a Triton, each ``host:port`` without a scheme."""

    http: str
    grpc: str
    metrics: str | None
    """None where it serves no metrics."""


def port_of(address: str) -> int:
    """The port of ``host:port``.

    Raises:
        ValueError: ``address`` names none.
    """
    return int(address.rpartition(":")[2])
