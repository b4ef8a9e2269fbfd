"""Settings of the workers: section ``workers`` of ``tidegate.yaml``."""

from pydantic import Field

from wire.settings import SettingsModel


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
