"""What a connection of HTTP/2 writes: gathered for a turn of the loop, held back by the peer's windows; and its end."""

import asyncio
import logging
import socket
from typing import cast

from gateway.ingress import h2_frames as h2
from gateway.ingress.h2_frames import Code
from gateway.ingress.h2_headers import EMPTY_TABLE
from gateway.ingress.h2_leg import Leg
from gateway.ingress.h2_window import ReceiveWindow

log = logging.getLogger(__name__)

#: While the socket takes no more than this, what is to be sent waits in its streams. Bytes.
_WRITE_HIGH = 262144
#: What was written last gets this long to leave. Seconds.
_CLOSE_SECONDS = 2.0
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class Http2Output(asyncio.Protocol):
    """See the module. What comes in is for :class:`Http2Connection`, which this is one half of."""

    transport: asyncio.Transport
    #: Room in a whole connection's window; None: as much as its streams may keep.
    CONNECTION_WINDOW: int | None = None
    SETTINGS: dict[int, int] = {}  # noqa: RUF012 - set once per kind
    credit: int

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._flushing = False
        self._blocked: dict[Leg, None] = {}
        self._peer_window = h2.DEFAULT_WINDOW
        self._window_in = ReceiveWindow(self.CONNECTION_WINDOW or h2.LARGEST_WINDOW, self.CONNECTION_WINDOW or 0)
        self._table_told = False
        self.active_at = self._loop.time()
        self.legs: dict[int, Leg] = {}
        self.send_window = h2.DEFAULT_WINDOW
        self.frame_size = h2.DEFAULT_FRAME_SIZE
        self.writable = True
        self.closed = False
        self._lost = False

    # -- for the two kinds --------------------------------------------------------------------------------

    def on_leg_over(self) -> None:
        """A stream is gone."""

    def on_lost(self) -> None:
        """Nothing more goes in or out here; called once."""

    def on_closed(self) -> None:
        """The socket is closed."""

    @property
    def last_peer_stream(self) -> int:
        return 0

    # -- what the event loop calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(_WRITE_HIGH)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def introduce(self, preface: bytes = b"") -> None:
        """Our first bytes."""
        self.put(preface + h2.settings_frame(self.SETTINGS))
        self.put(h2.window_update(0, (self.CONNECTION_WINDOW or h2.LARGEST_WINDOW) - h2.DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.writable = False
        self._out.clear()
        self._lose()
        self.on_closed()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._unblock()

    # -- writing ------------------------------------------------------------------------------------------

    def put(self, data: bytes) -> None:
        """Write in the loop's next turn, together with what else there is by then."""
        self._out.append(data)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def put_headers(self, stream_id: int, block: bytes, *, end_stream: bool) -> None:
        if not self._table_told:
            self._table_told = True
            block = EMPTY_TABLE + block
        if len(block) <= h2.DEFAULT_FRAME_SIZE:
            flags = h2.END_HEADERS | h2.END_STREAM if end_stream else h2.END_HEADERS
            self.put(h2.frame(h2.HEADERS, flags, stream_id, block))
        else:
            self.put(h2.header_frames(stream_id, block, end_stream=end_stream, frame_size=self.frame_size))

    def flush(self) -> None:
        self._flushing = False
        out, self._out = self._out, []
        if out and not self.closed and not self.transport.is_closing():
            self.transport.write(out[0] if len(out) == 1 else b"".join(out))

    def block(self, leg: Leg) -> None:
        self._blocked[leg] = None

    def _unblock(self) -> None:
        # One that uses up the connection's window goes to the end of the queue, so that all get their turn.
        while self._blocked and self.writable and self.send_window > 0:
            leg = next(iter(self._blocked))
            del self._blocked[leg]
            leg.pump()

    def new_leg(self, stream_id: int) -> Leg:
        leg = Leg(self, stream_id, self._peer_window)
        self.legs[stream_id] = leg
        return leg

    def forget(self, leg: Leg) -> None:
        if self.legs.pop(leg.stream_id, None) is None:
            return
        self._blocked.pop(leg, None)
        leg.source = None  # no circles: the collector would look for them all the time
        if leg.kept:
            self.taken(leg.kept)
            leg.kept = 0
        self.active_at = self._loop.time()
        self.on_leg_over()

    def taken(self, count: int) -> None:
        if self.CONNECTION_WINDOW is not None:
            self._open_window(count)

    def _open_window(self, count: int) -> None:
        more = self._window_in.take(count)
        if more:
            self.put(h2.window_update(0, more))

    # -- the end ------------------------------------------------------------------------------------------

    def fail(self, code: Code, message: str) -> None:
        """End the connection with GOAWAY. Its streams end with it."""
        if self.closed:
            return
        self.put(h2.goaway(self.last_peer_stream, code, message.encode()))
        self.close()

    def close(self) -> None:
        """Close after what was written."""
        if self.closed:
            return
        self.flush()
        self.closed = True
        if not self.writable:
            self.transport.abort()  # a peer that takes nothing will not take this either
        else:
            self.transport.close()
            self._loop.call_later(_CLOSE_SECONDS, self.transport.abort)
        self._lose()

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            try:
                self.on_lost()
            except Exception:
                log.exception("event=http2-failed")
