"""A folder for Ray. Its sockets live in it, and the path of a Unix socket holds 107 bytes: it must be short."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def ray_directory(given: Path | None) -> Iterator[Path]:
    """``given``, whose owner removes it, or a fresh folder that is gone afterwards."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    path = Path(tempfile.mkdtemp(prefix="tg-ray-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
