"""What a request says of itself beyond its protocol, as routing understands it."""

from gateway.routing.pool import Pool, RequestHead
from wire.errors import ErrorKind, TidegateError
from wire.membership import CLASS_HEADER, RequestClass

_BATCH = {RequestClass.BATCH.value.encode(): True, RequestClass.INTERACTIVE.value.encode(): False}


def request_head(
    pool: Pool, model: str | None, deadline: float | None, *, job: bool, slotted: bool, declared: bytes | None
) -> RequestHead:
    """The head of a request; ``declared`` is the value of CLASS_HEADER, if it came. Raises BAD_REQUEST."""
    batch = job
    if declared is not None:
        declares = _BATCH.get(declared)
        if declares is None:
            raise TidegateError(ErrorKind.BAD_REQUEST, f"{CLASS_HEADER} must be interactive or batch")
        batch = job or declares
    return RequestHead(model, deadline, job, slotted, batch=batch)
