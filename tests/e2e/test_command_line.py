"""The command line on a running system, and what becomes of it when its supervisor is told to stop or is killed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from replicas.leftovers import marked_files
from tests.e2e.system import ROOT, System, prepare, running_system
from tidegate.demo.pages import write_pages
from workers.sample_pages import sample_pages

POOL = {"scaling": {"scale_to_zero_delay_seconds": 5, "scale_down_delay_seconds": 3}}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("command-line"), pool=POOL) as running:
        yield running


def test_submit_reads_every_line_and_writes_results_next_to_pictures(system: System, tmp_path: Path) -> None:
    """From zero: the wake-up is shown, the text is what was drawn, upside-down lines included."""
    files, known = write_pages(tmp_path / "pages", tmp_path / "no-samples")
    out = tmp_path / "out"
    done = system.tidegate("submit", "segcls", *map(str, files), "--out", str(out))
    assert "pool vision wakes up" in done.stderr or "works on" in done.stderr
    for page in sample_pages():
        stem = Path(page.name).stem
        document = json.loads((out / f"{stem}.json").read_text())
        regions = document["outcome"]["result"]["regions"]
        drawn = [(line.text, line.orientation) for line in known[page.name].lines]
        assert [(region["text"], region["orientation"]) for region in regions] == drawn
        with (
            Image.open(out / f"{stem}.annotated.png") as picture,
            Image.open(tmp_path / "pages" / page.name) as original,
        ):
            assert picture.size == original.size
            assert picture.convert("RGB").tobytes() != original.convert("RGB").tobytes()


def test_json_output_is_one_document(system: System, tmp_path: Path) -> None:
    files, _ = write_pages(tmp_path / "pages", tmp_path / "no-samples")
    done = system.tidegate("submit", "segment", str(files[0]), "--out", str(tmp_path), "--json")
    (row,) = json.loads(done.stdout)
    assert row["outcome"]["status"] == "succeeded"
    assert row["outcome"]["result"]["regions"]


def test_a_job_that_fails_is_told_with_its_reason_and_the_others_are_done(system: System, tmp_path: Path) -> None:
    """A broken image: one sentence, exit code 1; the page beside it is worked on."""
    files, _ = write_pages(tmp_path / "pages", tmp_path / "no-samples")
    broken = tmp_path / "broken.png"
    broken.write_bytes(files[0].read_bytes()[:2000])
    done = system.tidegate("submit", "segment", str(broken), str(files[0]), "--out", str(tmp_path), check=False)
    assert done.returncode == 1
    assert f"{broken}: the image is broken" in done.stderr
    assert json.loads((tmp_path / "upright.json").read_text())["outcome"]["status"] == "succeeded"
    assert json.loads((tmp_path / "broken.json").read_text())["outcome"]["error_kind"] == "bad_input"


def test_what_cannot_be_submitted_is_refused_with_one_sentence(system: System, tmp_path: Path) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    for queue, file, words in (
        ("segcls", "empty.png", "the file is empty"),
        ("segcls", "missing.png", "no such file"),
        ("nowhere", "empty.png", "there is no queue nowhere; known: segcls, segment"),
    ):
        done = system.tidegate("submit", queue, str(tmp_path / file), check=False)
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert {queue["backlog"] for queue in system.status()["queues"]} == {0}


def test_status_and_why_say_what_is_and_why(system: System, tmp_path: Path) -> None:
    files, _ = write_pages(tmp_path / "pages", tmp_path / "no-samples")
    system.tidegate("submit", "segment", str(files[0]), "--out", str(tmp_path))
    shown = system.tidegate("status").stdout
    for words in ("pool vision", "target 1", "last decision: 1", "segcls", "gateway", "supervisor", "worker-1"):
        assert words in shown
    document = json.loads(system.tidegate("why", "vision", "--json").stdout)
    assert document["latest"]["target"] == 1
    changes = [(record["previous_target"], record["target"]) for record in document["history"]]
    assert (0, 1) in changes
    assert "activation" in system.tidegate("why", "vision", "--last", "20").stdout or any(
        record["reason"] in ("demand", "activation") for record in document["history"]
    )
    unknown = system.tidegate("why", "nowhere", check=False)
    assert (unknown.returncode, unknown.stderr) == (2, "there is no pool nowhere; known: vision\n")


def test_a_replica_in_the_middle_of_its_start_outlives_nothing(tmp_path: Path) -> None:
    """SIGKILL of the supervisor while a replica loads and another process tree (Ray) runs: all gone within seconds."""
    with running_system(tmp_path, pool={"scaling": {"min_replicas": 1}}) as system:
        system.wait_until(lambda it: it.triton_pids(), 30, "a Triton")
        os.kill(system.pids("supervisor")[0], signal.SIGKILL)
        system.wait_until(lambda it: not it.processes() and not it.triton_pids(), 20, "nothing left")
        regions = [path for path, _ in marked_files(system.state_dir / "run", Path("/dev/shm"))]
        system.tidegate("up", "--detach")  # sweeps what is left, and runs
        assert not [path for path in regions if path.exists()]


def test_ctrl_c_drains_and_a_second_one_forces(tmp_path: Path) -> None:
    """A second Ctrl-C while the system drains ends it soon; nothing is left either way."""
    system = prepare(tmp_path, pool={"scaling": {"min_replicas": 1}})
    log = (tmp_path / "up.out").open("wb")
    with log, subprocess.Popen(system.command("up"), stdout=log, stderr=log, cwd=ROOT) as up:
        try:
            system.wait_until(lambda _: b"ready after" in (tmp_path / "up.out").read_bytes(), 90, "the system up")
            system.wait_for_ready(1, 60)
            up.send_signal(signal.SIGINT)
            time.sleep(0.3)
            up.send_signal(signal.SIGINT)
            began = time.monotonic()
            assert up.wait(30) == 0
            assert time.monotonic() - began < 20
        finally:
            if up.poll() is None:
                up.kill()
    said = (tmp_path / "up.out").read_text()
    assert "the gateway finishes its requests" in said
    assert not system.processes()
    assert not system.triton_pids()
