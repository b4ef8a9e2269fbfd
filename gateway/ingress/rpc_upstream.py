"""HTTP/2 connections to replicas: shared by the calls of all callers, closed once the replica leaves and they are idle.

A connection to a draining replica takes no further call, and closes with its last one: the replica waits for that.
"""

import asyncio
import select
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gateway.ingress import h2_frames as h2
from gateway.ingress.h2_connection import Http2Connection
from gateway.ingress.h2_frames import Code, ConnectionFault
from gateway.ingress.h2_headers import HeaderBlocks, MalformedError, TooLongError
from gateway.ingress.h2_leg import Leg
from gateway.ingress.rpc_calls import AnswerHead, read_answer
from gateway.ingress.upstream import watch_peer
from gateway.routing.pool import Pool
from gateway.settings import GatewaySettings
from wire.membership import ReplicaLease, ReplicaState

if TYPE_CHECKING:
    from gateway.ingress.rpc_stream import RpcStream

#: Calls on one connection, if the replica allows as many.
_CALLS_PER_CONNECTION = 100
#: Another connection is opened when all have this many calls, up to so many; over that, only when all are full.
_SPREAD_CALLS = 32
_SPREAD_CONNECTIONS = 4
#: Longest list of header fields of an answer. Bytes.
_ANSWER_HEAD_LIMIT = 262144

Then = Callable[["UpstreamConnection | None"], None]


class UpstreamConnection(Http2Connection):
    """One connection to one replica."""

    SETTINGS = {h2.HEADER_TABLE_SIZE: 0, h2.ENABLE_PUSH: 0}  # noqa: RUF012

    def __init__(self, owner: "Upstreams", replica_id: str, address: str, blocks: HeaderBlocks[AnswerHead]) -> None:
        super().__init__(blocks, _ANSWER_HEAD_LIMIT)
        self._owner = owner
        self.replica_id = replica_id
        self.address = address
        self.retired = False
        """The replica leaves: nothing new may start here."""
        self._going = False
        self._next_id = 1
        self._watch: select.poll | None = None

    # -- what a call does with it -------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more calls it takes."""
        if self.closed or self._going or self.retired or self._next_id > h2.LARGEST_STREAM_ID - 2:
            return 0
        return min(self.peer_streams, _CALLS_PER_CONNECTION) - len(self.legs)

    def open(self, call: "RpcStream", block: bytes) -> Leg:
        """A stream for a call; there must be room."""
        leg = self.new_leg(self._next_id)
        self._next_id += 2
        leg.owner = call
        self.put_headers(leg.stream_id, block, end_stream=False)
        return leg

    def hung_up(self) -> bool:
        """Whether the replica has closed the connection, although the event loop has not been told yet."""
        return self._watch is None or self.transport.is_closing() or bool(self._watch.poll(0))

    def retire(self) -> None:
        self.retired = True
        for leg in list(self.legs.values()):
            leg.owner.leave()
        self._close_if_done()

    def give_up(self) -> None:
        """The replica has not said hello in time."""
        if self._watch is not None:
            self.transport.abort()

    def leave(self) -> None:
        """Say goodbye and close, at once if no call is on it."""
        self.retired = True
        self._close_if_done()

    # -- from the replica ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch = watch_peer(transport, for_data=False)
        self._owner.open_connections.add(self)
        self.introduce(h2.PREFACE)

    def on_settings(self) -> None:
        self._owner.greeted(self)

    def on_headers(self, stream_id: int, block: bytes, *, end: bool) -> None:
        leg = self.legs.get(stream_id)
        if leg is None:
            self.on_unknown_stream(stream_id, h2.HEADERS)
        elif leg.in_done:
            raise ConnectionFault(Code.STREAM_CLOSED, "headers behind the end of a stream")
        try:
            head = self._blocks.read(block, self._decoder)
        except MalformedError:
            if leg is not None:
                leg.reset(Code.PROTOCOL_ERROR)
                leg.owner.on_nonsense()
            return
        except TooLongError:
            if leg is not None:
                leg.reset(Code.CANCEL)
                leg.owner.on_upstream_reset(Code.ENHANCE_YOUR_CALM)
            return
        if leg is not None:
            self.earn()
            leg.in_done = end
            leg.owner.on_answer_headers(head, end=end)
            if end and leg.out_done:
                self.forget(leg)

    def on_data(self, leg: Leg, data: bytes, *, end: bool) -> None:
        leg.owner.on_answer_data(data, end=end)

    def on_reset(self, leg: Leg, code: int) -> None:
        leg.owner.on_upstream_reset(code)

    def on_unknown_stream(self, stream_id: int, kind: int) -> None:
        if not stream_id & 1 or stream_id >= self._next_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame for a stream that was never opened")

    def on_goaway(self, last_stream_id: int, code: int) -> None:
        self._going = True
        self._owner.forget(self)
        for leg in [leg for leg in self.legs.values() if leg.stream_id > last_stream_id]:
            leg.close()
            leg.owner.on_not_run()
        self._close_if_done()

    def on_leg_over(self) -> None:
        if self._going or self.retired:
            self._close_if_done()

    def on_lost(self) -> None:
        self._owner.lost(self)
        for leg in list(self.legs.values()):
            leg.close()
            leg.owner.on_upstream_lost()

    def on_closed(self) -> None:
        self._owner.open_connections.discard(self)

    def _close_if_done(self) -> None:
        if not self.legs and not self.closed:
            self.fail(Code.NO_ERROR, "")


class _Replica:
    """The connections to one replica at one address, and who waits for one."""

    def __init__(self, lease: ReplicaLease) -> None:
        self.address = lease.grpc_address or ""
        self.connections: list[UpstreamConnection] = []
        self.waiting: deque[Then] = deque()
        self.connecting: UpstreamConnection | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class Upstreams:
    """The connections of one door to all replicas. Follows the pools."""

    def __init__(self, pools: Iterable[Pool], settings: GatewaySettings) -> None:
        self._pools = list(pools)
        self._connect_timeout_seconds = settings.connect_timeout_seconds
        self._idle_seconds = settings.idle_upstream_seconds
        self._loop = asyncio.get_running_loop()
        self._blocks = HeaderBlocks(read_answer, _ANSWER_HEAD_LIMIT)
        self._replicas: dict[str, _Replica] = {}
        self.open_connections: set[UpstreamConnection] = set()
        for pool in self._pools:
            pool.subscribe(self._on_membership)

    def take(self, lease: ReplicaLease) -> UpstreamConnection | None:
        """An open connection with room for a call, the one with the fewest; None when there is none."""
        replica = self._of(lease)
        found: UpstreamConnection | None = None
        fewest = _CALLS_PER_CONNECTION
        for connection in replica.connections:
            if len(connection.legs) < fewest and connection.room > 0:
                found, fewest = connection, len(connection.legs)
        if found is None:
            return None
        if fewest == 0 and found.hung_up():
            found.transport.abort()
            self.forget(found)
            return self.take(lease)
        if fewest >= _SPREAD_CALLS and len(replica.connections) < _SPREAD_CONNECTIONS and replica.connecting is None:
            self._connect(lease.id, replica)
        return found

    def connect(self, lease: ReplicaLease, then: Then) -> None:
        """Open a connection and call ``then`` with it, or with None when the replica cannot be reached."""
        replica = self._of(lease)
        replica.waiting.append(then)
        if replica.connecting is None:
            self._connect(lease.id, replica)

    def put_back(self, connection: UpstreamConnection) -> None:
        """Calls share connections: there is nothing to do."""

    def sweep(self, now: float) -> None:
        """Close connections that have been idle for too long. ``now`` is loop time."""
        for connection in list(self.open_connections):
            if not connection.legs and connection.greeted and now - connection.active_at > self._idle_seconds:
                connection.leave()

    async def close(self) -> None:
        """Close what is idle and listen no more. Connections in use end with their calls."""
        for pool in self._pools:
            pool.unsubscribe(self._on_membership)
        self._pools.clear()
        for replica_id in list(self._replicas):
            self._retire(replica_id)

    # -- connections --------------------------------------------------------------------------------------

    def greeted(self, connection: UpstreamConnection) -> None:
        """The replica has said hello: calls may go there."""
        replica = self._replicas.get(connection.replica_id)
        if replica is None or replica.connecting is not connection:
            if replica is None or connection not in replica.connections:
                connection.leave()
            return
        if connection.room <= 0:
            self._unreached(connection.replica_id, replica)  # it wants no calls
            return
        self._end_connecting(replica)
        replica.connections.append(connection)
        while replica.waiting and connection.room > 0:
            replica.waiting.popleft()(connection)
        if replica.waiting and connection.replica_id in self._replicas:
            self._connect(connection.replica_id, replica)

    def lost(self, connection: UpstreamConnection) -> None:
        """A connection is gone; if it was not even up, nobody can have it."""
        self.forget(connection)
        replica = self._replicas.get(connection.replica_id)
        if replica is not None and replica.connecting is connection:
            self._unreached(connection.replica_id, replica)

    def forget(self, connection: UpstreamConnection) -> None:
        """It takes no further call."""
        replica = self._replicas.get(connection.replica_id)
        if replica is not None and connection in replica.connections:
            replica.connections.remove(connection)

    def _of(self, lease: ReplicaLease) -> _Replica:
        found = self._replicas.get(lease.id)
        if found is not None and found.address != (lease.grpc_address or ""):
            self._retire(lease.id)
            found = None
        if found is None:
            found = self._replicas[lease.id] = _Replica(lease)
        return found

    def _connect(self, replica_id: str, replica: _Replica) -> None:
        connection = UpstreamConnection(self, replica_id, replica.address, self._blocks)
        replica.connecting = connection
        replica.timer = self._loop.call_later(self._connect_timeout_seconds, self._unreached, replica_id, replica)
        replica.task = self._loop.create_task(self._open(replica_id, replica, connection))

    async def _open(self, replica_id: str, replica: _Replica, connection: UpstreamConnection) -> None:
        host, _, port = replica.address.rpartition(":")
        try:
            if not host or not port.isdigit():
                raise OSError(f"no address: {replica.address!r}")
            await self._loop.create_connection(lambda: connection, host.strip("[]"), int(port))
        except OSError:
            if replica.connecting is connection:
                self._unreached(replica_id, replica)

    def _end_connecting(self, replica: _Replica) -> None:
        replica.connecting = None
        if replica.timer is not None:
            replica.timer.cancel()

    def _unreached(self, replica_id: str, replica: _Replica) -> None:
        connecting = replica.connecting
        self._end_connecting(replica)
        if connecting is not None:
            if replica.task is not None and not replica.task.done():
                replica.task.cancel()
            connecting.give_up()
        waiting, replica.waiting = replica.waiting, deque()
        for then in waiting:
            then(None)

    # -- membership ---------------------------------------------------------------------------------------

    def _on_membership(self, pool: Pool) -> None:
        usable: set[str] = set()
        for each in self._pools:
            for lease in each.replicas:
                if lease.state is ReplicaState.READY:
                    usable.add(lease.id)
                elif lease.state is ReplicaState.DRAINING and each.sequences.holds(lease.id):
                    usable.add(lease.id)
                    self._wind_down(lease.id)
        for replica_id in [key for key in self._replicas if key not in usable]:
            self._retire(replica_id)

    def _wind_down(self, replica_id: str) -> None:
        """A replica that leaves stays for the sequences it holds, and for nothing else."""
        for connection in [each for each in self.open_connections if each.replica_id == replica_id]:
            for leg in list(connection.legs.values()):
                leg.owner.leave_replica()

    def _retire(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        for connection in list(self.open_connections):
            if connection.replica_id == replica_id and connection is not replica.connecting:
                connection.retire()
        self._unreached(replica_id, replica)
