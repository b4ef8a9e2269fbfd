"""gRPC channels to replicas: one per replica, closed as soon as the replica leaves and nothing is in flight on it."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from gateway.routing.pool import Pool
from gateway.settings import GatewaySettings
from wire.membership import ReplicaLease, ReplicaState

#: The protocol's own limit for a message. Bytes.
LONGEST_MESSAGE_BYTES = 2**31 - 1


class UnreachedError(Exception):
    """The replica could not be reached: the request provably did not get to it."""


class Upstream:
    """The channel to one replica. Use it as a context manager while a request is on it."""

    def __init__(self, lease: ReplicaLease, settings: GatewaySettings, on_idle: Callable[["Upstream"], None]) -> None:
        limit = min(settings.body_limit_bytes, LONGEST_MESSAGE_BYTES)
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.max_metadata_size", settings.header_limit_bytes),
            ("grpc.client_idle_timeout_ms", max(1000, int(settings.idle_upstream_seconds * 1000))),
            # A request that may have run is not sent again, and no other channel's connection is shared.
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
        ]
        self.replica_id = lease.id
        self.address = lease.grpc_address
        self.retired = asyncio.Event()
        """Set when the replica leaves: nothing new may start here, what can end soon should."""
        self._on_idle = on_idle
        self._connect_timeout_seconds = settings.connect_timeout_seconds
        self._users = 0
        self._channel: Any = grpc.aio.insecure_channel(lease.grpc_address or "unix:/", options=options)

    def __enter__(self) -> "Upstream":
        self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if self._users == 0 and self.retired.is_set():
            self._on_idle(self)

    @property
    def connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def idle(self) -> bool:
        return self._users == 0

    async def connect(self) -> None:
        """Wait until there is a connection.

        Raises:
            UnreachedError: refused, or none within the connect timeout.
        """
        state = self._channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return
        try:
            async with asyncio.timeout(self._connect_timeout_seconds):
                while state is not grpc.ChannelConnectivity.READY:
                    if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                        raise UnreachedError
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError as error:
            raise UnreachedError from error

    def unary(self, path: str) -> Any:
        """The callable of a unary method, raw bytes in and out."""
        return self._channel.unary_unary(path)

    def stream(self, path: str) -> Any:
        """The callable of a two-way stream, raw bytes in and out."""
        return self._channel.stream_stream(path)

    async def close(self) -> None:
        await self._channel.close()


class Upstreams:
    """The channels of all pools' replicas. Follows the pools."""

    def __init__(self, pools: Iterable[Pool], settings: GatewaySettings) -> None:
        self._settings = settings
        self._pools = list(pools)
        self._channels: dict[str, Upstream] = {}
        self._closing: set[asyncio.Task[None]] = set()
        for pool in self._pools:
            pool.subscribe(self._on_update)

    def of(self, lease: ReplicaLease) -> Upstream:
        """The channel to a replica, made on first use."""
        found = self._channels.get(lease.id)
        if found is not None and found.address != lease.grpc_address:
            self._retire(found)
            found = None
        if found is None:
            found = Upstream(lease, self._settings, self._close)
            self._channels[lease.id] = found
        return found

    def drop(self, upstream: Upstream) -> None:
        """Forget a channel that cannot connect, so that the next request tries afresh and waits for no back-off."""
        if self._channels.get(upstream.replica_id) is upstream:
            self._retire(upstream)

    def retire_all(self) -> None:
        """This gateway instance leaves."""
        for upstream in list(self._channels.values()):
            self._retire(upstream)

    async def close(self) -> None:
        for pool in self._pools:
            pool.unsubscribe(self._on_update)
        self.retire_all()
        if self._closing:
            await asyncio.wait(self._closing, timeout=1.0)

    def _on_update(self, pool: Pool) -> None:
        usable = {lease.id for each in self._pools for lease in each.replicas if lease.state is ReplicaState.READY}
        for upstream in list(self._channels.values()):
            if upstream.replica_id not in usable:
                self._retire(upstream)

    def _retire(self, upstream: Upstream) -> None:
        if self._channels.get(upstream.replica_id) is upstream:
            del self._channels[upstream.replica_id]
        upstream.retired.set()
        if upstream.idle:
            self._close(upstream)

    def _close(self, upstream: Upstream) -> None:
        task = asyncio.get_running_loop().create_task(upstream.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
