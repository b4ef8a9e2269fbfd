"""All settings as one: ``tidegate.yaml`` and every ``deployments/<pool>/pool.yaml``, validated together."""

from pathlib import Path

from pydantic import Field

from autoscaler.settings import AutoscalerSettings
from gateway.settings import GatewaySettings
from stores.settings import StoreSettings
from wire.pools import Name
from wire.queues import QueueSettings
from wire.settings import SettingsModel
from workers.settings import WorkerSettings


class SystemSettings(SettingsModel):
    """``tidegate.yaml``: the system around the pools."""

    store: StoreSettings = StoreSettings()
    """Where shared state lives."""
    gateway: GatewaySettings = GatewaySettings()
    """The endpoint callers talk to."""
    autoscaler: AutoscalerSettings = AutoscalerSettings()
    """Who decides how many replicas there are."""
    workers: WorkerSettings = WorkerSettings()
    """Who takes jobs from the queues."""
    queues: dict[Name, QueueSettings] = Field(
        default={
            "segment": QueueSettings(handler="workers.handlers.segment:handle", pools=("vision",)),
            "segcls": QueueSettings(handler="workers.handlers.segcls:handle", pools=("vision",)),
        }
    )
    """The queues, by name."""
    state_dir: Path = Path(".tidegate")
    """Folder for the embedded store's data, logs and process records; relative to this file."""
    deployments_dir: Path = Path("deployments")
    """Folder that holds one folder per pool; relative to this file."""
