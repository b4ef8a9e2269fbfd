"""What a request says of itself beyond its protocol, as routing understands it."""

from gateway.routing.pool import Pool
from wire.errors import ErrorKind, TidegateError
from wire.membership import CLASS_HEADER, RequestClass

_BATCH = {RequestClass.BATCH.value.encode(): True, RequestClass.INTERACTIVE.value.encode(): False}


def is_batch(*, job: bool, declared: bytes | None) -> bool:
    """The class of a request; ``declared`` is the value of CLASS_HEADER, if it came. Raises BAD_REQUEST."""
    if declared is None:
        return job
    batch = _BATCH.get(declared)
    if batch is None:
        raise TidegateError(ErrorKind.BAD_REQUEST, f"{CLASS_HEADER} must be interactive or batch")
    return job or batch


def tenant_of(pool: Pool, of_key: str, named: bytes | None) -> str:
    """Whose a request is: ``of_key`` is the tenant of its API key, "" where no keys are known; ``named`` the value of
    TENANT_HEADER, if it came."""
    if of_key or named is None:
        return of_key
    # A name that nobody listed gives no queue of its own: callers could make up as many as they like.
    name = named.decode("latin-1")
    return name if name in pool.settings.routing.tenants else ""
