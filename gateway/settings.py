"""Settings of the gateway: section ``gateway`` of ``tidegate.yaml``."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from stores.settings import StoreSettings
from wire.pools import Name, PoolSettings
from wire.settings import SettingsModel


class Role(StrEnum):
    """What the holder of an API key may do."""

    CALLER = "caller"
    """Infer, and read what Triton tells about models."""
    OPERATOR = "operator"
    """Also what changes or watches the server: repository, trace and log settings, shared memory, control API."""


class ApiKeySettings(SettingsModel):
    """One API key, as ``tidegate key`` writes it. The key itself is nowhere."""

    tenant: Name
    """Who it belongs to: quotas and shares are counted by this name. Several keys may name one tenant."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the key, in hexadecimal."""
    role: Role = Role.CALLER
    """What its holder may do."""


class TlsSettings(SettingsModel):
    """TLS on both ports of the data plane. Files that change are read again within a second or two."""

    certificate: Path | None = None
    """PEM file with the certificate chain, relative to this file; without one the ports speak plain text."""
    private_key: Path | None = None
    """PEM file with the certificate's private key, without a password."""
    client_ca: Path | None = None
    """PEM file of authorities: callers must then show a certificate that one of them has signed."""

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key come together")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca needs certificate and private_key")
        return self


class GatewaySettings(SettingsModel):
    """The data plane and the control API."""

    host: str = "127.0.0.1"
    """Address that all listeners bind to; loopback unless you open it."""
    http_port: int = Field(default=8000, ge=1, le=65535)
    """Data plane, Open Inference Protocol over HTTP. Unit: port number."""
    grpc_port: int = Field(default=8001, ge=1, le=65535)
    """Data plane, Open Inference Protocol over gRPC. Unit: port number."""
    metrics_port: int = Field(default=8002, ge=1, le=65535)
    """Prometheus metrics of the gateway. Unit: port number."""
    control_port: int = Field(default=8080, ge=1, le=65535)
    """Control API. Unit: port number."""
    instances: int = Field(default=1, ge=1)
    """Gateway instances (Ray Serve replicas); those on one node share the ports. Unit: instances."""
    body_limit_bytes: int = Field(default=2147483647, ge=1)
    """Largest request or response body, HTTP and gRPC. Unit: bytes."""
    header_limit_bytes: int = Field(default=65536, ge=1024)
    """Largest request head. Unit: bytes."""
    connect_timeout_seconds: float = Field(default=2.0, gt=0)
    """Longest wait for a connection to a replica. Unit: seconds."""
    idle_upstream_seconds: float = Field(default=20.0, gt=0)
    """A pooled connection to a replica is closed after this time without a request. Unit: seconds."""
    idle_client_seconds: float = Field(default=75.0, gt=0)
    """A caller's keep-alive connection is closed after this time without a request. Unit: seconds."""
    body_stall_seconds: float = Field(default=10.0, gt=0)
    """A body (HTTP) that comes at less than a kibibyte per second for this long is refused; a caller who for this long
    reads nothing of an answer is cut off. Time in which he is not read, or held, does not count. Unit: seconds."""
    operator_endpoints: bool = True
    """Whether repository, trace and log settings and shared memory are served on the data plane; else 501."""
    drain_limit_seconds: float = Field(default=30.0, ge=0)
    """Longest wait for requests to finish when an instance leaves. Unit: seconds."""
    tls: TlsSettings = TlsSettings()
    """TLS on both ports of the data plane."""
    api_keys: tuple[ApiKeySettings, ...] = ()
    """Who may call. With none listed everybody may do everything; with one, every call but health needs a key."""


@dataclass(frozen=True)
class InstanceSettings:
    """Everything one gateway instance needs to open its data plane; can be pickled."""

    gateway: GatewaySettings
    store: StoreSettings
    pools: Mapping[str, PoolSettings]
    queues: tuple[str, ...]
    """Names of the queues, for the control API."""
