"""A scripted upstream: a small HTTP server in the test's process that says what it saw and answers as it is told."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from wire.membership import ReplicaLease, ReplicaState


@dataclass
class Seen:
    """One request as it came."""

    connection: int
    raw_head: bytes
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    body_bytes: int = 0
    left_early: bool = False
    """True when the caller closed the connection before it had the answer."""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass
class Reply:
    """What to answer. ``cut_after``: close the connection after this many bytes of the body."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=lambda: [("Content-Type", "application/json")])
    body: bytes = b"{}"
    chunk_bytes: int | None = None
    """Send the body in chunks of this size, with Transfer-Encoding: chunked."""
    repeat: int = 1
    """Send the body this many times over, to be large without being held."""
    delay_seconds: float = 0.0
    cut_after: int | None = None
    before_head: bytes = b""
    """Sent before the status line, e.g. an interim answer."""
    after_body: bytes = b""
    """Sent behind the answer: bytes that nobody asked for."""
    close: bool = False
    """Close the connection after the answer, without having said so."""


def echo(seen: Seen) -> Reply:
    """The body back, with the headers that describe it."""
    described = ("content-type", "content-encoding", "inference-header-content-length")
    headers = [(name, value) for name, value in seen.headers if name.lower() in described]
    return Reply(headers=headers, body=seen.body)


class Upstream:
    """See the module. ``answer`` decides; change it at any time."""

    def __init__(self, answer: Callable[[Seen], Reply] = echo) -> None:
        self.answer = answer
        self.keep_bodies = True
        self.read_limit: int | None = None
        """Hang up after this many bytes of a request's body."""
        self.seen: list[Seen] = []
        self.running = 0
        self.most_running = 0
        self.connections = 0
        self.connections_opened = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> "Upstream":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """As if the process had been killed: every connection is reset, the port refuses."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> "Upstream":
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def lease(
        self, name: str = "r1", *, pool: str = "vision", models: tuple[str, ...] = ("ident", "slow")
    ) -> ReplicaLease:
        """A ready replica whose Triton this is."""
        return ReplicaLease(id=name, pool=pool, state=ReplicaState.READY, http_address=self.address, models=models)

    def drop_connections(self) -> None:
        """Close every connection, as an idle timeout would; the port stays open."""
        for writer in list(self._writers):
            writer.close()

    # -- serving ------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections_opened += 1
        task = asyncio.get_running_loop().create_task(self._serve(self.connections_opened, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        try:
            while await self._serve_one(number, reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.connections -= 1
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        raw_head = await reader.readuntil(b"\r\n\r\n")
        lines = raw_head[:-4].decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ")
        pairs = [line.partition(": ") for line in lines[1:]]
        seen = Seen(number, raw_head, method, path, [(name, value) for name, _, value in pairs])
        self.seen.append(seen)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._read_body(seen, reader)
            reply = self.answer(seen)
            if reply.delay_seconds and await self._caller_leaves(reader, reply.delay_seconds):
                seen.left_early = True
                return False
        except (ConnectionError, asyncio.IncompleteReadError):
            seen.left_early = True
            raise
        finally:
            self.running -= 1
        return await self._send(reply, writer)

    async def _caller_leaves(self, reader: asyncio.StreamReader, seconds: float) -> bool:
        try:
            got = await asyncio.wait_for(reader.read(1), seconds)
        except TimeoutError:
            return False
        assert not got, "the gateway sent something before it had its answer"
        return True

    async def _read_body(self, seen: Seen, reader: asyncio.StreamReader) -> None:
        if (seen.header("transfer-encoding") or "") == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                await self._read_piece(seen, reader, size)
                await reader.readexactly(2)
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
        else:
            await self._read_piece(seen, reader, int(seen.header("content-length") or 0))

    async def _read_piece(self, seen: Seen, reader: asyncio.StreamReader, size: int) -> None:
        pieces = []
        while size:
            piece = await reader.read(min(size, 65536))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size)
            size -= len(piece)
            seen.body_bytes += len(piece)
            if self.keep_bodies:
                pieces.append(piece)
            if self.read_limit is not None and seen.body_bytes >= self.read_limit:
                self.read_limit = None
                raise ConnectionResetError
        seen.body += b"".join(pieces)

    async def _send(self, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        if writer.transport.is_closing():
            return False
        headers = list(reply.headers)
        if reply.chunk_bytes is None:
            headers.append(("Content-Length", str(len(reply.body) * reply.repeat)))
        else:
            headers.append(("Transfer-Encoding", "chunked"))
        head = "".join(f"{name}: {value}\r\n" for name, value in headers)
        writer.write(reply.before_head + f"HTTP/1.1 {reply.status} Said\r\n{head}\r\n".encode("latin-1"))
        body = reply.body if reply.cut_after is None else reply.body[: reply.cut_after]
        for _ in range(reply.repeat):
            if reply.chunk_bytes is None:
                writer.write(body)
                await writer.drain()
                continue
            for at in range(0, len(body), reply.chunk_bytes):
                piece = body[at : at + reply.chunk_bytes]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
        if reply.cut_after is not None:
            return False
        if reply.chunk_bytes is not None:
            writer.write(b"0\r\n\r\n")
        writer.write(reply.after_body)
        await writer.drain()
        return not reply.close
