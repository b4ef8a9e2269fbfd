"""The driver's connections, made to heed cancellation."""

import asyncio
from collections.abc import Iterable
from typing import Any

from redis.asyncio import ConnectionPool
from redis.exceptions import TimeoutError as RedisTimeoutError


class _HeedsCancellation:
    """Mixed into the driver's connection classes. The driver writes under ``asyncio.wait_for``, which before Python
    3.12 drops a cancellation that arrives just as the write is done: the task goes on, and whoever cancelled it waits
    for ever. Without a socket timeout the driver writes plainly, so the time limit is ours here.
    """

    socket_timeout: float | None

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:  # noqa: FBT001, FBT002
        limit, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except TimeoutError:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise RedisTimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = limit


def connection_pool(url: str, **options: Any) -> ConnectionPool:
    """The driver's pool for ``url``, of connections that heed cancellation."""
    pool = ConnectionPool.from_url(url, **options)
    kind = pool.connection_class
    pool.connection_class = type(f"Heeding{kind.__name__}", (_HeedsCancellation, kind), {})
    return pool
