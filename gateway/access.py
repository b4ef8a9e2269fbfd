"""Who calls, and whether he may: API keys.

A key is 256 random bits, so that its plain SHA-256, which is all the settings hold, cannot be turned back by guessing;
a slow password hash would only make every request slow. It comes as ``Authorization: Bearer tidegate_...`` (HTTP header
or gRPC metadata), which tells it from a credential that is meant for somebody behind the gateway.
"""

import hashlib
import secrets
from collections.abc import Iterable

from gateway.settings import ApiKeySettings, Role
from wire.errors import ErrorKind, TidegateError

#: How an Authorization value begins that holds a key of ours; such a value is not sent on to replicas.
KEY_SCHEME = b"bearer tidegate_"
_PREFIX = "tidegate_"


def new_key() -> str:
    """A key that nobody has."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest(key: bytes) -> str:
    """What the settings hold of ``key``."""
    return hashlib.sha256(key).hexdigest()


def is_own_key(authorization: bytes) -> bool:
    """Whether the value of an Authorization header or metadata field holds a key of ours."""
    return authorization[: len(KEY_SCHEME)].lower() == KEY_SCHEME


class Access:
    """The known keys. Without any, everybody may do everything, as with a bare Triton."""

    def __init__(self, keys: Iterable[ApiKeySettings]) -> None:
        self._keys = {key.sha256: key for key in keys}

    def tenant(self, authorization: bytes, *, operator: bool) -> str:
        """The tenant behind an Authorization value (empty: there was none); "" where no keys are known.

        ``operator``: what is asked for changes or watches the server.

        Raises:
            TidegateError: UNAUTHENTICATED or FORBIDDEN.
        """
        if not self._keys:
            return ""
        # Found by its digest: how long that takes says nothing about any known key.
        key = self._keys.get(digest(authorization[len(b"bearer ") :])) if is_own_key(authorization) else None
        if key is None:
            message = "an API key that is known here is needed: Authorization: Bearer tidegate_..."
            raise TidegateError(ErrorKind.UNAUTHENTICATED, message)
        if operator and key.role is not Role.OPERATOR:
            raise TidegateError(ErrorKind.FORBIDDEN, f"this needs an API key with the role {Role.OPERATOR.value}")
        return key.tenant
