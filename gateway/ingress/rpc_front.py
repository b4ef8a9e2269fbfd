"""A gRPC call until it is clear who answers it: its method, its caller's rights, the model that its first message
names, the sequence that this belongs to. What the gateway answers itself is answered here.
"""

import asyncio
from typing import Protocol

from gateway.access import Access
from gateway.ingress.h2_leg import Leg
from gateway.ingress.heads import is_batch, tenant_of
from gateway.ingress.json_part import timeout_parameter
from gateway.ingress.recovery import Recovery
from gateway.ingress.rpc_calls import OK_HEAD, OK_TRAILERS, UNIMPLEMENTED, CallHead, Kind, error_fields, status_fields
from gateway.ingress.rpc_messages import PREFIX_LENGTH, FirstMessage, MessageMeter, framed
from gateway.ingress.rpc_routes import PREFIX_LIMIT, Routes, Target, stream_error
from gateway.ingress.rpc_sequences import parameters_in, sequence_of
from gateway.ingress.rpc_upstream import UpstreamConnection, Upstreams
from gateway.routing.pool import RequestHead
from wire.errors import ErrorKind, TidegateError

#: Answers of ours inside a stream that its caller has not taken yet. Bytes.
UNREAD_LIMIT = 65536


class Service(Protocol):
    """What a call needs of its door."""

    loop: asyncio.AbstractEventLoop
    access: Access
    routes: Routes
    upstreams: Upstreams
    message_limit_bytes: int

    def count(
        self, pool: str | None, status: int, own_error: ErrorKind | None, *, held_seconds: float, since: float
    ) -> None: ...


class RpcFront(Recovery[UpstreamConnection]):
    """See the module. Begun with :meth:`begin`; a call that a replica answers goes on in ``RpcStream``."""

    __slots__ = (
        "_call",
        "_caller",
        "_look_at",
        "_meter",
        "_pending",
        "_request_done",
        "_service",
        "_skip",
        "_started",
        "_target",
        "_tenant",
    )

    CALLER_LEFT = 1

    def __init__(self, service: Service, caller: Leg, call: CallHead) -> None:
        super().__init__(service.upstreams, service.loop)
        self._service = service
        self._caller = caller
        self._call = call
        self._meter = MessageMeter(service.message_limit_bytes)
        self._pending: bytes | bytearray = b""
        self._skip = 0
        self._look_at = 0
        self._target: Target | None = None
        self._tenant = ""
        self._request_done = False
        self._started = False  # the caller has an answer's head
        if call.timeout_seconds is not None:
            self._deadline = self._arrived + call.timeout_seconds
            self._watch_deadline()

    # -- from the caller ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """The call's head has come. What its method alone decides is decided now."""
        method = self._call.method
        if method is None:
            self._answer_status(UNIMPLEMENTED, f"Method not found: {self._call.path}")
            return
        try:
            if method.kind is not Kind.OWN:
                self._tenant = self._service.access.tenant(self._call.authorization, operator=method.for_operators)
        except TidegateError as error:
            self.fail(error)
            return
        if method.kind is Kind.REFUSED:
            self._choose()

    def _gather(self, data: bytes) -> None:
        """Keep ``data`` until there is a replica, and read what it tells: not at every crumb, as that would cost the
        square of what comes."""
        self._pend(data)
        size = len(self._pending)
        is_whole = size >= PREFIX_LENGTH + int.from_bytes(self._pending[1:PREFIX_LENGTH])
        if not (is_whole or size >= self._look_at or self._request_done):
            return
        if self._target is None:
            self._choose()
        elif self._hold is not None and size < PREFIX_LIMIT:
            self._bound_wait()
        self._look_at = 2 * len(self._pending)

    def fail(self, error: TidegateError) -> None:
        """End the call with an error of ours; what is left of an answer is dropped."""
        if self._ended:
            return
        self._end(error.row.grpc, error.kind)
        self._caller.drop_queue()
        self._caller.end(error_fields(error, started=self._started))

    def _fed(self, data: bytes) -> bool:
        try:
            self._meter.feed(data)
        except TidegateError as error:
            self.fail(error)
            return False
        return True

    def _pend(self, data: bytes) -> None:
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            self._caller.pass_on(skipped)
            data = data[skipped:]
        if not self._pending:
            self._pending = data
        elif data:
            if isinstance(self._pending, bytes):
                self._pending = bytearray(self._pending)
            self._pending += data

    @property
    def _is_stream(self) -> bool:
        return self._call.method is not None and self._call.method.kind is Kind.STREAM

    def _own_timeout(self) -> int | None:
        method, pending = self._call.method, self._pending
        if method is None or not method.has_parameters or not (b"timeout" in pending or pending[:1] == b"\1"):
            return None
        parameters = parameters_in(FirstMessage(bytes(pending), self._call.encoding, last=False), enough=True)
        return None if parameters is None else timeout_parameter(parameters)

    # -- who answers --------------------------------------------------------------------------------------

    def _choose(self) -> None:
        method = self._call.method
        assert method is not None
        while not self._ended:
            if method.kind is Kind.STREAM and not self._pending:
                if self._request_done:
                    self._answer(None)  # a stream without a request
                return
            try:
                chosen = self._service.routes.choose(
                    method, bytes(self._pending), self._call.encoding, last=self._request_done
                )
            except TidegateError as error:
                if method.kind is not Kind.STREAM or error.kind is not ErrorKind.NOT_FOUND:
                    self.fail(error)
                    return
                if not self._answer_in_stream(error):
                    return
                continue
            if isinstance(chosen, bytes):
                self._answer(chosen)
            elif chosen is not None:
                self._choose_replica(chosen)
            return

    def _choose_replica(self, target: Target) -> None:
        """Find a slot, as soon as it is clear whether the request belongs to a sequence."""
        method = self._call.method
        assert method is not None
        part = None
        if target.model in target.pool.sequences.models and method.has_parameters:
            part, certain = sequence_of(
                bytes(self._pending), self._call.encoding, target.model or "", last=self._request_done
            )
            if not certain:
                return
        self._target = target
        self._pool = target.pool
        try:
            self._head = RequestHead(
                target.model,
                self._deadline,
                self._call.job,
                method.name == "ModelInfer",
                batch=is_batch(job=self._call.job, declared=self._call.declared_class),
                tenant=tenant_of(target.pool, self._tenant, self._call.tenant),
                body_bytes=int.from_bytes(self._pending[1:PREFIX_LENGTH]),
            )
        except TidegateError as error:
            self.fail(error)
            return
        if part is None:
            self._find_slot()
        else:
            self._follow_sequence(part)

    def _answer_in_stream(self, error: TidegateError) -> bool:
        """Answer the request at the front as Triton does: the stream goes on. False while more of it has to come."""
        data = bytes(self._pending)
        if len(data) < PREFIX_LENGTH:
            self.fail(error)
            return False
        answer = stream_error(data, self._call.encoding, error.message)
        end = PREFIX_LENGTH + int.from_bytes(data[1:PREFIX_LENGTH])
        if answer is None:
            if self._request_done:
                self.fail(error)
            return False
        if self._caller.waiting_bytes > UNREAD_LIMIT:
            self._fail_unread()
            return False
        self._start_answer()
        self._caller.send(framed(answer))
        self._caller.pass_on(min(end, len(data)))
        self._skip = max(0, end - len(data))
        self._pending = data[end:]
        return True

    def _fail_unread(self) -> None:
        message = f"more than {UNREAD_LIMIT} bytes of errors wait on this stream to be read"
        self.fail(TidegateError(ErrorKind.TOO_LARGE, message))

    def _start_answer(self) -> None:
        if not self._started:
            self._started = True
            self._caller.carrier.put_headers(self._caller.stream_id, OK_HEAD, end_stream=False)

    def _answer(self, message: bytes | None) -> None:
        self._start_answer()
        self._end(0, None)
        if message is not None:
            self._caller.send(framed(message))
        self._caller.end(OK_TRAILERS)

    def _answer_status(self, code: int, message: str) -> None:
        self._end(code, None)
        self._caller.end(status_fields(code, message, [], started=self._started))
