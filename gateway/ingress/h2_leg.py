"""One stream on one connection: what goes out on it, as far as the peer's windows allow, and what came in on it."""

from collections import deque
from typing import Any, Protocol

from gateway.ingress.h2_frames import DATA, END_STREAM, Code, frame_head, rst_stream, window_update
from gateway.ingress.h2_window import ReceiveWindow

#: Waiting pieces up to this length are joined, so that many tiny ones weigh no more than their bytes.
_JOINED_LENGTH = 4096


class Carrier(Protocol):
    """The connection, as its streams see it."""

    send_window: int
    frame_size: int
    writable: bool
    credit: int
    """Frames that carry nothing on, such as the acknowledgement of what is sent, that the peer may still send."""

    def put(self, data: bytes) -> None:
        """Write soon."""

    def put_headers(self, stream_id: int, block: bytes, *, end_stream: bool) -> None: ...

    def block(self, leg: "Leg") -> None:
        """Resume ``leg`` when the connection takes more."""

    def forget(self, leg: "Leg") -> None:
        """The stream is over."""

    def taken(self, count: int) -> None:
        """So many received bytes are no longer kept."""


class Leg:
    """See the module. ``source`` is the leg whose data goes out here: its window follows what could be sent."""

    __slots__ = (
        "_ends",
        "_queue",
        "_trailers",
        "carrier",
        "in_done",
        "kept",
        "out_done",
        "owner",
        "sent",
        "source",
        "stream_id",
        "window",
        "window_in",
    )

    def __init__(self, carrier: Carrier, stream_id: int, window: int) -> None:
        self.carrier = carrier
        self.stream_id = stream_id
        self.owner: Any = None
        self.source: Leg | None = None
        self.window = window
        self.window_in = ReceiveWindow()
        self.kept = 0
        """Bytes that came and have not been passed on or dropped."""
        self.sent = 0
        self.in_done = False
        """The peer has ended its side."""
        self.out_done = False
        """Our side has been ended."""
        self._queue: deque[bytes] = deque()
        self._ends = False
        self._trailers: bytes | None = None

    # -- out ----------------------------------------------------------------------------------------------

    def send(self, data: bytes, *, end: bool = False) -> None:
        """Data, and with ``end`` the end of our side. What the windows do not allow yet waits here."""
        if self.out_done:
            return
        carrier, size = self.carrier, len(data)
        if (
            self._queue
            or not carrier.writable
            or size > self.window
            or size > carrier.send_window
            or size > carrier.frame_size
        ):
            self._enqueue(data)
            self._ends = end
            self.pump()
            return
        self._put(data, end=end)
        if end:
            self._end_out()

    def _enqueue(self, data: bytes) -> None:
        queue = self._queue
        if queue and len(queue[-1]) + len(data) <= _JOINED_LENGTH:
            queue[-1] = bytes(queue[-1]) + data
        else:
            queue.append(data)

    def end(self, trailers: bytes | None) -> None:
        """The end of our side, behind what waits: with ``trailers`` or without."""
        if self.out_done:
            return
        self._ends, self._trailers = True, trailers
        if not self._queue:
            self._put_end()

    def pump(self) -> None:
        """Send what waits, as far as it goes now."""
        queue, carrier = self._queue, self.carrier
        while queue:
            data = queue[0]
            room = min(self.window, carrier.send_window, carrier.frame_size)
            if not carrier.writable or (room <= 0 and data):
                if self.window > 0 or not data:
                    carrier.block(self)
                return
            if len(data) > max(room, 0):  # a window can be below zero, and nothing fits in it all the same
                # A view, so that cutting a long piece into frames does not copy what is left again and again.
                queue[0] = memoryview(data)[room:]  # type: ignore[assignment]
                self._put(data[:room], end=False)
                continue
            queue.popleft()
            last = self._ends and not queue and self._trailers is None
            self._put(data, end=last)
            if last:
                self._end_out()
                return
        if self._ends and not self.out_done:
            self._put_end()

    @property
    def waiting_bytes(self) -> int:
        """What waits here for a window."""
        return sum(map(len, self._queue))

    def drop_queue(self) -> None:
        self._queue.clear()
        self._ends, self._trailers = False, None

    def _put(self, data: bytes, *, end: bool) -> None:
        size = len(data)
        self.window -= size
        self.sent += size
        carrier = self.carrier
        carrier.send_window -= size
        carrier.put(frame_head(DATA, END_STREAM if end else 0, self.stream_id, size))
        if size:
            carrier.put(data)
            carrier.credit += 4
            if self.source is not None:
                self.source.pass_on(size)

    def _put_end(self) -> None:
        if self._trailers is None:
            self.carrier.put(frame_head(DATA, END_STREAM, self.stream_id, 0))
        else:
            self.carrier.put_headers(self.stream_id, self._trailers, end_stream=True)
        self._end_out()

    def _end_out(self) -> None:
        self.out_done = True
        if self.in_done:
            self.carrier.forget(self)
        elif self.owner is not None and self.owner.answer_is_all(self):
            self.reset(Code.NO_ERROR)

    # -- in -----------------------------------------------------------------------------------------------

    def pass_on(self, count: int) -> None:
        """``count`` bytes of what came here are no longer kept: the peer may send as many again."""
        if count > self.kept:
            count = self.kept
        if not count:
            return
        self.kept -= count
        self.carrier.taken(count)
        if not self.in_done:
            more = self.window_in.take(count)
            if more:
                self.carrier.put(window_update(self.stream_id, more))

    def end_in(self) -> None:
        """The peer has ended its side."""
        self.in_done = True
        if self.out_done:
            self.carrier.forget(self)

    def reset(self, code: int) -> None:
        """End both sides at once."""
        self.carrier.put(rst_stream(self.stream_id, code))
        self.close()

    def close(self) -> None:
        """Both sides are over."""
        self.in_done = self.out_done = True
        self.drop_queue()
        self.carrier.forget(self)
