"""Who is there: what a replica says of itself, and what a gateway instance says of its load.

Both are written by their owner with a time to live and read by everybody else. A record that is no
longer there is gone; no reader compares its own clock with a time that another machine wrote.
"""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Base of everything exchanged through the store: immutable, unknown fields ignored (older readers go on)."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ReplicaState(StrEnum):
    """The life of a replica. Only READY replicas get new requests."""

    STARTING = "starting"
    """The Triton process is coming up."""
    WARMING = "warming"
    """Triton answers and models are loading; or it was ready, and does not answer at the moment (``reason``)."""
    READY = "ready"
    """Every preloaded model is ready."""
    DRAINING = "draining"
    """Takes nothing new, finishes what it has, then leaves: it was asked to, or something in it broke (``reason``)."""
    FAILED = "failed"
    """Could not start; ``reason`` says why. Kept until its lease ends so that people see it."""


class StartStage(Record):
    """One finished stage of a cold start, e.g. ``process`` or ``load segmenter``."""

    name: str
    seconds: float


class ReplicaLease(Record):
    """Time-bounded membership of one replica, renewed by the replica itself."""

    id: str
    pool: str
    state: ReplicaState
    http_address: str | None = None
    """``host:port`` of Triton's HTTP front end; None until known."""
    grpc_address: str | None = None
    """``host:port`` of Triton's gRPC front end; None until known."""
    metrics_address: str | None = None
    """``host:port`` of Triton's Prometheus endpoint; None until known or where it has none."""
    pid: int | None = None
    """Process id of the replica's agent on its host."""
    models: tuple[str, ...] = ()
    """Names of the models that are loaded and ready."""
    waiting_for: str | None = None
    """What the replica is doing before it is ready, or waiting for while it drains, in plain words."""
    reason: str | None = None
    """Why it failed, drains, or is not ready any more."""
    stages: tuple[StartStage, ...] = ()
    """The finished stages of its cold start, in order."""
    started_at: float = 0.0
    """Unix seconds by the store's clock when the agent started; for display and for order only."""
    ready_at: float | None = None
    """Unix seconds by the store's clock when it became ready."""


class GatewayReport(Record):
    """What one gateway instance says of its load, several times a second; counts are of this instance only."""

    instance: str
    http_address: str
    grpc_address: str
    draining: bool = False
    pools: dict[str, "PoolLoad"] = Field(default_factory=dict)


class PoolLoad(Record):
    """One gateway instance's load on one pool. ``job`` requests come from workers, the others are interactive."""

    held_interactive: int = 0
    held_job: int = 0
    in_flight_interactive: int = 0
    in_flight_job: int = 0
    in_flight_by_replica: dict[str, int] = Field(default_factory=dict)
    requests_total: int = 0
    """Requests for this pool since the instance started, whatever became of them."""
    idle_seconds: float | None = None
    """Seconds since this instance last held or served a request for this pool; None if it never did."""


class Catalogue(Record):
    """What a pool answers about itself while it has no replica: Triton's own words, kept from its last replica.

    Values are the exact response bodies (HTTP) and serialised messages (gRPC, base64) of Triton.
    """

    server_metadata_http: str
    server_metadata_grpc: str
    models: dict[str, "ModelCatalogue"] = Field(default_factory=dict)


class ModelCatalogue(Record):
    """One model's part of the catalogue."""

    metadata_http: str
    config_http: str
    metadata_grpc: str
    config_grpc: str


GatewayReport.model_rebuild()
Catalogue.model_rebuild()

#: HTTP header / gRPC metadata key by which a worker says that a request belongs to a job (its value: the job id).
#: The autoscaler then counts the job once, in the backlog, and not again as interactive demand.
JOB_HEADER = "tidegate-job"
#: HTTP header by which a caller bounds its wait: milliseconds until the answer is worth nothing. gRPC has deadlines.
TIMEOUT_HEADER = "tidegate-timeout-ms"
#: HTTP header / gRPC metadata key by which a caller declares the class of a request; without it a request that belongs
#: to a job is ``batch``, any other ``interactive``.
CLASS_HEADER = "tidegate-class"


#: HTTP header / gRPC metadata key that names the tenant, where the pool's settings list tenants and no API keys are
#: known.
TENANT_HEADER = "tidegate-tenant"


class RequestClass(StrEnum):
    """The two classes of requests, which share slots by weight and wait within bounds of their own."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
