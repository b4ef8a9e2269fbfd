"""``deployments/<pool>/pool.yaml``: what a pool serves, how it may scale. Read by gateway, replicas, autoscaler."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from wire.settings import SettingsModel

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


class LoadMode(StrEnum):
    """When a model is loaded."""

    PRELOAD = "preload"


class ModelSettings(SettingsModel):
    """One model of the pool's Triton repository."""

    name: Name
    """Name of the model: its directory in the repository."""
    load: LoadMode = LoadMode.PRELOAD
    """When it is loaded: ``preload`` before the replica counts as ready."""
    repeatable: bool = False
    """Whether one request may run twice: then it is sent again, within the retry budget, when its connection broke."""


class ScalingSettings(SettingsModel):
    """How many replicas the pool has."""

    min_replicas: int = Field(default=0, ge=0)
    """Least number of replicas; 0 lets the pool go to zero when idle. Unit: replicas."""
    max_replicas: int = Field(default=2, ge=1)
    """Greatest number of replicas. Unit: replicas."""
    target_demand_per_replica: int = Field(default=16, ge=1)
    """Demand (backlog of jobs plus interactive requests) that one replica is meant to carry. Unit: requests."""
    scale_to_zero_delay_seconds: float = Field(default=30.0, ge=0)
    """The pool goes to zero after no demand, and its newest replica ready, for this long. Unit: seconds."""
    scale_down_delay_seconds: float = Field(default=15.0, ge=0)
    """The pool keeps the most replicas it wanted within this time (a maximum over a window). Unit: seconds."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas must not be above max_replicas ({self.max_replicas})")
        return self


class RoutingPolicy(StrEnum):
    """Which replica gets a request."""

    SPREAD = "spread"
    """The one with the fewest requests in flight."""
    PACK = "pack"
    """The oldest that has a batch to fill, before the next one."""


class TenantSettings(SettingsModel):
    """What one tenant may ask for, of each gateway instance."""

    weight: float = Field(default=1.0, gt=0)
    """Its share inside a class, relative to other tenants that wait. Unit: 1."""
    requests_per_second: float | None = Field(default=None, gt=0)
    """Quota, with a second's worth at once after a pause; null: none. Unit: requests per second."""
    bytes_per_second: float | None = Field(default=None, gt=0)
    """Quota of request bodies whose length is declared (over gRPC: of first messages); null: none. Unit: bytes per
    second."""


class RoutingSettings(SettingsModel):
    """How requests wait for and reach replicas."""

    policy: RoutingPolicy = RoutingPolicy.SPREAD
    """Which replica gets a request: ``spread`` the one with the fewest in flight, ``pack`` the oldest that has a batch
    to fill, so that few replicas run full batches and idle ones can leave."""
    depth_factor: float = Field(default=2.0, ge=1)
    """Requests of a model on a replica at once, as a multiple of what it executes at once (instances, times
    max_batch_size with dynamic batching); the others are held. Unit: batches."""
    max_in_flight_per_replica: int = Field(default=64, ge=1)
    """Requests of all models that one gateway instance has on one replica at once. Unit: requests."""
    hold_limit_seconds: float = Field(default=120.0, ge=0)
    """Longest time a request is held for a replica; 0 turns holding off (503 at once). Unit: seconds."""
    hold_limit_requests: int = Field(default=1000, ge=0)
    """Most requests of class interactive held at once by one gateway instance; those beyond are refused with
    Retry-After. Unit: requests."""
    batch_hold_limit_requests: int = Field(default=1000, ge=0)
    """The same for class batch: jobs, and what its caller declares so. Unit: requests."""
    interactive_weight: float = Field(default=4.0, gt=0)
    """While both classes wait: held requests of class interactive that get a slot for each one of class batch. Neither
    ever takes all. Unit: requests."""
    tenants: dict[Name, TenantSettings] = Field(default_factory=dict)
    """Tenants by name, with ``weight``, ``requests_per_second`` and ``bytes_per_second``: the names of API keys or,
    where there are none, of the header ``tidegate-tenant``. All others count as one
    tenant without quotas."""
    retry_budget_share: float = Field(default=0.1, ge=0, le=1)
    """Requests to repeatable models that may be sent again, as a share of all of them; 0: none. Unit: share."""
    first_byte_limit_seconds: float = Field(default=0.0, ge=0)
    """A replica that has a whole request and does not begin to answer within this time is given up on; 0: it may
    take as long as the request may. Streams are not bound by it. Unit: seconds."""


class ReplicaSettings(SettingsModel):
    """Life of one replica."""

    start_limit_seconds: float = Field(default=300.0, gt=0)
    """A replica that is not ready after this time gives up and leaves. Unit: seconds."""
    drain_limit_seconds: float = Field(default=60.0, ge=0)
    """Longest wait for requests in flight while draining; after it Triton is stopped all the same. Unit: seconds."""
    lease_seconds: float = Field(default=5.0, ge=1)
    """A replica that has not renewed its lease for this long is gone. Unit: seconds."""
    triton_args: tuple[str, ...] = ()
    """Further arguments for tritonserver, appended as they are."""


class MemorySettings(SettingsModel):
    """Memory one replica may use."""

    pinned_pool_bytes: int = Field(default=268435456, ge=0)
    """Triton's pinned host memory pool; 0 disables it. Unit: bytes."""
    shm_default_bytes: int = Field(default=1048576, ge=1048576)
    """First size of a Python-backend stub's shared-memory region. Unit: bytes."""


class PoolSettings(SettingsModel):
    """Interchangeable replicas that serve one model repository: the unit of scaling."""

    models: tuple[ModelSettings, ...] = Field(min_length=1)
    """The models that the pool serves."""
    scaling: ScalingSettings = ScalingSettings()
    """How many replicas."""
    routing: RoutingSettings = RoutingSettings()
    """How requests wait and are spread."""
    replica: ReplicaSettings = ReplicaSettings()
    """Life of one replica."""
    memory: MemorySettings = MemorySettings()
    """Memory of one replica."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [model.name for model in self.models]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"each model may be listed once; doubled: {', '.join(doubled)}")
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.models)
