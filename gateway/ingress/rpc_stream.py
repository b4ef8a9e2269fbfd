"""One gRPC call on its way: a stream of the caller's, a stream to the replica, and what happens when one of them fails.

Who answers it: rpc_front.py. How it gets a slot and a connection: placement.py. Every way out of a call goes through
``_end``, once.
"""

from gateway.ingress.h2_frames import Code
from gateway.ingress.h2_leg import Leg
from gateway.ingress.placement import RESEND_LIMIT
from gateway.ingress.rpc_calls import (
    UNKNOWN,
    AnswerHead,
    CallHead,
    error_fields,
)
from gateway.ingress.rpc_front import UNREAD_LIMIT, RpcFront, Service
from gateway.ingress.rpc_messages import MessageMeter, framed
from gateway.ingress.rpc_sequences import StreamSequences, leaving_error
from gateway.ingress.rpc_upstream import UpstreamConnection
from gateway.routing.faults import SentAway, sent_away
from wire.errors import ErrorKind, TidegateError

#: Up to this size, and in so many pieces, what was sent is kept until there is an answer, to send it again. Bytes.
_REPLAY_LIMIT = 65536
_REPLAY_PIECES = 256
#: The loop's clock moves in steps of this size: a call sent on in the same one has its whole deadline left. Seconds.
_CLOCK_SECONDS = 0.001
#: A replica that gives up this close to the deadline does so because of it. Seconds.
_DEADLINE_SLACK = 0.05
_UNAVAILABLE = 14
#: gRPC statuses with which a replica may send a call away: NOT_FOUND, UNAVAILABLE.
_SENT_AWAY = frozenset((5, _UNAVAILABLE))
#: gRPC statuses that callers make of a reset stream; of other codes they make INTERNAL.
_STATUS_OF_RESET = {Code.REFUSED_STREAM: 14, Code.CANCEL: 1, Code.ENHANCE_YOUR_CALM: 8}


class RpcStream(RpcFront):
    """See the module. Begun by what the caller sends; ended by itself, or by :meth:`cancel` or :meth:`fail`."""

    __slots__ = (
        "_answer_meter",
        "_cut",
        "_headed",
        "_leaving",
        "_replay",
        "_replay_bytes",
        "_sorter",
        "_up",
        "_winding",
    )

    def __init__(self, service: Service, caller: Leg, call: CallHead) -> None:
        super().__init__(service, caller, call)
        self._answer_meter = MessageMeter(service.message_limit_bytes)
        self._up: Leg | None = None
        self._sorter: StreamSequences | None = None
        self._replay: list[bytes] | None = []
        self._replay_bytes = 0
        self._headed = False  # the replica has sent an answer's head
        self._leaving = False
        self._winding = False  # leaving once the sequences that came this way are over
        self._cut = False

    # -- from the caller ----------------------------------------------------------------------------------

    def on_request_data(self, data: bytes, *, end: bool) -> None:
        """More of the request, ``end`` if nothing follows."""
        self._request_done = end
        if self._ended or self._cut:
            self._caller.pass_on(len(data))
            return
        if self._up is None:
            if self._fed(data):
                self._gather(data)
            return
        if self._leaving:
            size = self._meter.until_boundary(data)
            if size < len(data):
                self._caller.pass_on(len(data) - size)
                data, end, self._request_done = data[:size], False, False
        if self._fed(data):
            self._relay(self._up, data, end=end)
            if self._leaving:
                self._cut_request()

    def leave_replica(self) -> None:
        """The replica leaves, and stays for its sequences: a stream that carries one may go on as long."""
        if self._sorter is not None and self._sorter.live():
            self._winding = True
        else:
            self.leave()

    def leave(self) -> None:
        """The replica, or this instance, leaves: a two-way stream ends behind the message that is under way. What the
        replica still has to answer comes through."""
        if self._ended or self._leaving or not self._is_stream:
            return
        self._leaving = True
        if self._up is not None:
            self._cut_request()
        elif self._target is None:
            self.fail(leaving_error())

    def answer_is_all(self, leg: Leg) -> bool:
        """Whether the end of our side of ``leg`` ends the other side too: an answer ends a request."""
        return leg is self._caller

    def _cut_request(self) -> None:
        if self._up is not None and not self._cut and not self._request_done and self._meter.at_boundary:
            self._cut = True
            self._up.end(None)

    # -- to the replica -----------------------------------------------------------------------------------

    def _send_on(self, connection: UpstreamConnection) -> None:
        block = self._call.block
        if self._deadline is not None:
            now = self._loop.time()
            if now - self._arrived > _CLOCK_SECONDS:
                block = self._call.block_with(self._deadline - now)
        self._up = up = connection.open(self, block)
        if self._pool.sequences.models and self._is_stream:
            self._sort_messages(connection.replica_id)
        up.source, self._caller.source = self._caller, up
        if self._pending or self._request_done:
            data, self._pending = bytes(self._pending), b""
            self._relay(up, data, end=self._request_done)
        if self._leaving:
            self._cut_request()
        elif connection.retired:
            self.leave()

    def _sort_messages(self, replica_id: str) -> None:
        """From now on each message of the stream says which sequence it belongs to."""
        self._sorter = StreamSequences(self._pool.sequences, self._call.encoding, replica_id)
        if self._sequence is not None:
            self._pool.sequences.leave(self._sequence, self, ended=False)
            self._sequence = None

    def _relay(self, up: Leg, data: bytes, *, end: bool) -> None:
        sorter = self._sorter
        if sorter is None:
            self._send(up, data, end=end)
            return
        passed = sorter.sort(data, last=end)
        for answer in sorter.answers:
            self._start_answer()
            self._caller.send(framed(answer))
        if sorter.answers and self._caller.waiting_bytes > UNREAD_LIMIT:
            self._fail_unread()
            return
        if sorter.dropped:
            self._caller.pass_on(sorter.dropped)
        if passed or end:
            self._send(up, passed, end=end)
        if self._winding and not sorter.live():
            self.leave()

    def _send(self, up: Leg, data: bytes, *, end: bool) -> None:
        replay = self._replay
        if replay is not None and data:
            self._replay_bytes += len(data)
            if self._replay_bytes > _REPLAY_LIMIT or len(replay) == _REPLAY_PIECES:
                self._replay = None
            else:
                replay.append(data)
        up.send(data, end=end)
        if end and self._pool.faults.first_byte_limit_seconds and not self._is_stream:
            self._await_first_byte()

    # -- from the replica ---------------------------------------------------------------------------------

    def on_answer_headers(self, head: AnswerHead, *, end: bool) -> None:
        if self._ended:
            return
        if self._fault_timer is not None:
            self._on_first_byte()
        if head.status is None and not self._headed:
            self.on_nonsense()
        elif end:
            status = UNKNOWN if head.grpc_status is None else head.grpc_status
            if status in _SENT_AWAY and not self._headed and self._was_sent_away(head):
                return
            self._complete(status, head.trailers if self._started else head.block)
        elif head.status is not None and head.status >= 200:
            self._replay = None
            self._headed = True
            if not self._started:
                self._started = True
                self._caller.carrier.put_headers(self._caller.stream_id, head.block, end_stream=False)

    def _was_sent_away(self, head: AnswerHead) -> bool:
        """Whether that was said already: the call is on its way elsewhere, or over."""
        why = sent_away(unavailable=head.grpc_status == _UNAVAILABLE, message=head.message)
        if why is not None and self._move():
            return True
        if why is SentAway.QUEUE_FULL and not self._started:
            self._complete(_UNAVAILABLE, head.with_retry_after(self._pool.retry_after_full(batch=self._head.batch)))
            return True
        return False

    def on_answer_data(self, data: bytes, *, end: bool) -> None:
        if self._ended:
            return
        if not self._headed:
            self.on_nonsense()
            return
        try:
            self._answer_meter.feed(data)
        except TidegateError as error:
            self.fail(error)
            return
        if end:
            self._end(UNKNOWN, None)
        self._caller.send(data, end=end)

    def _complete(self, status: int, trailers: bytes) -> None:
        if self._reservation is not None:
            self._reservation.release_answered()
        if self._leaving and status == 0 and self._cut:
            self._end(leaving_error().row.grpc, ErrorKind.DRAINING)
            self._caller.end(error_fields(leaving_error(), started=self._started))
            return
        self._end(status, None)
        self._caller.end(trailers)

    def on_nonsense(self) -> None:
        """What the replica sends is no answer."""
        message = "the replica's answer is no gRPC; the request may have run"
        self.fail(TidegateError(ErrorKind.REPLICA_LOST, message))

    def on_upstream_reset(self, code: int) -> None:
        """The replica has reset the stream."""
        if self._ended:
            return
        if code == Code.REFUSED_STREAM and not self._started:
            self.on_not_run()
        elif self._deadline is not None and self._loop.time() > self._deadline - _DEADLINE_SLACK:
            self.fail(TidegateError(ErrorKind.DEADLINE, "the deadline passed while the request was on a replica"))
        else:
            self._end(_STATUS_OF_RESET.get(Code(code) if code <= max(Code) else Code.INTERNAL_ERROR, 13), None)
            self._caller.reset(code)

    def on_not_run(self) -> None:
        """The replica says that it has not looked at the request."""
        if not self._ended:
            self._again(unreached=False)

    def on_upstream_lost(self) -> None:
        """The connection to the replica has broken."""
        up = self._up
        if self._ended or up is None:
            return
        first_end = self._meter.first_end
        if self._started or (first_end is not None and up.sent >= first_end):
            if self._reservation is not None:
                self._reservation.release_lost()
            message = "the replica was lost after the request was sent; the request may have run"
            error = TidegateError(ErrorKind.REPLICA_LOST, message)
            if self._started or self._is_stream:
                self.fail(error)
            else:
                self._repeat_unless_died(error)
        else:
            # A model runs when it has its whole input.
            self._again(unreached=True)

    def _again(self, *, unreached: bool) -> None:
        """To another replica, if what was sent to this one is still there."""
        if self._resent == RESEND_LIMIT or not self._take_back():
            message = "the replica was lost before it had the whole request; it did not run"
            self.fail(TidegateError(ErrorKind.REPLICA_UNREACHABLE, message))
            return
        self._resent += 1
        self._elsewhere(unreached=unreached)

    def _take_back(self) -> bool:
        replay = self._replay
        if replay is None or self._started:
            return False
        self._let_go()
        self._cut = self._headed = False
        self._pending, self._replay, self._replay_bytes = b"".join(replay), [], 0
        self._on_first_byte()
        return True

    def _let_go(self) -> None:
        """Of the stream to the replica."""
        self._caller.source = None
        up, self._up = self._up, None
        if up is not None:
            up.source = None
            if not (up.in_done and up.out_done):
                up.reset(Code.CANCEL)

    # -- the end ------------------------------------------------------------------------------------------

    def _end(self, status: int, own_error: ErrorKind | None) -> None:
        """Give everything back."""
        self._give_back(well=status == 0)
        self._replay = None
        self._let_go()
        if self._pending:
            self._caller.pass_on(len(self._pending))
            self._pending = b""
        pool = None if self._target is None else self._target.pool.name
        self._service.count(pool, status, own_error, held_seconds=self._held_seconds, since=self._began)
