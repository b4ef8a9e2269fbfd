"""What becomes of a call: its method, and the model that its first message names, decide who answers it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.ingress.protobuf import bytes_field, nested_field
from gateway.ingress.rpc_calls import YES, Kind, Method
from gateway.ingress.rpc_messages import FirstMessage, plain_name
from gateway.routing.pool import Pool
from wire.errors import ErrorKind, TidegateError

#: A name that so many bytes do not show is taken as missing; it comes first in what any client writes. Bytes.
PREFIX_LIMIT = 49152


class Pools(Protocol):
    """The pools of this gateway instance; gateway.routing.router.Router is one."""

    @property
    def pools(self) -> Mapping[str, Pool]: ...

    def pool_of(self, model: str) -> Pool: ...


class AtZero(Protocol):
    """What a pool answers about itself while it has no ready replica."""

    def grpc(self, method: str, message: bytes) -> bytes | None:
        """The serialised response; None when it is not known here."""


@dataclass(frozen=True, slots=True)
class Target:
    """A replica of ``pool`` answers, one that has ``model`` (None: any)."""

    pool: Pool
    model: str | None


class Routes:
    """See the module."""

    def __init__(self, pools: Pools, at_zero: AtZero) -> None:
        self._pools = pools
        self._at_zero = at_zero

    def choose(  # noqa: C901 - one question after the other
        self, method: Method, data: bytes, encoding: bytes, *, last: bool
    ) -> Target | bytes | None:
        """Who answers a call of which ``data`` has come, ``last`` if that is all: a replica, the message returned
        here, or None while more has to come. Raises TidegateError."""
        if method.field == 1 and not method.at_zero:
            model = plain_name(data)
            if model is not None:
                pool = self._pool_for(method, model)
                return b"" if pool is None else _target(pool, model)
        if method.kind is Kind.REFUSED:
            raise TidegateError(ErrorKind.NOT_SUPPORTED, method.refusal)
        if method.kind is Kind.OWN:
            return YES if last or len(data) > PREFIX_LIMIT else None
        message = FirstMessage(data, encoding, last=last)
        enough = len(data) >= PREFIX_LIMIT
        model = None
        if method.field is not None:
            found = message.guess(method.field) if enough else message.strings(method.field)
            if found is None:
                return None
            model = found.get(method.field) or None
            if method.field == 1 and model is None and method.name != "ModelStatistics":
                model = ""  # no name at all: unknown, as in Triton
        pool = self._pool_for(method, model)
        if pool is None:
            return b""  # ModelReady of an unknown model: ready = false
        if method.at_zero and not pool.has_ready_replica:
            if not message.whole and not enough:
                return None
            known = self._from_memory(method, message)
            if known is not None:
                return known
        if method.name == "ModelReady" and not pool.has_ready_replica_for(model):
            model = None  # any replica may say that it has not got the model: readiness neither waits nor wakes
        return _target(pool, model)

    def _from_memory(self, method: Method, message: FirstMessage) -> bytes | None:
        known = self._at_zero.grpc(method.name, message.body) if message.whole else None
        if known is None and method.name == "ModelReady":
            return b""  # a version of which nothing is known yet: asking whether it is ready wakes nothing
        return known

    def _pool_for(self, method: Method, model: str | None) -> Pool | None:
        """The pool of a model, or None where that is the answer; for the server as a whole any pool with a ready
        replica, else the first. Raises TidegateError."""
        if model is None:
            pools = self._pools.pools.values()
            return next((pool for pool in pools if pool.has_ready_replica), next(iter(pools)))
        try:
            return self._pools.pool_of(model)
        except TidegateError:
            if method.name == "ModelReady":
                return None
            if method.name == "ModelStatistics":
                message = f"requested model '{model}' is not available"
                raise TidegateError(ErrorKind.BAD_REQUEST, message) from None
            if method.name == "TraceSetting":
                raise TidegateError(ErrorKind.BAD_REQUEST, f"Request for unknown model : {model}") from None
            raise


def _target(pool: Pool, model: str | None) -> Target:
    """Raises TidegateError where operators have unloaded the model and no replica is ready to say so."""
    return Target(pool, pool.who_answers_for(model) if model is not None and model in pool.unloaded else model)


def stream_error(data: bytes, encoding: bytes, text: str) -> bytes | None:
    """A ModelStreamInferResponse with an error, as Triton answers a request of a stream it cannot serve; None while
    the request's id may still come."""
    message = FirstMessage(data, encoding, last=False)
    found = message.guess(3) if len(data) >= PREFIX_LIMIT else message.strings(3)
    if found is None:
        return None
    answer = bytes_field(3, found[3].encode()) if found.get(3) else b""
    return bytes_field(1, text.encode()) + nested_field(2, answer)
