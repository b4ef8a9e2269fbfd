"""Settings of the store: section ``store`` of ``tidegate.yaml``."""

from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

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

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr | None) -> SecretStr | None:
        wrong = None if url is None else _wrong_with(url.get_secret_value())
        if wrong is not None:
            raise ValueError(wrong)
        return url

    @property
    def resolved_url(self) -> str:
        """The URL to connect to. Holds the password, if there is one: never print it."""
        if self.url is not None:
            return self.url.get_secret_value()
        return f"redis://127.0.0.1:{self.embedded_port}/0"


def _wrong_with(url: str) -> str | None:
    """Which rule ``url`` breaks. The parsers' own words are not passed on: they quote the URL, password and all."""
    if not url.startswith(("redis://", "rediss://", "unix://")):
        return "must begin with redis://, rediss:// or unix://"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "cannot be understood as a URL: percent-encode what is special in its password (/ ? # @ :)"
    if parts.fragment:
        return "must not hold a bare #: percent-encode it as %23"
    if parts.scheme == "unix":
        return None if parts.path else "must name the socket's path, as in unix:///run/redis.sock"
    if not host:
        return "must name a host, as in redis://host:6379/0"
    database = parts.path.strip("/")
    if database and not database.isdecimal():
        return "must end with the number of a database, as in redis://host:6379/0"
    return _wrong_with_options(url) if parts.query else None


def _wrong_with_options(url: str) -> str | None:
    # Only the driver knows its options; it is imported where a URL has some, as importing it takes a while.
    from redis.asyncio import ConnectionPool
    from redis.exceptions import RedisError

    try:
        pool: Any = ConnectionPool.from_url(url)
        pool.make_connection()  # it connects later, on its first use
    except (ValueError, TypeError, RedisError):
        return "has an option after the ? that the Redis driver does not know or cannot read"
    return None
