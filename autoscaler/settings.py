"""Settings of the autoscaler: section ``autoscaler`` of ``tidegate.yaml``."""

from pydantic import Field

from wire.settings import SettingsModel


class AutoscalerSettings(SettingsModel):
    """How often the autoscaler looks, and what it may trust."""

    poll_seconds: float = Field(default=2.0, gt=0)
    """Time between regular ticks; a poke causes one at once. Unit: seconds."""
    leader_lease_seconds: float = Field(default=5.0, ge=1)
    """A leader that has not renewed for this long is replaced. Unit: seconds."""
