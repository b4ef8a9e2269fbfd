"""What a connection of HTTP/2 reads, either side of it: frames, settings, windows, pings, and what a peer may not do.

Which streams there are and what becomes of their data is for the two kinds of connection built on it; what it writes is
in h2_output.
"""

import logging
from typing import Any

from gateway.ingress import h2_frames as h2
from gateway.ingress.h2_frames import Code, ConnectionFault
from gateway.ingress.h2_headers import HeaderBlocks
from gateway.ingress.h2_leg import Leg
from gateway.ingress.h2_output import Http2Output
from gateway.ingress.h2_window import widened

log = logging.getLogger(__name__)

#: A header block may come in so many frames.
_BLOCK_FRAMES = 128
#: Frames that carry nothing on (pings, settings, empty data, ...) are answered up to this many more than there were
#: frames that do, and this many a second.
_CHORES = 4000
_CHORES_PER_SECOND = 1000
#: Moving the windows of so many streams weighs as much as one more of those.
_LEGS_PER_CHORE = 8


class Http2Connection(Http2Output):
    """See the module. Nothing that a peer sends makes one of its methods raise."""

    def __init__(self, blocks: HeaderBlocks[Any], header_limit_bytes: int) -> None:
        super().__init__()
        self._blocks = blocks
        self._block_limit = 2 * header_limit_bytes
        self._reader = h2.FrameReader()
        self._decoder: Any = blocks.new_decoder()  # until the peer has taken our settings
        self._block: list[bytes] | None = None
        self._block_of = (0, 0)
        self.credit = _CHORES
        self._chores_at = self._loop.time()
        self.peer_streams = h2.LARGEST_STREAM_ID
        self.greeted = False

    # -- for the two kinds --------------------------------------------------------------------------------

    def on_headers(self, stream_id: int, block: bytes, *, end: bool) -> None:
        raise NotImplementedError

    def on_data(self, leg: Leg, data: bytes, *, end: bool) -> None:
        raise NotImplementedError

    def on_reset(self, leg: Leg, code: int) -> None:
        raise NotImplementedError

    def on_unknown_stream(self, stream_id: int, kind: int) -> None:
        """A frame for a stream that is over, or (a fault) was never there."""
        raise NotImplementedError

    def on_goaway(self, last_stream_id: int, code: int) -> None:
        raise NotImplementedError

    def on_settings(self) -> None:
        """The peer's settings have come."""

    def on_pong(self, payload: bytes) -> None:
        """A ping of ours was answered."""

    # -- what the event loop calls ------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        try:
            self._take(data)
        except ConnectionFault as fault:
            self.fail(fault.code, str(fault))
        except Exception:
            log.exception("event=http2-failed")
            self.fail(Code.INTERNAL_ERROR, "")

    # -- reading ------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        reader = self._reader
        for kind, flags, stream_id, payload in reader.feed(data):
            if self.closed:
                return
            if self._block is not None and (kind != h2.CONTINUATION or stream_id != self._block_of[0]):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block was interrupted")
            if kind == h2.DATA:
                self._take_data(stream_id, flags, payload)
            elif kind == h2.HEADERS:
                content = h2.unpadded(payload, flags) if flags & (h2.PADDED | h2.HAS_PRIORITY) else payload
                if stream_id == 0:
                    raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS belong to a stream")
                if flags & h2.END_HEADERS:
                    self._read_block(stream_id, content, end=bool(flags & h2.END_STREAM))
                else:
                    self._block, self._block_of = [content], (stream_id, flags)
            else:
                self._take_other(kind, flags, stream_id, payload)
        if reader.oversize and not self.closed:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame is longer than was announced")

    def _take_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._window_in.receive(size)
        data = h2.unpadded(payload, flags & h2.PADDED) if flags & h2.PADDED else payload
        end = bool(flags & h2.END_STREAM)
        if data:
            self.earn()
        elif not end:
            self._chore()
        if self.CONNECTION_WINDOW is None:
            self._open_window(size)
        leg = self.legs.get(stream_id)
        if leg is None or leg.in_done:
            if leg is not None:
                raise ConnectionFault(Code.STREAM_CLOSED, "data behind the end of a stream")
            if self.CONNECTION_WINDOW is not None:
                self._open_window(size)
            self.on_unknown_stream(stream_id, h2.DATA)
            return
        leg.window_in.receive(size)
        leg.kept += size
        if size != len(data):
            leg.pass_on(size - len(data))
        if end:
            leg.in_done = True
        self.on_data(leg, data, end=end)
        if end and leg.out_done:
            self.forget(leg)

    def _take_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == h2.CONTINUATION:
            self._continue_block(flags, payload)
        elif kind == h2.WINDOW_UPDATE:
            self._chore()
            if len(payload) != 4:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE is four bytes")
            self._take_window_update(stream_id, h2.word(payload))
        elif kind == h2.RST_STREAM:
            self._take_reset(stream_id, payload)
        elif stream_id == 0 and kind in (h2.SETTINGS, h2.PING, h2.GOAWAY):
            self._take_of_connection(kind, flags, payload)
        elif kind in (h2.SETTINGS, h2.PING, h2.GOAWAY, h2.PUSH_PROMISE):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame that does not belong here")
        else:
            self._chore()  # PRIORITY, and types that are not known, are ignored
            if kind == h2.PRIORITY and (stream_id == 0 or len(payload) != 5):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a malformed PRIORITY")

    def _take_of_connection(self, kind: int, flags: int, payload: bytes) -> None:
        self._chore()
        if kind == h2.PING:
            if len(payload) != 8:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a PING is eight bytes")
            if flags & h2.ACK:
                self.on_pong(payload)
            else:
                self.put(h2.frame(h2.PING, h2.ACK, 0, payload))
        elif kind == h2.GOAWAY:
            self.on_goaway(h2.word(payload) & h2.LARGEST_STREAM_ID, h2.word(payload, 4))
        elif flags & h2.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "an acknowledgement of settings is empty")
            self._decoder = None  # from here on, blocks do not depend on each other
        else:
            self._take_settings(h2.read_settings(payload))

    def _take_settings(self, settings: list[tuple[int, int]]) -> None:
        # The acknowledgement goes first: what the peer's new settings allow may only come behind it.
        self.put(h2.frame(h2.SETTINGS, h2.ACK, 0))
        values = dict(settings)  # of those that come twice, the last one counts
        self.frame_size = min(values.get(h2.MAX_FRAME_SIZE, self.frame_size), 65536)
        self.peer_streams = values.get(h2.MAX_CONCURRENT_STREAMS, self.peer_streams)
        window = values.get(h2.INITIAL_WINDOW_SIZE, self._peer_window)
        if window != self._peer_window:
            self._move_windows(window)
        self.greeted = True
        self.on_settings()

    def _move_windows(self, window: int) -> None:
        """The peer grants its streams another window from the start."""
        change, self._peer_window = window - self._peer_window, window
        for number, leg in enumerate(list(self.legs.values())):
            if number % _LEGS_PER_CHORE == _LEGS_PER_CHORE - 1:
                self._chore()
            leg.window = widened(leg.window, change)
            if change > 0:
                leg.pump()

    def _take_window_update(self, stream_id: int, increment: int) -> None:
        increment &= h2.LARGEST_WINDOW
        if increment == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a window opened by nothing")
        if stream_id == 0:
            self.send_window = widened(self.send_window, increment)
            self._unblock()
            return
        leg = self.legs.get(stream_id)
        if leg is None:
            self.on_unknown_stream(stream_id, h2.WINDOW_UPDATE)
            return
        if leg.window + increment > h2.LARGEST_WINDOW:
            self.on_reset(leg, Code.FLOW_CONTROL_ERROR)
            leg.reset(Code.FLOW_CONTROL_ERROR)
            return
        leg.window += increment
        leg.pump()

    def _take_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "RST_STREAM is four bytes")
        leg = self.legs.get(stream_id)
        if leg is None:
            self._chore()
            self.on_unknown_stream(stream_id, h2.RST_STREAM)
            return
        leg.in_done = leg.out_done = True
        self.on_reset(leg, h2.word(payload))
        leg.close()

    # -- header blocks ------------------------------------------------------------------------------------

    def _continue_block(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "nothing to continue")
        self._block.append(payload)
        if len(self._block) > _BLOCK_FRAMES or sum(map(len, self._block)) > self._block_limit:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block that is too long")
        if flags & h2.END_HEADERS:
            stream_id, first_flags = self._block_of
            block, self._block = b"".join(self._block), None
            self._read_block(stream_id, block, end=bool(first_flags & h2.END_STREAM))

    def _read_block(self, stream_id: int, block: bytes, *, end: bool) -> None:
        if len(block) > self._block_limit:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block that is too long")
        self.on_headers(stream_id, block, end=end)

    @property
    def mid_block(self) -> bool:
        """A header block has begun and not ended."""
        return self._block is not None

    # -- too much of it -----------------------------------------------------------------------------------

    def earn(self) -> None:
        """A frame has carried something on."""
        self.credit += 4

    def _chore(self) -> None:
        """Count a frame that carries nothing on. Raises ConnectionFault when there are too many of them."""
        credit = min(self.credit, _CHORES)
        if credit <= 0:
            now = self._loop.time()
            credit = min(int((now - self._chores_at) * _CHORES_PER_SECOND), _CHORES)
            self._chores_at = now
            if credit <= 0:
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that carry nothing on")
        self.credit = credit - 1
