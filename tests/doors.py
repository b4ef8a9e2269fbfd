"""The HTTP door in the test's process, with pools that the test feeds by hand: no store, no Ray."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.ingress.http_door import HttpDoor
from gateway.routing.pool import Pool
from gateway.settings import GatewaySettings
from wire.errors import ErrorKind, TidegateError
from wire.membership import ReplicaLease
from wire.pools import ModelSettings, PoolSettings, RoutingSettings

OwnAnswer = tuple[int, list[tuple[bytes, bytes]], bytes]


class HandRouter:
    """Pools without a store. ``wanted`` lists the pools that asked to be woken."""

    def __init__(self, pools: Mapping[str, PoolSettings]) -> None:
        self.wanted: list[str] = []
        clock = asyncio.get_running_loop().time
        self.pools = {
            name: Pool(name, settings, clock=clock, on_wanted=self.wanted.append) for name, settings in pools.items()
        }

    def pool_of(self, model: str) -> Pool:
        for pool in self.pools.values():
            if model in pool.settings.model_names:
                return pool
        raise TidegateError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{model}' is not found")


@dataclass
class Memory:
    """What is answered at zero, by path."""

    answers: dict[str, OwnAnswer] = field(default_factory=dict)

    def http(self, method: str, path: str) -> OwnAnswer | None:
        return self.answers.get(path)


class Counted:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def request_ended(self, **told: Any) -> None:
        self.requests.append(told)


def pool_settings(models: Iterable[str] = ("ident", "slow"), **routing: Any) -> PoolSettings:
    return PoolSettings(models=tuple(ModelSettings(name=name) for name in models), routing=RoutingSettings(**routing))


@dataclass
class RunningDoor:
    """A door that listens on ``port``, and everything around it."""

    door: HttpDoor
    router: HandRouter
    memory: Memory
    counted: Counted
    port: int

    @property
    def pool(self) -> Pool:
        return next(iter(self.router.pools.values()))

    async def settled(self, seconds: float = 2.0) -> None:
        """Wait until nothing is held and nothing in flight. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while self.pool.held or self.pool.in_flight:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running_door(
    *leases: ReplicaLease,
    pools: Mapping[str, PoolSettings] | None = None,
    settings: Mapping[str, Any] | None = None,
    **routing: Any,
) -> AsyncIterator[RunningDoor]:
    """A door in front of ``leases``; ``routing`` are routing settings of its one pool ``vision``."""
    router = HandRouter(pools or {"vision": pool_settings(**routing)})
    for name, pool in router.pools.items():
        pool.update([lease for lease in leases if lease.pool == name])
    memory, counted = Memory(), Counted()
    door = HttpDoor(router, GatewaySettings(**(settings or {})), memory, counted)
    port = await door.start("127.0.0.1", 0, reuse_port=False)
    try:
        yield RunningDoor(door, router, memory, counted, port)
    finally:
        await door.drain(0.0)


# -- a caller that sees every byte ------------------------------------------------------------------------


@dataclass
class Answer:
    """One answer as it came over the socket. ``raw`` is all of it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    raw: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


class BrokenTransferError(Exception):
    """The connection ended before the answer was complete."""


class Caller:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> "Caller":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> "Caller":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def ask(self, raw: bytes) -> Answer:
        self.send(raw)
        return await self.answer()

    async def answer(self, *, head_only: bool = False) -> Answer:
        """Raises BrokenTransferError."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = head[:-4].decode("latin-1").split("\r\n")
            headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines[1:])]
            answer = Answer(int(lines[0].split(" ")[1]), headers, b"", head)
            if answer.status == 100 or head_only:
                return answer
            if answer.header("transfer-encoding") == "chunked":
                await self._read_chunks(answer)
            elif answer.header("content-length") is None:
                answer.body = await self.reader.read()
                answer.raw += answer.body
            else:
                answer.body = await self.reader.readexactly(int(answer.header("content-length") or 0))
                answer.raw += answer.body
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise BrokenTransferError(repr(error)) from None
        return answer

    async def _read_chunks(self, answer: Answer) -> None:
        while True:
            line = await self.reader.readuntil(b"\r\n")
            data = await self.reader.readexactly(int(line, 16) + 2)
            answer.raw += line + data
            answer.body += data[:-2]
            if line == b"0\r\n":
                return

    async def at_end(self, seconds: float = 2.0) -> bool:
        """True when the server closes the connection, and sends nothing before that."""
        try:
            async with asyncio.timeout(seconds):
                return await self.reader.read(1) == b""
        except ConnectionError:
            return True


async def ask(port: int, raw: bytes) -> Answer:
    """One request on a connection of its own."""
    async with await Caller.open(port) as caller:
        return await caller.ask(raw)


def post(path: str, body: bytes = b"{}", *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"POST {path} HTTP/1.1\r\nHost: test\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"{method} {path} HTTP/1.1\r\nHost: test\r\n{lines}\r\n".encode()
