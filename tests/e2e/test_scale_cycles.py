"""300 jobs and 300 direct calls while the pool goes 0 -> 2 -> 0 twice: none fails, none is lost."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stores.job_stream import JobStream
from tests.e2e.calls import infer_grpc, infer_http
from tests.e2e.system import System, running_system
from wire.jobs import Job, Outcome, OutcomeStatus
from workers.sample_pages import sample_pages

JOBS = CALLS = 150  # in each of two cycles


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(
        tmp_path_factory.mktemp("cycles"),
        pool={"scaling": {"scale_to_zero_delay_seconds": 3, "scale_down_delay_seconds": 2}},
    ) as running:
        yield running


def _jobs(system: System) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with system.store() as store:
            stream = JobStream(store, "segment")
            page = sample_pages()[0].png
            ids = [await stream.submit(Job("segment", page)) for _ in range(JOBS)]
            outcomes = await stream.wait(ids, 400)
            return [outcomes[job_id] for job_id in ids if job_id in outcomes]

    return asyncio.run(run())


def _calls(system: System) -> int:
    with ThreadPoolExecutor(8) as pool:
        http = [pool.submit(infer_http, system.http_address) for _ in range(CALLS // 2)]
        rpc = [pool.submit(infer_grpc, system.grpc_address) for _ in range(CALLS // 2)]
        return sum(call.result().shape == (1, 2) for call in http + rpc)


@pytest.mark.timeout(900)
def test_two_cycles_lose_nothing(system: System) -> None:
    """Acceptance of the main job; A-036, A-044 in small."""
    for _ in range(2):
        system.wait_for_zero()
        with ThreadPoolExecutor(2) as pool:
            jobs = pool.submit(_jobs, system)
            calls = pool.submit(_calls, system)
            system.wait_for_ready(2, 120)
            outcomes = jobs.result()
            assert calls.result() == CALLS
        assert len(outcomes) == JOBS
        assert {outcome.status for outcome in outcomes} == {OutcomeStatus.SUCCEEDED}
    system.wait_for_zero()
    status = system.status()
    assert not system.triton_pids()
    for queue in status["queues"]:
        assert (queue["lag"], queue["pending"]) == (0, 0)
