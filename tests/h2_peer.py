"""HTTP/2 peers that do exactly what a test says, on top of the library ``h2``: a caller, and a replica."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import hpack

from gateway.ingress import h2_frames as frames
from wire.membership import ReplicaLease, ReplicaState

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def call_headers(path: str = INFER, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "test"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]


@dataclass
class Seen:
    """One stream as this peer has seen it."""

    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    unacknowledged: int = 0
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> str | None:
        return self.trailers.get("grpc-status", self.headers.get("grpc-status"))

    @property
    def over(self) -> bool:
        return self.ended or self.reset is not None


class Peer:
    """One end of one connection. ``reads`` False: data is not acknowledged, so that windows close."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, client: bool) -> None:
        config = h2.config.H2Configuration(client_side=client, header_encoding="utf-8", validate_inbound_headers=False)
        self.h2 = h2.connection.H2Connection(config)
        self.reader, self.writer = reader, writer
        self.streams: dict[int, Seen] = {}
        self.reads = True
        self.goaways: list[tuple[int, int]] = []
        self.pongs = 0
        self.closed = False
        self.on_event: Callable[[Any], None] = lambda event: None
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

    def begin(self, settings: dict[int, int] | None = None) -> None:
        if settings:
            self.h2.local_settings = h2.settings.Settings(client=self.h2.config.client_side, initial_values=settings)
        self.h2.initiate_connection()
        self.flush()
        self._task = asyncio.create_task(self._read())

    def flush(self) -> None:
        data = self.h2.data_to_send()
        if data and not self.closed:
            self.writer.write(data)

    def raw(self, data: bytes) -> None:
        self.writer.write(data)

    def call(self, data: bytes = b"", *more: tuple[str, str], path: str = INFER, end: bool = True) -> int:
        """Open a stream; returns its id. ``data`` must fit in the windows."""
        stream_id = self.h2.get_next_available_stream_id()
        self.streams[stream_id] = Seen()
        self.h2.send_headers(stream_id, call_headers(path, *more))
        if data or end:
            self.h2.send_data(stream_id, data, end_stream=end)
        self.flush()
        return stream_id

    async def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """As much as the windows allow, until all is sent."""
        while data:
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size, len(data))
            if room > 0:
                self.h2.send_data(stream_id, data[:room], end_stream=end and room == len(data))
                data = data[room:]
                self.flush()
                await self.writer.drain()
            else:
                await self._wait()

    async def until(self, condition: Callable[[], Any], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await self._wait()

    async def over(self, stream_id: int, seconds: float = 5.0) -> Seen:
        seen = self.streams[stream_id]
        await self.until(lambda: seen.over or self.closed, seconds)
        return seen

    async def read_all(self) -> None:
        """Take what came so far, and from now on everything."""
        self.reads = True
        for stream_id, seen in self.streams.items():
            if seen.unacknowledged:
                with suppress(h2.exceptions.ProtocolError):
                    self.h2.acknowledge_received_data(seen.unacknowledged, stream_id)
                seen.unacknowledged = 0
        self.flush()

    async def close(self) -> None:
        self.writer.transport.abort()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _wait(self) -> None:
        self._woken.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await self._woken.wait()

    async def _read(self) -> None:
        with suppress(ConnectionError, h2.exceptions.ProtocolError):
            while data := await self.reader.read(65536):
                for event in self.h2.receive_data(data):
                    self._note(event)
                    with suppress(h2.exceptions.ProtocolError):  # the other side was quicker to end the stream
                        self.on_event(event)
                self.flush()
                self._woken.set()
        self.closed = True
        self.writer.close()
        self._woken.set()

    def _note(self, event: Any) -> None:
        seen = self.streams.setdefault(getattr(event, "stream_id", None) or 0, Seen())
        if isinstance(event, h2.events.RequestReceived | h2.events.ResponseReceived):
            seen.headers = dict(event.headers)
        elif isinstance(event, h2.events.TrailersReceived):
            seen.trailers = dict(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            seen.data += event.data
            seen.unacknowledged += event.flow_controlled_length
            if self.reads:
                with suppress(h2.exceptions.ProtocolError):
                    self.h2.acknowledge_received_data(seen.unacknowledged, event.stream_id)
                seen.unacknowledged = 0
        elif isinstance(event, h2.events.StreamEnded):
            seen.ended = True
        elif isinstance(event, h2.events.StreamReset):
            seen.reset = int(event.error_code)
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.goaways.append((int(event.error_code), event.last_stream_id or 0))
        elif isinstance(event, h2.events.PingAckReceived):
            self.pongs += 1


@asynccontextmanager
async def caller(port: int, settings: dict[int, int] | None = None) -> AsyncIterator[Peer]:
    peer = Peer(*await asyncio.open_connection("127.0.0.1", port), client=True)
    peer.begin(settings)
    try:
        yield peer
    finally:
        await peer.close()


class RawCaller:
    """A caller that sends what it is told, frame by frame, and keeps every frame that comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._cutter = frames.FrameReader()
        self._decoder = hpack.Decoder()
        self.got: list[frames.Frame] = []
        self.closed = False
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, port: int) -> "RawCaller":
        raw = cls(*await asyncio.open_connection("127.0.0.1", port))
        raw.send(frames.PREFACE + frames.settings_frame({}) + frames.frame(frames.SETTINGS, frames.ACK, 0))
        return raw

    async def __aenter__(self) -> "RawCaller":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def of(self, kind: int, stream_id: int = 0) -> list[bytes]:
        """Payloads of the frames of a type on a stream."""
        return [payload for k, _, i, payload in self.got if (k, i) == (kind, stream_id)]

    def headers(self, stream_id: int) -> dict[str, str]:
        """All fields of the header blocks on a stream."""
        return {k: v for block in self.of(frames.HEADERS, stream_id) for k, v in self._decoder.decode(block)}

    async def _read(self) -> None:
        with suppress(ConnectionError):
            while data := await self._reader.read(65536):
                for got in self._cutter.feed(data):
                    self.got.append(got)
                    if got[0] == frames.PING and not got[1] & frames.ACK:
                        self.send(frames.frame(frames.PING, frames.ACK, 0, got[3]))
        self.closed = True


class Replica:
    """A scripted replica. By default it echoes each request when it is complete; ``script`` takes that over."""

    def __init__(self, settings: dict[int, int] | None = None) -> None:
        self.connections: list[Peer] = []
        self.script: Callable[[Peer, Any], None] = self.echo
        self._settings = settings
        self._server: asyncio.Server | None = None
        self.port = 0

    def echo(self, peer: Peer, event: Any) -> None:
        if isinstance(event, h2.events.StreamEnded):
            self.answer(peer, event.stream_id, bytes(peer.streams[event.stream_id].data))

    def answer(self, peer: Peer, stream_id: int, data: bytes, status: str = "0") -> None:
        peer.h2.send_headers(stream_id, [(":status", "200"), ("content-type", "application/grpc")])
        if data:
            peer.h2.send_data(stream_id, data)
        peer.h2.send_headers(stream_id, [("grpc-status", status)], end_stream=True)
        peer.flush()

    async def start(self) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = Peer(reader, writer, client=False)
            peer.on_event = lambda event: self.script(peer, event)
            self.connections.append(peer)
            peer.begin(self._settings)

        self._server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        assert self._server is not None
        self._server.close()

    async def stop(self) -> None:
        self.refuse()
        for peer in self.connections:
            await peer.close()

    @property
    def open(self) -> int:
        return sum(not peer.closed for peer in self.connections)

    @property
    def calls(self) -> list[Seen]:
        """Every stream that was opened here."""
        return [seen for peer in self.connections for key, seen in peer.streams.items() if key]

    def lease(self, replica_id: str = "r1") -> ReplicaLease:
        return ReplicaLease(
            id=replica_id,
            pool="vision",
            state=ReplicaState.READY,
            grpc_address=f"127.0.0.1:{self.port}",
            models=("ident", "slow"),
        )


@asynccontextmanager
async def replica(settings: dict[int, int] | None = None) -> AsyncIterator[Replica]:
    running = Replica(settings)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()
