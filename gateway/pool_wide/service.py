"""Operations that concern all replicas: who is asked or changed, and what the caller hears.

A change is written down in the store, where every replica of the pool reads and makes it (``replicas/changes.py``),
those that start later too; the answer comes back the same way. So the order is one for all replicas and all gateways,
and nothing is lost with a gateway.
"""

import asyncio
import ipaddress
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gateway.pool_wide import merging, messages
from gateway.pool_wide.asking import ask
from gateway.pool_wide.changing import Changing, ready_replicas
from gateway.pool_wide.operations import Asked, Operation
from gateway.routing.pool import Pool, RequestHead
from stores.changes import ChangeStore
from wire.changes import CallAnswer, CallProtocol
from wire.errors import ErrorKind, TidegateError

#: Longest request of an operation: what it says is kept in the store. Bytes.
OPERATION_LIMIT_BYTES = 64 << 20
#: Longest name of a file or folder; Triton aborts when it is given a longer one. Bytes.
_NAME_LIMIT = 255
_MERGED: dict[Operation, Callable[[list[Any]], Any]] = {
    Operation.STATISTICS: merging.statistics,
    Operation.INDEX: merging.index,
    Operation.REGIONS: merging.regions,
}
_REMOTE = "shared memory is not supported: a caller and a replica need not be on one machine"
_OFF = "operator endpoints are switched off here (gateway.operator_endpoints)"


class Pools(Protocol):
    """The pools of this gateway instance; gateway.routing.router.Router is one."""

    @property
    def pools(self) -> Mapping[str, Pool]: ...

    def pool_of(self, model: str) -> Pool: ...

    async def refresh(self, pool: Pool) -> None:
        """Read the pool's replicas again, now."""


class PoolIndex(Protocol):
    """What a pool without a ready replica says of its models."""

    def index(self, pool: Pool) -> list[dict[str, str]]: ...


class PoolWide:
    """See the module."""

    def __init__(
        self, pools: Pools, changes: ChangeStore, at_zero: PoolIndex, *, host: str, operator_endpoints: bool
    ) -> None:
        """``host`` is where the doors listen."""
        self._pools = pools
        self._at_zero = at_zero
        self._local = is_loopback(host)
        self._operator_endpoints = operator_endpoints
        self._changing = Changing(changes, pools.refresh)

    def check(self, operation: Operation) -> None:
        """Raises TidegateError where an operation is not for callers of this gateway."""
        if operation.for_operators and not self._operator_endpoints:
            raise TidegateError(ErrorKind.NOT_SUPPORTED, _OFF)
        if operation.shares_memory and not self._shares_a_machine():
            raise TidegateError(ErrorKind.NOT_SUPPORTED, _REMOTE)

    def is_for_one(self, operation: Operation, model: str | None, *, changes: bool) -> bool:
        """Whether one replica's answer, or the memory of its pool, is all there is to hear."""
        by_name = operation in (Operation.STATISTICS, Operation.TRACE) and model is not None
        if by_name and not self._is_known(model or ""):
            return True  # there is nobody to ask, and that is said where models are looked up
        if changes:
            return False
        if operation in (Operation.TRACE, Operation.LOG):
            return True
        pools = self._pools_of(model)
        ready = sum(len(ready_replicas(pool)) for pool in pools)
        if operation is Operation.INDEX:
            return ready == 1 and len(pools) == 1
        return ready <= 1

    async def answer(self, asked: Asked, *, deadline: float | None, job: bool = False) -> CallAnswer:
        """Triton's words, or those of several replicas in one. ``deadline`` is loop time.

        Raises:
            TidegateError: an error of ours.
        """
        self.check(asked.operation)
        try:
            async with asyncio.timeout_at(deadline):
                if asked.changes:
                    return await self._change(asked, RequestHead(None, deadline, job, slotted=False, batch=job))
                return await self._read(asked, RequestHead(None, deadline, job, slotted=False, batch=job))
        except TimeoutError:
            message = f"the deadline passed before every replica had answered ({asked.operation.words})"
            raise TidegateError(ErrorKind.DEADLINE, message) from None

    def close(self) -> None:
        """Wait for no more answers; what is written down is made all the same."""
        self._changing.close()

    # -- reading ------------------------------------------------------------------------------------------

    async def _read(self, asked: Asked, head: RequestHead) -> CallAnswer:
        pools = self._pools_of(asked.model)
        if asked.operation not in _MERGED:
            with await pools[0].reserve(head) as reservation:
                return await ask(reservation.replica, asked.method, asked.path, asked.body)
        replicas = [replica for pool in pools for replica in ready_replicas(pool)]
        answers = await asyncio.gather(*(ask(each, asked.method, asked.path, asked.body) for each in replicas))
        # A replica that cannot be reached is about to be found gone, and its figures with it.
        told = [answer for answer in answers if answer.well]
        if answers and not told:
            return _in_protocol(_first_of_triton(answers), asked.call.protocol)
        documents: list[Any] = [json.loads(answer.body) for answer in told]
        if asked.operation is Operation.INDEX:
            documents += self._indexes_at_zero(pools, only_ready=bool(asked.body) and _only_ready(asked.body))
        merged: Any = _MERGED[asked.operation](documents)
        if asked.call.protocol is CallProtocol.GRPC:
            return CallAnswer(replica="", status=0, body=messages.message(asked.operation, asked.call.target, merged))
        body = json.dumps(merged, separators=(",", ":"), ensure_ascii=False).encode()
        return CallAnswer(replica="", status=200, content_type="application/json", body=body)

    def _indexes_at_zero(self, pools: Sequence[Pool], *, only_ready: bool) -> list[list[dict[str, str]]]:
        indexes = [self._at_zero.index(pool) for pool in pools if not pool.has_ready_replica]
        return [[each for each in index if not only_ready or each.get("state") == "READY"] for index in indexes]

    # -- changing -----------------------------------------------------------------------------------------

    async def _change(self, asked: Asked, head: RequestHead) -> CallAnswer:
        _refuse_fatal(asked)
        pools = await self._pools_to_change(asked)
        nothing = CallAnswer(replica="", status=0)
        if asked.call.protocol is CallProtocol.HTTP:
            nothing = CallAnswer(replica="", status=200, content_type="application/json")
        if not pools:
            return nothing  # Triton unloads what it does not know without a word
        undoes = asked.operation in (Operation.UNLOAD, Operation.UNREGISTER)
        if not undoes and not any(pool.has_ready_replica for pool in pools):
            # It can be refused, so it needs a replica. Unloading cannot: it is written down for the next one.
            (await pools[0].reserve(head)).release()
        answers = await asyncio.gather(*(self._changing.make(pool, asked, head) for pool in pools))
        told = [answer for of_pool in answers for answer in of_pool]
        if not told and undoes:
            return nothing
        if not told:
            message = "no replica was left to answer; what was asked for is kept for the next one"
            raise TidegateError(ErrorKind.REPLICA_LOST, message)
        return _in_protocol(merging.agreed(told, asked.call.protocol), asked.call.protocol)

    # -- which pools --------------------------------------------------------------------------------------

    def _pools_of(self, model: str | None) -> list[Pool]:
        """The pool of a model, else all, those with a ready replica first. Raises TidegateError."""
        if model is not None:
            return [self._pools.pool_of(model)]
        return sorted(self._pools.pools.values(), key=lambda pool: not pool.has_ready_replica)

    def _is_known(self, model: str) -> bool:
        try:
            self._pools.pool_of(model)
        except TidegateError:
            return False
        return True

    async def _pools_to_change(self, asked: Asked) -> list[Pool]:
        """As :meth:`_pools_of`; a model that nobody knows yet is loaded where its files are, unloaded nowhere."""
        if asked.operation is Operation.UNLOAD or asked.operation is Operation.LOAD:
            try:
                return [self._pools.pool_of(asked.model or "")]
            except TidegateError:
                if asked.operation is Operation.UNLOAD:
                    return []
                return [await self._pool_with_files_of(asked.model or "")]
        return self._pools_of(asked.model)

    async def _pool_with_files_of(self, model: str) -> Pool:
        pools = self._pools_of(None)
        for pool in pools if len(pools) > 1 else ():
            for replica in ready_replicas(pool)[:1]:
                answer = await ask(replica, "POST", "/v2/repository/index", b"")
                if answer.well and any(entry.get("name") == model for entry in json.loads(answer.body)):
                    return pool
        return pools[0]

    def _shares_a_machine(self) -> bool:
        """Whether caller, gateway and all replicas must be on this machine: all of them talk over loopback."""
        addresses = [lease.http_address for pool in self._pools.pools.values() for lease in pool.replicas]
        return self._local and all(is_loopback(address.rpartition(":")[0]) for address in addresses if address)


def is_loopback(host: str) -> bool:
    """Whether what listens at ``host`` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _first_of_triton(answers: Sequence[CallAnswer]) -> CallAnswer:
    return next((answer for answer in answers if answer.unreachable is None), answers[0])


def _in_protocol(answer: CallAnswer, protocol: CallProtocol) -> CallAnswer:
    """An answer in the words of the caller's protocol. Raises TidegateError where no replica has said anything."""
    if answer.unreachable is not None:
        raise TidegateError(ErrorKind.REPLICA_UNREACHABLE, answer.unreachable)
    if protocol is CallProtocol.GRPC and answer.status >= 100:
        return CallAnswer(replica="", status=messages.status(answer.status), details=merging.words(answer))
    return answer


def _only_ready(body: bytes) -> bool:
    try:
        given = json.loads(body)
    except ValueError:
        return False
    return isinstance(given, dict) and given.get("ready") is True


def _refuse_fatal(asked: Asked) -> None:
    """Triton aborts, all of it, over a file whose name no file system takes. Raises TidegateError."""
    for name in asked.names:
        kind, colon, path = name.partition(":")
        if kind == "file" and colon and any(len(part.encode()) > _NAME_LIMIT for part in path.split("/")):
            message = f"a file's name in 'file:' may be {_NAME_LIMIT} bytes long"
            raise TidegateError(ErrorKind.BAD_REQUEST, message)
