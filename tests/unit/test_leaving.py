"""Requests held by an instance that leaves: kept where a replica is coming, sent elsewhere where none is."""

import asyncio

from gateway.data_plane import refuse_in_vain
from gateway.routing.pool import Pool, RequestHead
from tests.virtual_time import run_in_virtual_time
from wire.errors import ErrorKind, TidegateError
from wire.membership import ReplicaLease, ReplicaState
from wire.pools import ModelSettings, PoolSettings


def _pool(*states: ReplicaState) -> Pool:
    pool = Pool(
        "vision",
        PoolSettings(models=(ModelSettings(name="m"),)),
        clock=asyncio.get_running_loop().time,
        on_wanted=lambda _: None,
    )
    pool.update([ReplicaLease(id=state.value, pool="vision", state=state) for state in states])
    return pool


async def _refused_after(pool: Pool, seconds: float) -> ErrorKind | None:
    """The kind of error that a held request gets within ``seconds``; None while it is held."""
    hold = pool.hold(RequestHead("m"))
    refusing = asyncio.create_task(refuse_in_vain([pool]))
    await asyncio.sleep(seconds)
    refusing.cancel()
    if not hold.future.done():
        hold.cancel()
        return None
    error = hold.future.exception()
    assert isinstance(error, TidegateError) and error.retry_after_seconds == 1.0
    assert not pool.held
    return error.kind


def test_nothing_can_wake_the_pool() -> None:
    async def story() -> None:
        assert await _refused_after(_pool(), 1.5) is None
        assert await _refused_after(_pool(), 2.5) is ErrorKind.DRAINING
        assert await _refused_after(_pool(ReplicaState.DRAINING, ReplicaState.FAILED), 2.5) is ErrorKind.DRAINING

    run_in_virtual_time(story())


def test_a_replica_is_coming() -> None:
    async def story() -> None:
        for state in (ReplicaState.STARTING, ReplicaState.WARMING, ReplicaState.READY):
            assert await _refused_after(_pool(state), 20.0) is None

    run_in_virtual_time(story())


def test_one_that_comes_in_time_is_waited_for() -> None:
    async def story() -> None:
        pool = _pool()
        starting = ReplicaLease(id="a", pool="vision", state=ReplicaState.STARTING)
        asyncio.get_running_loop().call_later(1.0, pool.update, [starting])
        assert await _refused_after(pool, 20.0) is None

    run_in_virtual_time(story())
