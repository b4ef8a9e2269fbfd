"""The supervisor as a whole, with the real store and autoscaler and a stub in the place of the gateway."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import ROOT, System, free_ports, prepare
from tidegate.supervisor.processes import end_all, processes_of
from tidegate.supervisor.record import read_record


class Supervisor:
    """A supervisor process and what it tells."""

    def __init__(self, system: System) -> None:
        self.system = system
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "tests.stub_system", str(system.config), str(writing)]
        self.process = subprocess.Popen(command, pass_fds=(writing,), cwd=ROOT)
        os.close(writing)
        self._events = os.fdopen(reading)
        self.told: list[dict[str, Any]] = []

    def until(self, word: str) -> dict[str, Any]:
        """The first event of this kind; the others are kept."""
        for line in self._events:
            self.told.append(json.loads(line))
            if word in self.told[-1]:
                return self.told[-1]
        raise AssertionError(f"never said {word}: {self.told}; {self.system.last_words()}")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._events.close()
        end_all(processes_of(self.system.config), polite_seconds=5)


@contextmanager
def supervised(system: System) -> Iterator[Supervisor]:
    supervisor = Supervisor(system)
    try:
        yield supervisor
    finally:
        supervisor.close()


def small(folder: Path, **sections: dict[str, Any]) -> System:
    return prepare(folder, settings={"workers": {"processes": 0}, **sections})


def test_up_restarts_what_dies_and_down_leaves_nothing(tmp_path: Path) -> None:
    system = small(tmp_path)
    with supervised(system) as supervisor:
        ready = supervisor.until("ready")
        assert ready["ready"]["http"] == system.http_url
        assert any("the gateway (0 of 1" in str(event) for event in supervisor.told)
        assert system.status()["pools"][0]["target"] == 0

        (gateway,) = system.pids("gateway")
        os.kill(gateway, signal.SIGKILL)
        system.wait_until(lambda it: it.pids("gateway") not in ([], [gateway]), 10, "the gateway again")
        row = next(row for row in system.status()["processes"] if row["name"] == "gateway")
        assert (row["restarts"], row["last_exit"]) == (1, "killed by SIGKILL")
        assert row["memory_bytes"] > 1 << 20
        assert "gateway ended (killed by SIGKILL)" in (system.state_dir / "logs/supervisor.log").read_text()

        refused = system.tidegate("up", "--detach", check=False)
        assert refused.returncode == 1
        assert "runs in" in refused.stderr and f"already (pid {supervisor.process.pid})" in refused.stderr
        assert f"tidegate down --config {system.config}, or" in refused.stderr

        ray_dir = Path((read_record(system.state_dir) or {})["ray_dir"])
        assert ray_dir.is_dir() and len(str(ray_dir)) < 40
        down = system.tidegate("down")
        stages = [line for line in down.stdout.splitlines() if line.startswith("draining")]
        # The store may leave faster than down looks.
        assert [words.split()[2] for words in stages][:2] == ["gateway", "autoscaler"]
        assert supervisor.process.wait(5) == 0
        assert not system.processes() and not ray_dir.exists()
        assert not (system.state_dir / "up.json").exists()
        assert "nothing runs" in system.tidegate("down").stdout


def test_nothing_outlives_a_killed_supervisor_and_the_next_start_is_clean(tmp_path: Path) -> None:
    system = small(tmp_path)
    with supervised(system) as supervisor:
        supervisor.until("ready")
        ray_dir = Path((read_record(system.state_dir) or {})["ray_dir"])
        supervisor.process.kill()
        system.wait_until(lambda it: not it.processes(), 10, "no process of a killed supervisor")
    with supervised(system) as supervisor:
        supervisor.until("ready")
        assert not ray_dir.exists()
        supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.process.wait(20) == 0
    assert not system.processes()


def test_a_stop_during_the_start_is_a_drain_too(tmp_path: Path) -> None:
    system = small(tmp_path)
    with supervised(system) as supervisor:
        supervisor.until("waiting")
        supervisor.process.send_signal(signal.SIGINT)
        assert supervisor.process.wait(20) == 0
        assert not system.processes()


def test_all_taken_ports_are_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ports taken: one sentence names both, no process was started, and nothing stays in the folder for such."""
    system = small(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    gateway = system.settings["gateway"]
    with (
        socket.create_server(("127.0.0.1", gateway["http_port"])),
        socket.create_server(("127.0.0.1", system.settings["store"]["embedded_port"])),
    ):
        refused = system.tidegate("up", "--detach", check=False)
    assert refused.returncode == 1
    (sentence,) = refused.stderr.splitlines()
    assert "(gateway.http_port) is taken" in sentence and "(store.embedded_port) is taken" in sentence
    assert not (system.state_dir / "logs" / "store.log").exists()
    assert not list((tmp_path / "tmp").glob("tg-*"))


def test_a_store_that_hangs_is_given_up_soon(tmp_path: Path) -> None:
    """It accepts and says nothing: told with the limit, and nobody is drained at length."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        system = small(tmp_path, store={"url": url, "timeout_seconds": 1.0})
        began = time.monotonic()
        refused = system.tidegate("up", "--detach", check=False)
    assert time.monotonic() - began < 8
    assert (refused.returncode, refused.stderr) == (1, "the store does not answer within 1 s\n")
    assert not (system.state_dir / "logs" / "gateway.log").exists()


def test_a_model_file_that_is_missing_is_told_at_the_start_and_to_who_waits(tmp_path: Path) -> None:
    """The system runs: other pools may be well. What is submitted ends with that reason, not only with "in time"."""
    system = small(tmp_path)
    pool = system.config.parent / "deployments/vision"
    shipped = (pool / "models").resolve()
    (pool / "sources.yaml").unlink()
    (pool / "models").unlink()
    (pool / "models/reader").mkdir(parents=True)
    (pool / "models/reader/config.pbtxt").write_text((shipped / "reader/config.pbtxt").read_text())
    for name in ("segmenter", "classifier"):
        (pool / "models" / name).symlink_to(shipped / name)
    with supervised(system) as supervisor:
        supervisor.until("ready")
        (warning,) = [event["warning"] for event in supervisor.told if "warning" in event]
        assert warning.startswith("pool vision cannot start a replica: the model file of 'reader' is missing")
        page = ROOT / "README.md"
        done = system.tidegate("submit", "segcls", str(page), "--timeout", "4", "--out", str(tmp_path), check=False)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"{page}: no outcome in time (pool vision")
        assert "the model file of 'reader' is missing" in last


def test_the_store_of_another_system_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """Same port, that system runs and ours does not: one sentence names whose it is."""
    running = small(tmp_path / "one")
    down = small(tmp_path / "two", store={"embedded_port": running.settings["store"]["embedded_port"]})
    with supervised(running) as supervisor:
        supervisor.until("ready")
        assert running.status()["pools"]
        for command in (["status"], ["why", "vision"], ["submit", "segcls", str(ROOT / "README.md")]):
            done = down.tidegate(*command, check=False)
            assert done.returncode == 2
            assert f"the system of {down.config} does not run" in done.stderr
            assert str(running.config) in done.stderr


def test_a_store_that_does_not_answer_is_told_within_its_timeout(tmp_path: Path) -> None:
    """The password of its URL is not."""
    (port,) = free_ports(1)
    system = small(tmp_path, store={"url": f"redis://:hunter2@127.0.0.1:{port}/0", "timeout_seconds": 1.0})
    began = time.monotonic()
    refused = system.tidegate("up", "--detach", check=False)
    assert time.monotonic() - began < 10
    assert refused.returncode == 1
    assert "the store does not answer" in refused.stderr
    assert "hunter2" not in refused.stdout + refused.stderr + system.last_words()
    for command in (["status"], ["why", "vision"], ["submit", "segcls", str(ROOT / "README.md")]):
        done = system.tidegate(*command, check=False)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "the store does not answer" in done.stderr


def test_a_child_that_cannot_start_fails_the_start_with_its_last_words(tmp_path: Path) -> None:
    """A queue whose handler does not exist: its worker says so and ends."""
    system = prepare(tmp_path, settings={"queues": {"scan": {"handler": "no_such_module:handle", "pools": ["vision"]}}})
    with supervised(system) as supervisor:
        failed = supervisor.until("failed")["failed"]
        assert failed.startswith("worker-1 does not start") and "no_such_module" in failed
        assert supervisor.process.wait(20) == 1
        assert not system.processes()


def test_a_model_file_that_cannot_be_laid_out_is_told(tmp_path: Path) -> None:
    system = small(tmp_path)
    sources = system.config.parent / "deployments/vision/sources.yaml"
    sources.unlink()
    sources.write_text("models: {reader: {package: no_such_package, wheel: no-such-wheel, file: a.onnx}}")
    refused = system.tidegate("up", "--detach", check=False)
    assert refused.returncode == 1
    assert "pip install --no-deps no-such-wheel" in refused.stderr
