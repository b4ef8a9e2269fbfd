"""Processes killed under load: what is lost is told, what can go on goes on, nothing is doubled or left behind."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from stores.job_stream import JobStream
from tests.e2e.calls import infer_grpc, infer_http
from tests.e2e.system import System, running_system
from wire.errors import TidegateError
from wire.jobs import Job, Outcome, OutcomeStatus
from workers.sample_pages import sample_pages

#: What a caller may be told when the replica died with its request on it.
LOST = {"502", "StatusCode.UNAVAILABLE"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(
        tmp_path_factory.mktemp("faults"),
        settings={"workers": {"processes": 2, "concurrency": 4}},
        pool={
            "scaling": {
                "scale_to_zero_delay_seconds": 5,
                # Longer than a busy machine may keep the callers from calling, so that nobody is scaled down meanwhile.
                "scale_down_delay_seconds": 12,
                "target_demand_per_replica": 2,
            }
        },
    ) as running:
        yield running


class Load:
    """Direct calls in the background, half HTTP, half gRPC; ``errors`` holds what callers were told."""

    def __init__(self, system: System, callers: int = 6) -> None:
        self._system = system
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(index,)) for index in range(callers)]
        self.answers = 0
        self.errors: list[InferenceServerException] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)

    def _call(self, index: int) -> None:
        while not self._stop.is_set():
            try:
                if index % 2:
                    infer_http(self._system.http_address)
                else:
                    infer_grpc(self._system.grpc_address)
                self.answers += 1
            except InferenceServerException as error:
                self.errors.append(error)


def _submit_and_wait(system: System, queue: str, payloads: list[bytes], seconds: float) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with system.store() as store:
            stream = JobStream(store, queue)
            ids = [await stream.submit(Job(queue, payload)) for payload in payloads]
            outcomes = await stream.wait(ids, seconds)
            assert outcomes.keys() == set(ids), f"{len(ids) - len(outcomes)} jobs without an outcome"
            return [outcomes[job_id] for job_id in ids]

    return asyncio.run(run())


def _page() -> bytes:
    return sample_pages()[0].png


def test_killed_autoscaler_adopts_its_replicas(system: System) -> None:
    """SIGKILL the autoscaler under load: its successor adopts the replicas, none is doubled, no call fails."""
    with Load(system) as load:
        system.wait_for_ready(2)
        before = set(system.replica_pids())
        (autoscaler,) = system.pids("autoscaler")
        os.kill(autoscaler, signal.SIGKILL)
        system.wait_until(lambda it: it.pids("autoscaler") not in ([], [autoscaler]), 30, "a new autoscaler")
        for _ in range(20):
            assert set(system.replica_pids()) == before
            time.sleep(0.5)
    assert not load.errors
    assert load.answers > 20
    system.wait_for_zero()


@pytest.mark.parametrize("victim", ["agent", "triton"])
def test_killed_replica_is_told_and_replaced(system: System, victim: str) -> None:
    """SIGKILL a replica under load: only what was in flight on it may fail, with a clear word; the pool recovers."""
    with Load(system) as load:
        system.wait_for_ready(2)
        pids = system.replica_pids() if victim == "agent" else system.triton_pids()
        os.kill(pids[0], signal.SIGKILL)
        killed_at = time.monotonic()
        time.sleep(3)
        in_time = len(load.errors)
        system.wait_for_ready(2)
        answers = load.answers
        system.wait_until(lambda _: load.answers > answers + 20, 60, "calls go on")
    assert {error.status() for error in load.errors} <= LOST, load.errors
    assert len(load.errors) == in_time, f"calls failed long after the kill: {load.errors}"
    assert in_time <= 6
    assert time.monotonic() - killed_at < 120
    system.wait_for_zero()


def test_killed_worker_leaves_its_jobs_to_another(system: System) -> None:
    """A-073: SIGKILL a worker in the middle of its jobs: another finishes them, each has one outcome."""
    with ThreadPoolExecutor(1) as pool:
        jobs = pool.submit(_submit_and_wait, system, "segcls", [_page()] * 12, 180)
        system.wait_until(
            lambda it: any(row["pending"] for row in it.status()["queues"] if row["queue"] == "segcls"),
            30,
            "claimed jobs",
        )
        (worker,) = system.pids("worker-1")
        os.kill(worker, signal.SIGKILL)
        outcomes = jobs.result()
    assert {outcome.status for outcome in outcomes} == {OutcomeStatus.SUCCEEDED}
    system.wait_for_zero()


def test_jobs_outlive_a_replica_that_lost_its_stubs(system: System) -> None:
    """The out-of-memory killer takes the Python stubs of a replica with jobs on it: it is replaced, no job fails."""
    with ThreadPoolExecutor(1) as pool:
        jobs = pool.submit(_submit_and_wait, system, "segcls", [_page()] * 12, 180)
        system.wait_for_ready(1)
        stubs, triton = _stubs(system)
        for stub in stubs:
            os.kill(stub, signal.SIGKILL)
        system.wait_until(lambda it: triton not in it.triton_pids(), 30, "the broken replica's end")
        outcomes = jobs.result()
    assert {outcome.status for outcome in outcomes} == {OutcomeStatus.SUCCEEDED}, outcomes
    system.wait_for_zero()


def _stubs(system: System) -> tuple[list[int], int]:
    """The Python stubs of one replica's Triton, and that Triton."""
    triton = system.triton_pids()[0]
    lists = (path.read_text().split() for path in Path(f"/proc/{triton}/task").glob("*/children"))
    return [int(pid) for pids in lists for pid in pids], triton


def test_store_stops_and_starts(system: System) -> None:
    """A-082, A-051: the store goes away under load and comes back: no call fails, jobs are done, all by itself."""
    gateway = system.pids("gateway")
    workers = system.pids("worker-1") + system.pids("worker-2")
    with Load(system, callers=4) as load:
        system.wait_for_ready()
        (store,) = system.pids("store")
        os.kill(store, signal.SIGKILL)
        system.wait_until(lambda _: Path(f"/proc/{store}").exists() is False, 10, "the store's end")
        outcomes = []
        deadline = time.monotonic() + 60
        while not outcomes:
            try:
                outcomes = _submit_and_wait(system, "segment", [_page()] * 4, 60)
            except TidegateError:  # the store is not back yet
                assert time.monotonic() < deadline
                time.sleep(0.5)
    assert {outcome.status for outcome in outcomes} == {OutcomeStatus.SUCCEEDED}
    assert not load.errors
    assert system.pids("gateway") == gateway
    assert system.pids("worker-1") + system.pids("worker-2") == workers
    system.wait_for_zero()
