"""TLS on the ports of the data plane, with certificates that may change while it runs."""

import logging
import ssl
from pathlib import Path

from gateway.settings import TlsSettings

log = logging.getLogger(__name__)

#: Application protocols, by door.
HTTP = "http/1.1"
GRPC = "h2"


class UnusableCertificateError(Exception):
    """A file of the TLS settings cannot be used; the message is one sentence."""


class ServerTls:
    """The TLS side of one listening port. ``context`` is for asyncio; it changes with the files."""

    def __init__(self, settings: TlsSettings, protocol: str) -> None:
        """``protocol`` is HTTP or GRPC. Raises UnusableCertificateError."""
        assert settings.certificate is not None and settings.private_key is not None
        self._settings = settings
        self._certificate, self._private_key = settings.certificate, settings.private_key
        self._seen = self._stamps()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols([protocol])
        if settings.client_ca is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._load(self.context)

    def reload_if_changed(self) -> bool:
        """Use the files for new connections if they have changed; files that are unusable change nothing, once told."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))  # both files fit, or the old ones stay
            self._load(self.context)
        except UnusableCertificateError as error:
            log.error("event=certificate-not-reloaded error=%r", str(error))
            return False
        log.info("event=certificate-reloaded file=%r", str(self._certificate))
        return True

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            # Without a password function OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self._certificate, self._private_key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise UnusableCertificateError(f"{self._certificate} and {self._private_key}: {_why(error)}") from error
        if self._settings.client_ca is not None:
            try:
                context.load_verify_locations(cafile=self._settings.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise UnusableCertificateError(f"{self._settings.client_ca}: {_why(error)}") from error

    def _stamps(self) -> list[tuple[int, int]]:
        files = (self._settings.certificate, self._settings.private_key, self._settings.client_ca)
        return [_stamp(file) for file in files if file is not None]


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()  # follows links: secrets of Kubernetes are links that move
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not usable ({error.reason or error})"
    return error.strerror or str(error)
