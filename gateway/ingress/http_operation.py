"""One HTTP request that concerns all replicas of a pool: its body is read whole, and the answer made here."""

import time

from gateway.ingress.http_body import too_large
from gateway.ingress.http_exchange import Caller, Ledger
from gateway.ingress.http_routes import Route, path_of
from gateway.ingress.http_wire import Request, render_answer
from gateway.ingress.operation_answer import AwaitsAnswer
from gateway.ingress.shape_guard import check_nesting
from gateway.pool_wide.from_http import read_operation
from gateway.pool_wide.operations import Operation
from gateway.pool_wide.service import OPERATION_LIMIT_BYTES, PoolWide
from wire.changes import CallAnswer
from wire.errors import ErrorKind, TidegateError

#: Status under which a request counts whose caller left before it was answered.
_CALLER_LEFT = 499


class HttpOperation(AwaitsAnswer):
    """See the module. To its connection it is what an ``Exchange`` is."""

    awaits_body = True
    wants_body = True

    def __init__(
        self,
        request: Request,
        asked: Route,
        operation: Operation,
        *,
        deadline: float | None,
        caller: Caller,
        pool_wide: PoolWide,
        ledger: Ledger,
    ) -> None:
        """``deadline`` is loop time. Raises TidegateError for a body of a declared length that is too long."""
        if request.body_bytes > OPERATION_LIMIT_BYTES:
            raise too_large(OPERATION_LIMIT_BYTES)
        super().__init__()
        self._request, self._route, self._operation = request, asked, operation
        self._deadline = deadline
        self._caller, self._pool_wide, self._ledger = caller, pool_wide, ledger
        self._began = time.perf_counter()
        self._body = bytearray()

    # -- from the caller ----------------------------------------------------------------------------------

    def start(self, body: bytes, *, complete: bool) -> None:
        if self._request.expectation and not complete:
            self._caller.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.send_body(body, complete=complete)

    def send_body(self, data: bytes, *, complete: bool) -> None:
        self._body += data
        if len(self._body) > OPERATION_LIMIT_BYTES:
            self.fail(too_large(OPERATION_LIMIT_BYTES))
        elif complete and not self._ended:
            self.awaits_body = False
            request = self._request
            try:
                check_nesting(self._body)
            except TidegateError as error:
                self.fail(error)
                return
            path = path_of(request.target).decode("latin-1")
            asked = read_operation(self._operation, self._route.model, request.method.decode(), path, bytes(self._body))
            self._work_on(self._pool_wide.answer(asked, deadline=self._deadline, job=request.job))

    def on_caller_writable(self, *, writable: bool) -> None:
        """An answer of ours is written at once and whole."""

    def cancel(self) -> None:
        """The caller is gone."""
        self._end(_CALLER_LEFT, None)

    def break_off(self) -> None:
        """The caller does not take his answer."""
        if not self._ended:
            self._end(_CALLER_LEFT, None)
            self._caller.exchange_broken()

    def fail(self, error: TidegateError) -> None:
        if not self._ended:
            self._end(error.row.http, error.kind)
            self._caller.exchange_failed(error)

    # -- the answer ---------------------------------------------------------------------------------------

    def _answer(self, answer: CallAnswer) -> None:
        request = self._request
        keep_alive = request.keep_alive and self._caller.may_stay
        headers = [] if answer.content_type is None else [(b"Content-Type", answer.content_type.encode("latin-1"))]
        self._caller.write(render_answer(answer.status, headers, answer.body, request, keep_alive=keep_alive))
        self._end(answer.status, None)
        self._caller.exchange_ended(keep_alive=keep_alive)

    def _end(self, status: int, own_error: ErrorKind | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._stop_working()
        self._ledger.count(None, status, own_error, held_seconds=0.0, since=self._began)
