"""Instances of the gateway come and go under callers: replaced by new settings, and killed."""

import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.calls import infer_grpc, infer_http
from tests.e2e.system import System, running_system

CALLERS = 6
#: Long enough for a gRPC channel to connect again, too short for that to be another instance.
RECOVERED_SECONDS = 3.0


class Callers:
    """Threads that call all the time, each with a connection per call or kept, HTTP and gRPC."""

    def __init__(self, system: System) -> None:
        self.outcomes: Counter[str] = Counter()
        self.last_failure: float | None = None
        self._system = system
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run(self, call: Any, address: str) -> None:
        while not self._stop.is_set():
            try:
                call(address, timeout=30)
                outcome = "ok"
            except Exception as error:  # noqa: BLE001 (whatever it is, it is counted)
                outcome = f"{type(error).__name__}: {error}"[:200]
                self.last_failure = time.monotonic()
            with self._lock:
                self.outcomes[outcome] += 1

    @contextmanager
    def calling(self, call: Any = None) -> Iterator[None]:
        """Inference over both protocols all the time; or ``call`` over HTTP, every few milliseconds."""
        doors = [(infer_http, self._system.http_address), (infer_grpc, self._system.grpc_address)]
        if call is not None:
            doors = [(_now_and_then(call), self._system.http_address)] * 2
        threads = [threading.Thread(target=self.run, args=doors[number % 2]) for number in range(CALLERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    @property
    def failures(self) -> list[str]:
        return [outcome for outcome in self.outcomes if outcome != "ok"]


def _now_and_then(call: Any) -> Any:
    def one(address: str, timeout: float) -> None:
        time.sleep(0.02)
        call(address, timeout)

    return one


def instances(system: System) -> set[str]:
    """Those that take connections."""
    return {row["instance"] for row in system.status()["gateways"] if not row["draining"]}


def test_a_reload_and_a_killed_instance(tmp_path: Path) -> None:
    """New settings replace both instances and nobody notices; a SIGKILL costs what was in flight there and no more."""
    settings = {"gateway": {"instances": 2, "drain_limit_seconds": 10.0}}
    with running_system(tmp_path, settings=settings, pool={"scaling": {"min_replicas": 1}}) as system:
        system.wait_for_ready()
        before = instances(system)
        assert len(before) == 2
        document = yaml.safe_load(system.config.read_text())
        document["gateway"]["body_stall_seconds"] = 9.0
        reloaded = Callers(system)
        with reloaded.calling():
            time.sleep(1)
            system.config.write_text(yaml.safe_dump(document | {"gateway": {**document["gateway"], "http_port": 0}}))
            refused = system.tidegate("reload", check=False)
            assert refused.returncode == 2
            assert "http_port" in refused.stderr
            system.config.write_text(yaml.safe_dump(document))
            assert "event=reloaded" in system.tidegate("reload").stdout
            time.sleep(1)
        assert not reloaded.failures, reloaded.outcomes
        assert reloaded.outcomes["ok"] > 20
        after = instances(system)
        assert len(after) == 2
        assert not after & before
        assert "event=reload-unneeded" in system.tidegate("reload").stdout
        _kill_one(system, after)


def _kill_one(system: System, before: set[str]) -> None:
    killed = Callers(system)
    with killed.calling():
        time.sleep(0.5)
        killed_at = time.monotonic()
        os.kill(instance_pids(system)[0], signal.SIGKILL)
        system.wait_until(lambda it: len(now := instances(it)) == 2 and now != before, 60, "another instance")
        time.sleep(0.5)
    # What was under way there is lost. A gRPC channel that connects anew while the kernel still takes the dead process
    # apart waits a second before it tries again, and meanwhile refuses every call by itself. Then all is well.
    assert killed.last_failure is None or killed.last_failure - killed_at < RECOVERED_SECONDS, killed.outcomes
    assert killed.outcomes["ok"] > 20


def instance_pids(system: System) -> list[int]:
    """Processes of gateway instances."""
    found = []
    for process in system.processes():
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        if b"ServeReplica:tidegate" in command:
            found.append(process.pid)
    return found


def test_a_lone_instance_is_replaced_without_a_moment_in_which_nobody_listens(tmp_path: Path) -> None:
    """Every connection that is opened from before the reload until after it gets its answer."""
    with running_system(tmp_path, settings={"gateway": {"instances": 1, "drain_limit_seconds": 5.0}}) as system:
        before = instances(system)
        document = yaml.safe_load(system.config.read_text())
        document["gateway"]["body_stall_seconds"] = 9.0
        system.config.write_text(yaml.safe_dump(document))
        asked = Callers(system)
        with asked.calling(lambda address, timeout: urllib.request.urlopen(f"http://{address}/v2/health/live").close()):
            assert "event=reloaded" in system.tidegate("reload").stdout
            time.sleep(1)
        assert not asked.failures, asked.outcomes
        assert asked.outcomes["ok"] > 100
        after = instances(system)
        assert len(after) == 1
        assert not after & before
