"""Connections to the replicas' HTTP front ends: opened when needed, kept for the next request, one request at a time.

Triton can be trusted with keep-alive, not with pipelining, and it exits late while an idle connection is open.
So a connection carries one request at once, and is closed when its replica drains or is gone.
"""

import asyncio
import select
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Protocol, cast

from gateway.ingress.http_body import CHUNKED, UNTIL_CLOSE, ChunkScanner, MalformedError
from gateway.ingress.http_wire import AnswerHead
from gateway.routing.pool import Pool
from wire.membership import ReplicaLease, ReplicaState

#: Longest head of an answer. Bytes.
_ANSWER_HEAD_LIMIT = 262144
#: The peer will send nothing more. Where the system does not know the word, only a reset is seen.
_HANG_UP: int = getattr(select, "POLLRDHUP", 0)
#: Heads up to this length are remembered with what they mean: a model's answers mostly start alike. Bytes.
_REMEMBERED_LENGTH = 1024

_remembered = lru_cache(maxsize=512)(AnswerHead)


def watch_peer(transport: asyncio.BaseTransport, *, for_data: bool) -> select.poll:
    """Something whose ``poll(0)`` tells at once, whatever the event loop has been told yet, that the peer has
    closed the connection or, ``for_data``, has sent something. Not to be asked once the transport is closing."""
    watch = select.poll()
    watch.register(transport.get_extra_info("socket").fileno(), _HANG_UP | (select.POLLIN if for_data else 0))
    return watch


class AnswerListener(Protocol):
    """Who sent a request, as its connection sees it. Any of the calls may end the exchange."""

    @property
    def wants_content(self) -> bool:
        """True to get the content of a chunked answer instead of its chunks."""

    def on_answer(self, head: AnswerHead, body: bytes, *, done: bool) -> None:
        """The head of the answer, and what has come of its body; ``done`` when that is all."""

    def on_answer_body(self, body: bytes, *, done: bool) -> None:
        """More of the body."""

    def on_upstream_lost(self, reason: str) -> None:
        """The connection ended, or what came is no HTTP, before the answer was complete."""

    def on_upstream_writable(self, *, writable: bool) -> None:
        """Back-pressure: whether the replica takes more of the request now."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to one replica."""

    __slots__ = (
        "_buffer",
        "_head",
        "_left",
        "_listener",
        "_owner",
        "_reading_paused",
        "_scanner",
        "_spoiled",
        "_watch",
        "address",
        "idle_since",
        "replica_id",
        "reused",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, owner: "Upstreams", replica_id: str, address: str) -> None:
        self._owner = owner
        self.replica_id = replica_id
        self.address = address
        self.reused = False
        self.idle_since = 0.0
        self._listener: AnswerListener | None = None
        self._reading_paused = False
        self._reset()

    def _reset(self) -> None:
        self._buffer = b""
        self._head: AnswerHead | None = None
        self._left = 0
        self._scanner: ChunkScanner | None = None
        self._spoiled = False

    # -- what an exchange does with it --------------------------------------------------------------------

    def send(self, listener: AnswerListener, request: bytes) -> None:
        """Send the head of a request, and what there is of its body, in one write: Triton 2.51 misreads a
        request line that comes in two pieces."""
        self._reset()
        self._listener = listener
        self.transport.write(request)

    def write(self, body: bytes) -> None:
        self.transport.write(body)

    def finish(self, *, reusable: bool) -> None:
        """The exchange is over; ``reusable`` unless the replica has not been sent, or has not said, everything."""
        self._listener = None
        self.set_reading(wanted=True)
        if reusable and not self._spoiled and self._head is not None and self._head.keep_alive:
            self.reused = True
            self._owner.put_back(self)
        else:
            self.transport.abort()

    def is_idle(self) -> bool:
        """False when the replica has closed the connection, or said something that nobody asked for."""
        return not self.transport.is_closing() and not self._watch.poll(0)

    def set_reading(self, *, wanted: bool) -> None:
        """Back-pressure: stop or go on reading the answer."""
        if wanted == self._reading_paused and not self.transport.is_closing():
            self._reading_paused = not wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    # -- what the event loop calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport by class, only by what they do.
        self.transport = cast("asyncio.Transport", transport)
        self._watch = watch_peer(transport, for_data=True)

    def data_received(self, data: bytes) -> None:
        if self._listener is None:
            self.transport.abort()  # nobody asked anything: the next answer could not be trusted
            return
        try:
            if self._head is None:
                self._read_head(data, self._listener)
            else:
                body, done = self._measure(self._head, data)
                self._listener.on_answer_body(body, done=done)
        except MalformedError as error:
            self._lose(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.forget(self)
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if exc is None and self._head is not None and self._head.body_bytes == UNTIL_CLOSE:
            listener.on_answer_body(b"", done=True)
        else:
            listener.on_upstream_lost("the replica closed the connection" if exc is None else str(exc))

    def pause_writing(self) -> None:
        if self._listener is not None:
            self._listener.on_upstream_writable(writable=False)

    def resume_writing(self) -> None:
        if self._listener is not None:
            self._listener.on_upstream_writable(writable=True)

    # -- reading the answer -------------------------------------------------------------------------------

    def _read_head(self, data: bytes, listener: AnswerListener) -> None:
        buffer = self._buffer + data if self._buffer else data
        while True:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > _ANSWER_HEAD_LIMIT:
                    raise MalformedError("the head of the replica's answer does not end")
                self._buffer = buffer
                return
            raw = buffer[: end + 4]
            head = _remembered(raw) if end < _REMEMBERED_LENGTH else AnswerHead(raw)
            buffer = buffer[end + 4 :]
            if head.status >= 200:
                break
            # An interim answer (100, 103) ends at this hop.
            if head.status == 101:
                raise MalformedError("the replica switched protocols unasked")
        self._buffer = b""
        self._head = head
        if head.body_bytes == CHUNKED:
            self._scanner = ChunkScanner()
        else:
            self._left = max(head.body_bytes, 0)
        body, done = self._measure(head, buffer)
        listener.on_answer(head, body, done=done)

    def _measure(self, head: AnswerHead, data: bytes) -> tuple[bytes, bool]:
        """The part of ``data`` that belongs to this answer, and whether the answer is complete with it."""
        if head.body_bytes == UNTIL_CLOSE:
            return data, False
        if self._scanner is None:
            if len(data) > self._left:
                self._spoiled = True
                data = data[: self._left]
            self._left -= len(data)
            return data, not self._left
        wants_content = self._listener is not None and self._listener.wants_content
        pieces: list[bytes] | None = [] if wants_content else None
        end = self._scanner.feed(data, pieces)
        if self._scanner.body_bytes > self._owner.answer_limit_bytes:
            raise MalformedError(f"the answer is larger than body_limit_bytes ({self._owner.answer_limit_bytes})")
        if 0 <= end < len(data):
            self._spoiled = True
            data = data[:end]
        return data if pieces is None else b"".join(pieces), end >= 0

    def _lose(self, reason: str) -> None:
        listener, self._listener = self._listener, None
        self.transport.abort()
        if listener is not None:
            listener.on_upstream_lost(reason)


class Upstreams:
    """All connections of one door to all replicas."""

    def __init__(
        self, pools: Iterable[Pool], *, connect_timeout_seconds: float, idle_seconds: float, answer_limit_bytes: int
    ) -> None:
        self._pools = list(pools)
        self._connect_timeout_seconds = connect_timeout_seconds
        self._idle_seconds = idle_seconds
        self.answer_limit_bytes = answer_limit_bytes
        self._idle: dict[str, list[UpstreamConnection]] = {}
        self._loop = asyncio.get_running_loop()
        self._ready: dict[str, dict[str, str]] = {}
        self._address_of: dict[str, str] = {}
        self._kept: dict[str, ReplicaLease] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        for pool in self._pools:
            pool.subscribe(self._on_membership)
            self._on_membership(pool)

    def take(self, lease: ReplicaLease) -> UpstreamConnection | None:
        """An open connection to the replica that nobody uses, the one used last; None when there is none."""
        idle = self._idle.get(lease.id)
        while idle:
            connection = idle.pop()
            if connection.address == lease.http_address and connection.is_idle():
                return connection
            connection.transport.abort()
        return None

    def connect(self, lease: ReplicaLease, then: Callable[[UpstreamConnection | None], None]) -> None:
        """Open a connection and call ``then`` with it, or with None when the replica cannot be reached."""
        task = self._loop.create_task(self._connect(lease, then))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, lease: ReplicaLease, then: Callable[[UpstreamConnection | None], None]) -> None:
        connection = None
        address = lease.http_address or ""
        host, _, port = address.rpartition(":")
        if host and port.isdigit():
            made = UpstreamConnection(self, lease.id, address)
            try:
                async with asyncio.timeout(self._connect_timeout_seconds):
                    await self._loop.create_connection(lambda: made, host.strip("[]"), int(port))
                connection = made
            except (OSError, TimeoutError):
                connection = None
        then(connection)

    def put_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request, if its replica still takes requests at that address."""
        if connection.transport.is_closing():
            return
        replica_id = connection.replica_id
        if self._address_of.get(replica_id) != connection.address:
            connection.transport.close()
            return
        connection.idle_since = self._loop.time()
        idle = self._idle.get(replica_id)
        if idle is None:
            self._idle[replica_id] = [connection]
        else:
            idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """It is closed: nobody may get it."""
        idle = self._idle.get(connection.replica_id)
        if idle and connection in idle:
            idle.remove(connection)

    def forget_idle_of(self, replica_id: str) -> None:
        """Close the idle connections of a replica, because one of them turned out to be dead."""
        for connection in self._idle.pop(replica_id, ()):
            connection.transport.abort()

    def idle_of(self, replica_id: str) -> int:
        """Number of open connections to the replica that no request uses."""
        return len(self._idle.get(replica_id, ()))

    def sweep(self, now: float) -> None:
        """Close connections that have been idle for too long. ``now`` is loop time."""
        for replica_id, idle in self._idle.items():
            if replica_id in self._kept:
                continue
            for connection in [c for c in idle if now - c.idle_since > self._idle_seconds]:
                idle.remove(connection)
                connection.transport.close()

    def close(self) -> None:
        """Close what is idle and listen no more. Connections in use end with their exchange."""
        for pool in self._pools:
            pool.unsubscribe(self._on_membership)
        self._pools.clear()
        self._address_of.clear()
        for task in self._connecting:
            task.cancel()
        for replica_id in list(self._idle):
            for connection in self._idle.pop(replica_id):
                connection.transport.close()

    def _on_membership(self, pool: Pool) -> None:
        """A replica that drains waits for its connections to end, so the idle ones end now. While it holds live
        sequences one stays, or is opened: that is what keeps it."""
        before = self._ready.get(pool.name, {})
        draining = {
            lease.id: lease
            for lease in pool.replicas
            if lease.state is ReplicaState.DRAINING and pool.sequences.holds(lease.id)
        }
        self._ready[pool.name] = {
            lease.id: lease.http_address
            for lease in pool.replicas
            if (lease.state is ReplicaState.READY or lease.id in draining) and lease.http_address is not None
        }
        self._address_of = {key: address for ready in self._ready.values() for key, address in ready.items()}
        for replica_id, address in before.items():
            if self._address_of.get(replica_id) != address:
                self._kept.pop(replica_id, None)
                for connection in self._idle.pop(replica_id, ()):
                    connection.transport.close()
        for replica_id, lease in draining.items():
            if replica_id not in self._kept:
                self._kept[replica_id] = lease
                self._keep_one(lease)

    def _keep_one(self, lease: ReplicaLease) -> None:
        idle = self._idle.get(lease.id, [])
        for connection in idle[1:]:
            connection.transport.close()
        if idle:
            del idle[1:]
        else:
            self.connect(lease, lambda made: None if made is None else self.put_back(made))
