"""The queues of ``tidegate.yaml``. Read by workers, by the autoscaler (which pools a queue needs) and by producers."""

from pydantic import Field

from wire.pools import Name
from wire.settings import SettingsModel


class QueueSettings(SettingsModel):
    """One queue: a stream of jobs, the handler that does them, and the pools that handler calls."""

    handler: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Import path of the handler, ``package.module:name``."""
    pools: tuple[Name, ...] = Field(min_length=1)
    """Pools whose models the handler calls; the queue's backlog is their demand."""
    payload_limit_bytes: int = Field(default=33554432, ge=1)
    """Largest payload that may be submitted inline. Unit: bytes."""
    max_deliveries: int = Field(default=3, ge=1)
    """A job delivered this often without an outcome (its workers died) becomes a dead letter. Unit: deliveries."""
    claim_seconds: float = Field(default=15.0, ge=1)
    """A claim that was not renewed for this long is taken over by another worker. Unit: seconds."""
    job_limit_seconds: float = Field(default=600.0, gt=0)
    """Longest time one job may take in a worker, cold start included. Unit: seconds."""
    outcome_keep_seconds: float = Field(default=86400.0, ge=1)
    """How long outcomes can be read. Unit: seconds."""
