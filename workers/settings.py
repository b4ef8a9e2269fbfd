"""Settings of the workers: section ``workers`` of ``tidegate.yaml``."""

from pathlib import Path

from pydantic import Field

from wire.settings import SettingsModel


class GatewayAccessSettings(SettingsModel):
    """How workers reach the gateway."""

    url: str | None = Field(default=None, pattern=r"^https?://[^/]+$")
    """Its HTTP port, as http://host:port or https://host:port; without one, the gateway of this file."""
    api_key_file: Path | None = None
    """File that holds the workers' API key, where the gateway wants one; relative to this file."""
    ca: Path | None = None
    """PEM file of the authority that signed the gateway's certificate; without one, those the system trusts."""
    certificate: Path | None = None
    """PEM file with the workers' own certificate and its private key, where the gateway wants to see one."""


class WorkerSettings(SettingsModel):
    """Processes that take jobs from the queues. They never load a model."""

    processes: int = Field(default=1, ge=0)
    """Worker processes that ``tidegate up`` runs; each serves all queues. Unit: processes."""
    concurrency: int = Field(default=8, ge=1)
    """Jobs that one worker process has claimed at once. Unit: jobs."""
    cpu_threads: int = Field(default=2, ge=1)
    """Threads for pre- and post-processing, so that renewing claims never waits for it. Unit: threads."""
    drain_limit_seconds: float = Field(default=30.0, ge=0)
    """Longest wait for claimed jobs to finish when a worker leaves; after it they are handed back. Unit: seconds."""
    gateway: GatewayAccessSettings = GatewayAccessSettings()
    """How workers reach the gateway."""
