"""The embedded store as ``tidegate up`` starts it, and what it says when it cannot."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from stores import embedded
from stores.embedded import embedded_command, wait_until_answers
from stores.settings import StoreSettings
from stores.store import Store
from tests.valkey import RunningValkey, free_port
from wire.errors import ErrorKind, TidegateError


def _refusal(state_dir: Path, port: int) -> str:
    with pytest.raises(TidegateError) as caught:
        embedded_command(state_dir, StoreSettings(embedded_port=port))
    assert caught.value.kind is ErrorKind.STORE_UNAVAILABLE
    assert "\n" not in caught.value.message
    return caught.value.message


async def test_serves_on_loopback_with_append_only_file_and_no_eviction(tmp_path: Path) -> None:
    """A-085, A-086: accepted jobs survive a restart, and nothing is evicted."""
    settings = StoreSettings(embedded_port=free_port())
    argv = embedded_command(tmp_path, settings)
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
    store = Store.connect(settings, client_name="test")
    try:
        await wait_until_answers(store, 10)
        wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "save": "", "bind": "127.0.0.1"}
        found = await store.redis.config_get(*wanted)
        assert {name: found[name] for name in wanted} == wanted
        assert (tmp_path / "store" / "appendonlydir").is_dir()
        assert "is in use by a running server" in _refusal(tmp_path, free_port())
    finally:
        await store.close()
        process.terminate()
        await process.wait()


async def test_data_survive_a_hard_kill(valkey: RunningValkey, store: Store) -> None:
    await store.redis.set("kept", "yes")
    await asyncio.sleep(1.2)
    await valkey.kill()
    await valkey.start()
    assert await store.redis.get("kept") == b"yes"


async def test_names_the_taken_port_and_its_setting(valkey: RunningValkey, tmp_path: Path) -> None:
    message = _refusal(tmp_path, valkey.port)
    assert str(valkey.port) in message
    assert "store.embedded_port" in message


def test_says_that_the_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    assert "cannot be written" in _refusal(tmp_path, free_port())


def test_says_that_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(embedded.os, "fsync", full)
    assert "is full" in _refusal(tmp_path, free_port())
    assert list((tmp_path / "store").iterdir()) == []


def test_says_that_the_program_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "store.url" in _refusal(tmp_path, free_port())


async def test_waiting_for_an_absent_store_ends_at_the_limit() -> None:
    store = Store.connect(StoreSettings(embedded_port=free_port()), client_name="test")
    with pytest.raises(TidegateError, match="did not answer within"):
        await wait_until_answers(store, 0.1)
    await store.close()
