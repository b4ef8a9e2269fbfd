"""Whoever cancels a task that talks to the store can rely on it: every drain does."""

import asyncio

from stores.store import Store
from tests.valkey import RunningValkey
from wire.errors import ErrorKind, TidegateError


async def test_no_cancellation_is_lost_whenever_it_comes(valkey: RunningValkey) -> None:
    """On Python 3.11 the driver alone loses about one in twenty of these."""
    store = Store.connect(valkey.settings, client_name="test")

    async def talk() -> None:
        while True:
            await store.now()

    for step in range(300):
        task = asyncio.create_task(talk())
        # From the first write over the handshake to the steady state.
        await asyncio.sleep(step % 30 / 10000)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=2)
        assert done, f"cancellation {step} was lost"
    await store.now()
    await store.close()


async def test_a_store_that_hangs_is_told_within_its_timeout(valkey: RunningValkey) -> None:
    store = Store.connect(valkey.settings, client_name="test")
    await store.ping()
    valkey.freeze()
    try:
        async with asyncio.timeout(valkey.settings.timeout_seconds * 3):
            try:
                await store.ping()
                raise AssertionError("a frozen store answered")
            except TidegateError as error:
                assert error.kind is ErrorKind.STORE_UNAVAILABLE
    finally:
        valkey.thaw()
    await store.ping()
    await store.close()
