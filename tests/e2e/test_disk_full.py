"""The disk under the store's folder fills up while the system runs, and has room again later."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.calls import infer_grpc, infer_http
from tests.e2e.system import System, running_system
from workers.sample_pages import sample_pages

#: Longer than a lease lives, so that replicas that could not renew theirs would be gone.
FULL_SECONDS = 9.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of three megabytes at the place of the store's folder."""
    if os.geteuid() != 0 and "CI" not in os.environ:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "state" / "store"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _submit(system: System, tmp_path: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    page = tmp_path / "page.png"
    page.write_bytes(sample_pages()[0].png)
    return system.tidegate(
        "submit", "segment", str(page), "--out", str(tmp_path), "--timeout", str(seconds), check=False
    )


def test_inference_survives_a_full_disk_and_jobs_are_refused_in_words(small_disk: Path, tmp_path: Path) -> None:
    """Calls go on; submitting says why it cannot be; with room again everything works, nothing was restarted."""
    with running_system(tmp_path, pool={"scaling": {"min_replicas": 1, "max_replicas": 1}}) as system:
        system.wait_for_ready()
        before = system.replica_pids()
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        # The last page of the store's own file may have room for a job that then cannot be finished: not yet refused.
        words = system.wait_until(
            lambda it: "MISCONF" in (said := (tried := _submit(it, tmp_path, 3)).stdout + tried.stderr) and said,
            60,
            "a refused submission",
        )
        assert "Traceback" not in words, words
        until = time.monotonic() + FULL_SECONDS
        while time.monotonic() < until:
            infer_http(system.http_address, timeout=10)
            infer_grpc(system.grpc_address, timeout=10)
        assert system.replica_pids() == before
        filler.unlink()
        system.wait_until(lambda it: _submit(it, tmp_path, 60).returncode == 0, 90, "a job that is done")
        assert system.replica_pids() == before
