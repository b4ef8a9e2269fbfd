"""What every backend of the autoscaler keeps, and what the local one keeps besides. Real processes, no store."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from autoscaler.backends.base import BackendError, ScalerBackend
from autoscaler.backends.local import LocalBackend
from autoscaler.backends.processes import find_replicas
from tests.stub_autoscaler import stub_command

MakeLocal = Callable[..., LocalBackend]


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[MakeLocal]:
    """Makes local backends of one installation; whatever they started is gone at the end."""
    made: list[tuple[tuple[str, ...], LocalBackend]] = []
    config = tmp_path / "tidegate.yaml"

    def make(*, lifeline_fd: int | None = None, **stub: float | str) -> LocalBackend:
        command = stub_command(0, **stub)  # type: ignore[arg-type]
        backend = LocalBackend(config=config, run_dir=tmp_path, lifeline_fd=lifeline_fd, command=command)
        made.append((command, backend))
        return backend

    yield make
    for command, backend in made:
        for process in find_replicas(command, config):
            os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda backend=backend: _none(backend))


@pytest.fixture
def backend(local: MakeLocal) -> ScalerBackend:
    return local(drain=0.3)


async def eventually(condition: Callable[[], object], limit: float = 10.0) -> None:
    async with asyncio.timeout(limit):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.02)


async def all_up(run_dir: Path) -> None:
    """Every replica started so far would drain on a signal."""
    logs = list((run_dir / "logs").iterdir())
    await eventually(lambda: all("up" in log.read_text() for log in logs), limit=30)


async def ids(backend: ScalerBackend, pool: str = "vision") -> list[str]:
    return [replica.id for replica in await backend.running(pool)]


class TestContract:
    async def test_nothing_runs_at_first(self, backend: ScalerBackend) -> None:
        assert await backend.running("vision") == []

    async def test_what_was_started_runs_at_once_in_its_pool_only(self, backend: ScalerBackend) -> None:
        first = await backend.start("vision")
        second = await backend.start("vision")
        other = await backend.start("text")
        assert len({first, second, other}) == 3
        assert set(await ids(backend)) == {first, second}
        assert await ids(backend, "text") == [other]
        assert await backend.ending(first) is None

    async def test_stop_returns_at_once_and_the_replica_drains(self, backend: ScalerBackend, tmp_path: Path) -> None:
        replica_id = await backend.start("vision")
        await all_up(tmp_path)
        await backend.stop(replica_id)
        (leaving,) = await backend.running("vision")
        assert leaving.stopping
        await backend.stop(replica_id)
        await eventually(lambda: _none(backend))
        assert await backend.ending(replica_id) == "exit status 0: up", "told twice, forced never"

    async def test_stopping_what_is_gone_does_nothing(self, backend: ScalerBackend) -> None:
        await backend.stop("vision-never")
        assert await backend.ending("vision-never") is None

    async def test_another_backend_of_the_installation_sees_the_same(
        self, local: MakeLocal, backend: ScalerBackend, tmp_path: Path
    ) -> None:
        replica_id = await backend.start("vision")
        successor = local(drain=0.3)
        await eventually(lambda: _runs(successor, replica_id))
        await all_up(tmp_path)
        await successor.stop(replica_id)
        await eventually(lambda: _none(successor))


async def _none(backend: ScalerBackend) -> bool:
    return await backend.running("vision") == await backend.running("text") == []


async def _runs(backend: ScalerBackend, replica_id: str) -> bool:
    return await ids(backend) == [replica_id]


class TestLocal:
    async def test_a_failed_start_says_why(self, local: MakeLocal) -> None:
        backend = local(how="fails")
        replica_id = await backend.start("vision")
        await eventually(lambda: _none(backend))
        assert await backend.ending(replica_id) == "exit status 3: no such model: segmenter"

    async def test_no_program_is_a_clear_error(self, tmp_path: Path) -> None:
        backend = LocalBackend(config=tmp_path / "c", run_dir=tmp_path, command=("/nowhere/python", "-m", "x"))
        with pytest.raises(BackendError, match="could not be started: No such file"):
            await backend.start("vision")

    async def test_others_are_never_taken_for_ours(self, local: MakeLocal, tmp_path: Path) -> None:
        """Another installation's replica, the same words in a shell, one that leads no session, and a zombie."""
        backend = local()
        config = str(tmp_path / "tidegate.yaml")
        command = [*stub_command(0), "--pool", "vision", "--id", "x"]
        others = [
            subprocess.Popen([*command, "--config", config + ".other"], start_new_session=True),
            subprocess.Popen([*command, "--config", config]),
            subprocess.Popen([*command, "--config", config, "--attach", "x"], start_new_session=True),
            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(60)", *command[1:], "--config", config],
                start_new_session=True,
            ),
        ]
        dead = subprocess.Popen([*command, "--config", config], start_new_session=True)
        dead.kill()
        try:
            await eventually(lambda: _none(backend))
            assert await backend.stop_all(limit_seconds=1) == []
            assert all(other.poll() is None for other in others)
        finally:
            for other in others:
                other.kill()
                other.wait()
            dead.wait()

    async def test_each_leads_its_session_and_leaves_no_zombie(self, local: MakeLocal, tmp_path: Path) -> None:
        backend = local()
        await backend.start("vision")
        (process,) = find_replicas(stub_command(0), tmp_path / "tidegate.yaml")
        assert os.getsid(process.pid) == process.pid
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: _none(backend))
        assert not Path(f"/proc/{process.pid}").exists()
        assert await backend.ending(process.id) == "killed by signal 9"

    async def test_the_lifeline_drains_them(self, local: MakeLocal, tmp_path: Path) -> None:
        read, write = os.pipe()
        backend = local(lifeline_fd=read)
        await backend.start("vision")
        os.close(read)
        await all_up(tmp_path)
        assert not await _none(backend)
        os.close(write)
        await eventually(lambda: _none(backend))

    async def test_stop_all_drains_every_pool_and_tells_who_stays(self, local: MakeLocal, tmp_path: Path) -> None:
        backend = local(drain=1.5)
        slow = [await backend.start("vision"), await backend.start("text")]
        await all_up(tmp_path)
        assert set(await backend.stop_all(limit_seconds=0.2)) == set(slow)
        assert await backend.stop_all(limit_seconds=10) == []
        assert {await backend.ending(replica_id) for replica_id in slow} == {"exit status 0: up"}

    async def test_those_that_drain_already_are_not_forced(self, local: MakeLocal, tmp_path: Path) -> None:
        first = local(drain=1.0)
        replica_id = await first.start("vision")
        await all_up(tmp_path)
        await first.stop(replica_id)
        assert await local(drain=1.0).stop_all(limit_seconds=10, draining=[replica_id]) == []
        await eventually(lambda: _none(first))
        assert await first.ending(replica_id) == "exit status 0: up"

    async def test_the_interpreter_may_have_another_name(self, local: MakeLocal, tmp_path: Path) -> None:
        await local().start("vision")
        alias = (tmp_path / "other-python", *stub_command(0)[1:])
        assert len(find_replicas([str(word) for word in alias], tmp_path / "tidegate.yaml")) == 1
        assert sys.executable != str(alias[0])

    async def test_old_logs_are_few(self, local: MakeLocal, tmp_path: Path) -> None:
        for number in range(30):
            (tmp_path / "logs").mkdir(exist_ok=True)
            (tmp_path / "logs" / f"replica-vision-{number:08x}.log").write_text("gone")
        await local().start("vision")
        assert len(list((tmp_path / "logs").iterdir())) == 21
