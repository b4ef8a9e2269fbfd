"""``<state_dir>/up.json`` and its lock: which supervisor runs here, where it listens, what it runs."""

import errno
import fcntl
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tidegate.supervisor.processes import start_time


class UpError(Exception):
    """Why the system cannot run, in one sentence for people."""


#: Written and removed before the start: a full disk is better told now than by the store later.
_PROBE_BYTES = 1 << 20


def record_path(state_dir: Path) -> Path:
    return state_dir / "up.json"


@contextmanager
def hold_state_dir(state_dir: Path) -> Iterator[None]:
    """Sole use of ``state_dir`` while inside.

    Raises:
        UpError: another supervisor runs here, or the folder cannot be written (no permission, disk full).
    """
    _check_writable(state_dir)
    descriptor = os.open(state_dir / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running = read_record(state_dir) or {}
            raise UpError(
                f"a system runs in {state_dir} already (pid {running.get('pid', 'unknown')}); "
                f"stop it with {down_command(running.get('config'))}, or set another state_dir"
            ) from None
        try:
            yield
        finally:
            record_path(state_dir).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _check_writable(state_dir: Path) -> None:
    probe = state_dir / f"probe-{os.getpid()}"
    try:
        (state_dir / "logs").mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else os.strerror(error.errno or 0)
        raise UpError(f"the state folder {state_dir} cannot be written: {why}") from error
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def down_command(config: str | Path | None) -> str:
    """What to type to stop the system of ``config``."""
    named = "" if config is None or not Path(config).is_file() else f" --config {shlex.quote(str(config))}"
    return f"tidegate down{named}"


def write_record(state_dir: Path, record: dict[str, Any]) -> None:
    """Replace the record in one step; readers see the old one or the new one."""
    new = record_path(state_dir).with_suffix(".new")
    try:
        new.write_text(json.dumps(record, indent=1))
        new.replace(record_path(state_dir))
    except OSError:
        # A disk that filled up must not take the system down; the record is for people.
        with suppress(OSError):
            new.unlink(missing_ok=True)


def read_record(state_dir: Path) -> dict[str, Any] | None:
    """The record as it was last written, stale or not; None when there is none."""
    try:
        record = json.loads(record_path(state_dir).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def running_record(state_dir: Path) -> dict[str, Any] | None:
    """The record of the supervisor that runs now; None when there is none, or a dead one left its record."""
    record = read_record(state_dir)
    if record is None or start_time(int(record.get("pid", 0))) != record.get("start_time"):
        return None
    return record
