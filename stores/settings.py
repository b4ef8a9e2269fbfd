"""Settings of the store: section ``store`` of ``tidegate.yaml``."""

from pydantic import Field, SecretStr

from wire.settings import SettingsModel


class StoreSettings(SettingsModel):
    """Where shared state lives."""

    url: SecretStr | None = None
    """Redis URL (``redis://``, ``rediss://`` or ``unix://``); without one, ``tidegate up`` runs an embedded Valkey."""
    embedded_port: int = Field(default=6390, ge=1, le=65535)
    """Loopback port of the embedded Valkey. Unit: port number."""
    key_prefix: str = Field(default="tidegate", pattern=r"^[A-Za-z0-9_.-]+$")
    """First part of every key, so that several systems can share one store."""
    timeout_seconds: float = Field(default=5.0, gt=0)
    """Longest wait for an answer of the store. Unit: seconds."""

    @property
    def resolved_url(self) -> str:
        """The URL to connect to. Holds the password, if there is one: never print it."""
        if self.url is not None:
            return self.url.get_secret_value()
        return f"redis://127.0.0.1:{self.embedded_port}/0"
