"""One connection to the store: its clock, its errors in our words, and notices between processes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ExecAbortError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stores.driver import connection_pool
from stores.settings import StoreSettings
from wire.errors import ErrorKind, TidegateError

#: Driver errors that mean "the store cannot serve now", as against a fault of ours.
_AWAY = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, ReadOnlyError, OSError, TimeoutError)


#: Answers that tell of the server's state, not of a fault in the call; those without a class in the driver by code:
#: MISCONF is a disk that takes no more, NOREPLICAS a primary cut off from its replicas.
_REFUSALS = (OutOfMemoryError, NoPermissionError, ClusterDownError, ExecAbortError)
_REFUSAL_CODES = ("MISCONF", "NOREPLICAS", "NOAUTH")


class Store:
    """A connection pool to the store, with its key prefix. Every method of every store raises
    ``TidegateError(STORE_UNAVAILABLE)`` when the store does not answer in time."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        # Any: the driver's hints cover every decoding mode at once (bytes | str | None); ours is always bytes.
        self.redis: Any = redis
        self.prefix = prefix

    @property
    def timeout_seconds(self) -> float:
        """Longest wait for an answer; a blocking read must wait for less."""
        return float(self.redis.connection_pool.connection_kwargs.get("socket_timeout") or 5.0)

    def another(self) -> Self:
        """A store with connections of its own to the same server, for another event loop."""
        pool = self.redis.connection_pool
        twin = ConnectionPool(connection_class=pool.connection_class, **pool.connection_kwargs)
        return type(self)(Redis.from_pool(twin), self.prefix)

    @classmethod
    def connect(cls, settings: StoreSettings, *, client_name: str) -> Self:
        """A store that connects on first use; nothing is sent yet."""
        pool = connection_pool(
            settings.resolved_url,
            socket_timeout=settings.timeout_seconds,
            socket_connect_timeout=settings.timeout_seconds,
            # Our loops do their own waiting: a second try is for a pooled connection that was cut meanwhile, and
            # would stretch the time limit above where there was no answer.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            client_name=client_name,
            health_check_interval=30,
        )
        return cls(Redis.from_pool(pool), settings.key_prefix)

    async def close(self) -> None:
        await self.redis.aclose()

    def key(self, *parts: str) -> str:
        """A key under this system's prefix."""
        return ":".join((self.prefix, *parts))

    async def now(self) -> float:
        """Unix seconds by the store's clock: the one clock that processes on several hosts share."""
        with self.errors():
            seconds, microseconds = await self.redis.time()
        return float(seconds) + float(microseconds) / 1e6

    async def ping(self) -> None:
        """Raises ``TidegateError(STORE_UNAVAILABLE)`` unless the store answers."""
        with self.errors():
            await self.redis.ping()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Driver errors raised inside become ours."""
        try:
            yield
        except (AuthenticationError, AuthorizationError) as error:  # of the driver's ConnectionError, so before it
            given = self.redis.connection_pool.connection_kwargs.get("password")
            words = f"refuses the user or password: {error}" if given else "wants a password: set it in store.url"
            raise TidegateError(ErrorKind.STORE_UNAVAILABLE, f"the store {words}") from error
        except (RedisTimeoutError, TimeoutError) as error:
            words = f"the store does not answer within {self.timeout_seconds:g} s"
            raise TidegateError(ErrorKind.STORE_UNAVAILABLE, words) from error
        except _AWAY as error:
            raise TidegateError(ErrorKind.STORE_UNAVAILABLE, f"the store does not answer: {error}") from error
        except _REFUSALS as error:
            raise TidegateError(ErrorKind.STORE_UNAVAILABLE, f"the store refuses: {error}") from error
        except ResponseError as error:
            if any(code in str(error) for code in _REFUSAL_CODES):  # a pipeline puts words before it
                raise TidegateError(ErrorKind.STORE_UNAVAILABLE, f"the store refuses: {error}") from error
            raise
        except RedisError as error:
            raise TidegateError(ErrorKind.STORE_UNAVAILABLE, f"the store failed: {error}") from error

    async def publish(self, channel: str, message: str) -> None:
        """Tell whoever listens on ``channel`` now; nobody listening is no error."""
        with self.errors():
            await self.redis.publish(channel, message)

    async def notices(self, channel: str, *, at_least_every_seconds: float) -> AsyncIterator[str | None]:
        """Messages of ``channel`` as they come, and None whenever none came for ``at_least_every_seconds``.

        Starts with None (subscribed: look now). Never ends and never raises for an absent store: while it is away the
        iterator yields None at its period, so that callers look again by themselves.
        """
        while True:
            pubsub: Any = self.redis.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(channel)
                yield None
                while True:
                    message = await pubsub.get_message(timeout=at_least_every_seconds)
                    yield None if message is None else bytes(message["data"]).decode()
            except (RedisError, OSError, TimeoutError):
                yield None
                await asyncio.sleep(min(at_least_every_seconds, 1.0))
            finally:
                await _close_quietly(pubsub)


async def _close_quietly(pubsub: Any) -> None:
    with suppress(*_AWAY):  # the connection may be gone already
        await pubsub.aclose()
