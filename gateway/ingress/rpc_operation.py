"""One gRPC call that may concern all replicas of a pool: its message is read whole; then the answer is made here, or
the call goes the way of all others, to one replica."""

import asyncio
import time
import zlib
from dataclasses import replace
from typing import Protocol

from gateway.ingress.h2_leg import Leg
from gateway.ingress.operation_answer import AwaitsAnswer
from gateway.ingress.rpc_calls import OK_HEAD, OK_TRAILERS, CallHead, Kind, Method, error_fields, status_fields
from gateway.ingress.rpc_front import Service as CallService
from gateway.ingress.rpc_messages import PREFIX_LENGTH, framed
from gateway.ingress.rpc_stream import RpcStream
from gateway.pool_wide.from_grpc import can_be_asked, read_operation
from gateway.pool_wide.operations import Asked, Operation
from gateway.pool_wide.service import OPERATION_LIMIT_BYTES, PoolWide
from wire.changes import CallAnswer
from wire.errors import ErrorKind, TidegateError

#: As long as no more has come, the caller is not told that it was taken: the call may go to a replica. Bytes.
_KEPT_LIMIT = 32768
_CANCELLED = 1
_WBITS = {b"gzip": 31, b"deflate": 15}


class Service(CallService, Protocol):
    """What an operation needs of its door."""

    pool_wide: PoolWide | None


class RpcOperation(AwaitsAnswer):
    """See the module. To its connection it is what an ``RpcStream`` is."""

    def __init__(self, service: Service, pool_wide: PoolWide, leg: Leg, head: CallHead, method: Method) -> None:
        super().__init__()
        assert method.operation is not None
        self._operation: Operation = method.operation
        self._service, self._pool_wide, self._leg, self._head, self._method = service, pool_wide, leg, head, method
        self._began = time.perf_counter()
        self._deadline = None if head.timeout_seconds is None else service.loop.time() + head.timeout_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._data = bytearray()

    # -- from the caller ----------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._deadline is not None:
            self._timer = self._service.loop.call_at(self._deadline, self._on_deadline)
        try:
            self._service.access.tenant(self._head.authorization, operator=self._method.for_operators)
        except TidegateError as error:
            self.fail(error)

    def on_request_data(self, data: bytes, *, end: bool) -> None:
        if self._ended or self._working is not None:
            self._leg.pass_on(len(data))
            return
        self._data += data
        if len(self._data) > OPERATION_LIMIT_BYTES:
            message = f"a request of this kind may be {OPERATION_LIMIT_BYTES} bytes long"
            self.fail(TidegateError(ErrorKind.TOO_LARGE, message))
            return
        if len(self._data) > _KEPT_LIMIT:
            self._leg.pass_on(len(self._data))
        if end or self._is_whole():
            try:
                self._decide(end=end)
            except TidegateError as error:
                self.fail(error)

    def leave(self) -> None:
        """An answer is made in a moment, or given up with the rest."""

    def cancel(self) -> None:
        """The caller is gone."""
        self._end(_CANCELLED, None)

    def fail(self, error: TidegateError) -> None:
        if not self._ended:
            self._end(error.row.grpc, error.kind)
            self._leg.end(error_fields(error, started=False))

    def answer_is_all(self, leg: Leg) -> bool:
        """As for any call: an answer ends a request."""
        return leg is self._leg

    # -- who answers --------------------------------------------------------------------------------------

    def _is_whole(self) -> bool:
        return len(self._data) >= PREFIX_LENGTH and len(self._data) - PREFIX_LENGTH >= self._length

    @property
    def _length(self) -> int:
        return int.from_bytes(self._data[1:PREFIX_LENGTH])

    def _decide(self, *, end: bool) -> None:
        """Raises TidegateError."""
        asked = self._asked()
        self._pool_wide.check(asked.operation)
        for_one = self._pool_wide.is_for_one(asked.operation, asked.model, changes=asked.changes)
        if len(self._data) <= _KEPT_LIMIT and (for_one or not can_be_asked(asked)):
            self._hand_over(end=end)
            return
        self._work_on(self._pool_wide.answer(asked, deadline=self._deadline, job=self._head.job))

    def _asked(self) -> Asked:
        """Raises TidegateError."""
        message = bytes(self._data[PREFIX_LENGTH : PREFIX_LENGTH + self._length])
        try:
            if self._data[:1] == b"\x01":
                message = _unpacked(message, self._head.encoding)
            return read_operation(self._operation, self._method.name, message)
        except (ValueError, zlib.error):
            raise TidegateError(ErrorKind.BAD_REQUEST, "the request is no message that can be read") from None

    def _hand_over(self, *, end: bool) -> None:
        """One replica's answer is the answer."""
        if self._timer is not None:
            self._timer.cancel()
        head = replace(self._head, method=replace(self._method, kind=Kind.REPLICA))
        call = RpcStream(self._service, self._leg, head)
        self._leg.owner = call
        call.begin()
        call.on_request_data(bytes(self._data), end=end)

    # -- the answer ---------------------------------------------------------------------------------------

    def _answer(self, answer: CallAnswer) -> None:
        self._end(answer.status, None)
        if answer.status:
            self._leg.end(status_fields(answer.status, answer.details, [], started=False))
            return
        self._leg.carrier.put_headers(self._leg.stream_id, OK_HEAD, end_stream=False)
        self._leg.send(framed(answer.body))
        self._leg.end(OK_TRAILERS)

    def _on_deadline(self) -> None:
        self.fail(TidegateError(ErrorKind.DEADLINE, "the deadline passed before every replica had answered"))

    def _end(self, status: int, own_error: ErrorKind | None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._stop_working()
        self._leg.pass_on(len(self._data))
        self._service.count(None, status, own_error, held_seconds=0.0, since=self._began)


def _unpacked(message: bytes, encoding: bytes) -> bytes:
    """Raises TidegateError and zlib.error."""
    wbits = _WBITS.get(encoding)
    if wbits is None:
        raise TidegateError(ErrorKind.NOT_SUPPORTED, "messages are compressed with gzip or deflate, or not at all")
    unpacker = zlib.decompressobj(wbits)
    plain = unpacker.decompress(message, OPERATION_LIMIT_BYTES)
    if unpacker.unconsumed_tail:
        message_limit = f"a request of this kind may be {OPERATION_LIMIT_BYTES} bytes long"
        raise TidegateError(ErrorKind.TOO_LARGE, message_limit)
    return plain
