"""One caller's HTTP/2 connection: each stream that it opens is a call of its own."""

import time
from typing import Protocol

from gateway.ingress import h2_frames as h2
from gateway.ingress.callers import Callers
from gateway.ingress.h2_connection import Http2Connection
from gateway.ingress.h2_frames import Code, ConnectionFault
from gateway.ingress.h2_headers import HeaderBlocks, MalformedError, TooLongError
from gateway.ingress.h2_leg import Leg
from gateway.ingress.rpc_calls import CallHead, error_fields, http_refusal
from gateway.ingress.rpc_operation import RpcOperation
from gateway.ingress.rpc_operation import Service as CallService
from gateway.ingress.rpc_stream import RpcStream
from wire.errors import ErrorKind, TidegateError

#: Calls that one connection may have under way.
_STREAMS = 1000
#: Calls that a connection may cancel, or have refused, at once and per second.
_RESETS = 2000
_RESETS_PER_SECOND = 400
#: A connection begins with the preface, and a header block that has begun ends, within this time. Seconds.
_PATIENCE_SECONDS = 10.0
#: A leaving instance waits so long for the answer to its ping before it takes no more calls. Seconds.
_GOODBYE_SECONDS = 1.0
_GOODBYE = b"farewell"
_SORRY = b"this port speaks gRPC over HTTP/2\n"
_NO_HTTP_2 = (
    b"HTTP/1.1 415 Unsupported Media Type\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(_SORRY), _SORRY)
)


class Service(CallService, Protocol):
    """What a connection needs of its door."""

    callers: "Callers[CallerConnection]"


class CallerConnection(Http2Connection):
    """See the module."""

    CONNECTION_WINDOW = 16 << 20
    SETTINGS = {h2.HEADER_TABLE_SIZE: 0, h2.MAX_CONCURRENT_STREAMS: _STREAMS}  # noqa: RUF012

    def __init__(self, service: Service, blocks: HeaderBlocks[CallHead], header_limit_bytes: int) -> None:
        super().__init__(blocks, header_limit_bytes)
        self._service = service
        self._preface: bytes | None = b""
        self._last_id = 0
        self._resets = _RESETS
        self._resets_at = self._loop.time()
        self._heard_at = self._resets_at
        self._block_since: float | None = None
        self._leaving = False
        self._final_id: int | None = None
        """Once it is told, the last stream that is served."""

    # -- what the event loop calls ------------------------------------------------------------------------

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._service.callers.opened(self)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._preface is not None:
            data = self._preface + data
            if not data.startswith(h2.PREFACE):
                if h2.PREFACE.startswith(data):
                    self._preface = data
                elif not self.closed:
                    self._out.append(_NO_HTTP_2)
                    self.close()
                return
            self._preface = None
            self.introduce()
            data = data[len(h2.PREFACE) :]
            if self._leaving:
                self._say_goodbye()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Answers wait for windows, but heads and refusals do not: who takes no answers may send no calls.
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
        super().resume_writing()

    # -- from the caller ----------------------------------------------------------------------------------

    @property
    def last_peer_stream(self) -> int:
        return self._last_id

    def on_headers(self, stream_id: int, block: bytes, *, end: bool) -> None:
        if not stream_id & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "callers open streams of odd numbers")
        refused = Code.PROTOCOL_ERROR
        head: CallHead | None = None
        too_long = False
        try:
            head = self._blocks.read(block, self._decoder)
        except MalformedError:
            pass
        except TooLongError:
            too_long = True
        leg = self.legs.get(stream_id)
        if leg is not None:
            self._end_by_trailers(leg, end=end)
            return
        if stream_id <= self._last_id:
            self._chore()  # of a stream that is over: it may have been on its way
            return
        if self._final_id is not None:
            return  # whoever reads our goodbye sends it elsewhere
        self._last_id = stream_id
        self.earn()
        if len(self.legs) >= _STREAMS:
            head, refused, too_long = None, Code.REFUSED_STREAM, False
        if head is None and not too_long:
            self._rush()
            self.put(h2.rst_stream(stream_id, refused))
            return
        self._begin(self.new_leg(stream_id), head, end=end)

    def _end_by_trailers(self, leg: Leg, *, end: bool) -> None:
        if leg.in_done:
            raise ConnectionFault(Code.STREAM_CLOSED, "headers behind the end of a stream")
        if not end:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "trailers that do not end their stream")
        leg.in_done = True
        self.on_data(leg, b"", end=True)
        if leg.out_done:
            self.forget(leg)

    def _begin(self, leg: Leg, head: CallHead | None, *, end: bool) -> None:
        leg.in_done = end
        if head is None or head.status != 200:
            self._refuse(leg, head)
        else:
            method, pool_wide = head.method, self._service.pool_wide
            call: RpcStream | RpcOperation
            if pool_wide is not None and method is not None and method.operation is not None:
                call = RpcOperation(self._service, pool_wide, leg, head, method)
            else:
                call = RpcStream(self._service, leg, head)
            leg.owner = call
            call.begin()
            if end:
                call.on_request_data(b"", end=True)
            elif self._service.callers.draining:
                call.leave()
        if leg.in_done and leg.out_done:
            self.forget(leg)

    def _refuse(self, leg: Leg, head: CallHead | None) -> None:
        """A call that is no call."""
        leg.owner = _OVER
        self._rush()
        if head is None:
            error = TidegateError(ErrorKind.TOO_LARGE, "the metadata is longer than header_limit_bytes")
            self._service.count(None, error.row.grpc, error.kind, held_seconds=0.0, since=time.perf_counter())
            leg.end(error_fields(error, started=False))
            return
        block, body = http_refusal(head.status)
        self.put_headers(leg.stream_id, block, end_stream=False)
        leg.send(body, end=True)

    def on_data(self, leg: Leg, data: bytes, *, end: bool) -> None:
        leg.owner.on_request_data(data, end=end)
        if leg.owner is _OVER:
            leg.pass_on(len(data))

    def on_reset(self, leg: Leg, code: int) -> None:
        self._rush()
        leg.owner.cancel()

    def on_unknown_stream(self, stream_id: int, kind: int) -> None:
        if not stream_id & 1 or (stream_id > self._last_id and self._final_id is None):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame for a stream that was never opened")

    def on_goaway(self, last_stream_id: int, code: int) -> None:
        """The caller opens no more streams; those that are open go on."""

    def forget(self, leg: Leg) -> None:
        super().forget(leg)
        leg.owner = _OVER

    def on_leg_over(self) -> None:
        self._close_if_done()

    def on_lost(self) -> None:
        for leg in list(self.legs.values()):
            call = leg.owner
            leg.close()
            call.cancel()

    def on_closed(self) -> None:
        self._service.callers.closed(self)

    def _rush(self) -> None:
        """Count a call that ends before its time. Raises ConnectionFault when too many do."""
        self._resets -= 1
        if self._resets <= 0:
            now = self._loop.time()
            self._resets = min(int((now - self._resets_at) * _RESETS_PER_SECOND), _RESETS)
            self._resets_at = now
            if self._resets <= 0:
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many calls cancelled or refused")

    # -- the end ------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This instance leaves: calls that are under way, or on their way, end; then the connection does."""
        self._leaving = True
        if self._preface is None:
            self._say_goodbye()
        elif not self._preface:
            self.close()
        for leg in list(self.legs.values()):
            leg.owner.leave()

    def _say_goodbye(self) -> None:
        """In two steps, so that calls which cross the first on the wire are still served."""
        self.put(h2.goaway(h2.LARGEST_STREAM_ID, Code.NO_ERROR))
        self.put(h2.frame(h2.PING, 0, 0, _GOODBYE))
        self._loop.call_later(_GOODBYE_SECONDS, self._take_no_more)

    def on_pong(self, payload: bytes) -> None:
        if payload == _GOODBYE and self._leaving:
            self._take_no_more()

    def _take_no_more(self) -> None:
        if self._final_id is None and not self.closed:
            self._final_id = self._last_id
            self.put(h2.goaway(self._final_id, Code.NO_ERROR))
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._final_id is not None and not self.legs:
            self.close()

    def cut(self, error: TidegateError) -> None:
        """Give up the calls under way and close."""
        for leg in list(self.legs.values()):
            leg.owner.fail(error)
        self.fail(Code.NO_ERROR, "")

    def abort(self) -> None:
        self.transport.abort()

    def sweep(self, now: float, idle_seconds: float) -> None:
        """Called now and then (``now``: loop time): end what has been idle, or incomplete, for too long."""
        if self.closed:
            return
        if self._preface is not None:
            if now - self._heard_at > _PATIENCE_SECONDS:
                self.transport.abort()
            return
        self._block_since = (self._block_since or now) if self.mid_block else None
        if self._block_since is not None and now - self._block_since > _PATIENCE_SECONDS:
            self.fail(Code.ENHANCE_YOUR_CALM, "a header block that does not end")
        elif not self.legs and now - self._heard_at > idle_seconds and not self._leaving:
            self.leave()


class _Refused:
    """The owner of a stream that is answered already."""

    def on_request_data(self, data: bytes, *, end: bool) -> None: ...

    def cancel(self) -> None: ...

    def leave(self) -> None: ...

    def fail(self, error: TidegateError) -> None: ...

    def answer_is_all(self, leg: Leg) -> bool:
        return True


_OVER = _Refused()
