"""One gRPC request on its way to a replica and back: raw bytes both ways, statuses and metadata unchanged."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from gateway.ingress.protobuf import bytes_field, first_string, nested_field
from gateway.ingress.rpc_upstream import UnreachedError, Upstream, Upstreams
from gateway.routing.pool import Pool, RequestHead, Reservation
from wire.errors import ErrorKind, TidegateError
from wire.membership import JOB_HEADER

#: How gRPC's own words begin when a connection breaks. It gives the same status as a replica that refuses (Triton: a
#: full queue), and nothing else tells them apart.
_BROKEN = (
    "Stream removed",
    "Socket closed",
    "Connection reset",
    "Broken pipe",
    "recvmsg:",
    "sendmsg:",
    "keepalive",
    "GOAWAY",
    "Transport closed",
    "Endpoint closing",
    "failed to connect",
)

Metadata = tuple[tuple[str, str | bytes], ...]

#: Written by gRPC itself on each leg, or meant for the gateway.
_PER_LEG = frozenset(("user-agent", "content-type", "te", "host", "connection", JOB_HEADER))


@dataclass
class Passage:
    """What becomes known of a request as it goes: for the counters."""

    began: float
    pool: Pool | None = None
    held_seconds: float = 0.0
    cut_short: bool = False
    """True when a stream is ended from here, because its replica or this instance leaves."""


class UpstreamStatusError(Exception):
    """A status that the replica answered with; to be passed on as it is."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = trailing


def head_of(model: str | None, context: Any, now: float) -> RequestHead:
    """What routing needs to know of a call."""
    remaining = context.time_remaining()
    # A call without a deadline has none at all or one in the far future, depending on the caller's library.
    deadline = None if remaining is None or remaining > 1e8 else now + remaining
    job = any(key == JOB_HEADER for key, _ in context.invocation_metadata() or ())
    return RequestHead(model, deadline, job)


class Exchanges:
    """Passes calls on. One instance per door."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._loop = asyncio.get_running_loop()

    async def unary(self, path: str, request: bytes, context: Any, head: RequestHead, passage: Passage) -> bytes:
        """Pass a unary call on.

        Raises:
            UpstreamStatusError: the replica's own.
            TidegateError: held in vain, replica lost, deadline.
        """
        async with self._on_replica(head, passage) as (upstream, reservation):
            call = upstream.unary(path)(
                request, timeout=self._remaining(head), metadata=passed_on(context.invocation_metadata())
            )
            try:
                response: bytes = await call
            except grpc.aio.AioRpcError as error:
                raise self._failure(error, upstream) from error
            except asyncio.CancelledError:
                call.cancel()
                reservation.release_abandoned()
                raise
            await _pass_initial_metadata(call, context)
            context.set_trailing_metadata(passed_on(await call.trailing_metadata()))
            return response

    async def stream(
        self, path: str, first: bytes, context: Any, head: RequestHead, passage: Passage, leaving: asyncio.Event
    ) -> None:
        """Pass a two-way stream on, bound to one replica. It occupies a slot for as long as it lasts.

        When the replica or this instance (``leaving``) leaves, nothing more is read from the caller; what the replica
        still has to answer comes through, then the stream ends with DRAINING. Raises as :meth:`unary`.
        """
        async with self._on_replica(head, passage) as (upstream, reservation):
            call = upstream.stream(path)(
                timeout=self._remaining(head), metadata=passed_on(context.invocation_metadata())
            )
            writer = self._loop.create_task(_write_all(first, context, call, passage, (upstream.retired, leaving)))
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    await context.write(message)
                code = await call.code()
                if code is not grpc.StatusCode.OK:
                    raise grpc.aio.AioRpcError(
                        code,
                        await call.initial_metadata(),
                        await call.trailing_metadata(),
                        await call.details(),
                        await call.debug_error_string(),
                    )
                context.set_trailing_metadata(passed_on(await call.trailing_metadata()))
            except grpc.aio.AioRpcError as error:
                raise self._failure(error, upstream) from error
            except asyncio.CancelledError:
                reservation.release_abandoned()
                raise
            finally:
                call.cancel()
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            if passage.cut_short:
                raise TidegateError(ErrorKind.DRAINING, "the replica of this stream is leaving; open a new stream")

    @asynccontextmanager
    async def _on_replica(self, head: RequestHead, passage: Passage) -> AsyncIterator[tuple[Upstream, Reservation]]:
        """A slot on a replica that has been connected to. What could not be reached has not run: another gets it."""
        pool, since = passage.pool, None
        assert pool is not None
        while True:
            reservation = await _reserve(pool, head, since)
            passage.held_seconds = reservation.held_seconds
            upstream = self._upstreams.of(reservation.replica)
            with reservation, upstream:
                try:
                    await upstream.connect()
                except UnreachedError:
                    self._upstreams.drop(upstream)
                    reservation.release_unreached()
                    since = passage.began
                    continue
                yield upstream, reservation
                return

    def _remaining(self, head: RequestHead) -> float | None:
        return None if head.deadline is None else max(0.0, head.deadline - self._loop.time())

    def _failure(self, error: Any, upstream: Upstream) -> Exception:
        """A failed call as the replica's status, or as an error of ours where no answer of the replica came."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE and (details.startswith(_BROKEN) or not upstream.connected):
            self._upstreams.drop(upstream)
            message = "the replica was lost after the request was sent; the request may have run"
            return TidegateError(ErrorKind.REPLICA_LOST, message)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and details == "Deadline Exceeded":
            return TidegateError(ErrorKind.DEADLINE, "the deadline passed while the request was on a replica")
        return UpstreamStatusError(code, details, passed_on(error.trailing_metadata()))


async def _reserve(pool: Pool, head: RequestHead, since: float | None) -> Reservation:
    """``Pool.reserve`` for a request that may have had a slot before, on a replica it did not reach."""
    if since is None:
        return await pool.reserve(head)
    reservation = pool.try_reserve(head, since=since)
    if reservation is not None:
        return reservation
    hold = pool.hold(head, since=since)
    try:
        return await asyncio.shield(hold.future)
    except asyncio.CancelledError:
        hold.cancel()
        raise


async def _write_all(
    first: bytes, context: Any, call: Any, passage: Passage, endings: tuple[asyncio.Event, ...]
) -> None:
    """The caller's messages to the replica, until the caller has no more or one of ``endings`` comes."""
    waits = [asyncio.ensure_future(event.wait()) for event in endings]
    message: Any = first
    reading: asyncio.Future[Any] | None = None
    try:
        while message is not grpc.aio.EOF:
            await call.write(message)
            reading = asyncio.ensure_future(context.read())
            await asyncio.wait((reading, *waits), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                passage.cut_short = True
                break
            message = reading.result()
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        pass  # the call has ended; its reader says how
    finally:
        for wait in (*waits, *([reading] if reading else [])):
            wait.cancel()


async def _pass_initial_metadata(call: Any, context: Any) -> None:
    metadata = passed_on(await call.initial_metadata())
    if metadata:
        await context.send_initial_metadata(metadata)


def passed_on(metadata: Any) -> Metadata:
    """Metadata without what gRPC writes itself on each leg."""
    return tuple(
        (key, value) for key, value in metadata or () if key not in _PER_LEG and not key.startswith(("grpc-", ":"))
    )


def stream_error(request: bytes, text: str) -> bytes:
    """A ModelStreamInferResponse with an error, as Triton answers a request of a stream it cannot serve."""
    request_id = first_string(request, 3) or ""
    answer = bytes_field(3, request_id.encode()) if request_id else b""
    return bytes_field(1, text.encode()) + nested_field(2, answer)


def error_metadata(error: TidegateError, kind_key: str) -> Metadata:
    """Trailing metadata of an error of ours."""
    metadata: list[tuple[str, str | bytes]] = [(kind_key, error.kind.value)]
    if error.retry_after_seconds is not None:
        metadata.append(("retry-after", str(math.ceil(error.retry_after_seconds))))
    return tuple(metadata)
