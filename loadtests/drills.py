"""``make drills``: instances and replicas come and go under 64 callers, and every failed call is counted and explained.

Three phases on one running system (two gateway instances, two replicas): the gateway takes over new settings, instances
are killed with SIGKILL, replicas are told to drain. A caller keeps his connection and has one call at a time, half over
HTTP and half over gRPC, and none of them tries again. A failure is explained when the call was under way at the moment
of a kill (that work is lost with its process), or connected anew in the quarter of a second in which the kernel takes
the killed process apart (no gateway can do anything about that). Everything else had a choice, and may not fail.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import grpc
import yaml
from rich.console import Console

from loadtests import report
from loadtests.report import Outcome, at_least, at_most
from loadtests.system import System, machine, running_system
from loadtests.work import DEPLOYMENTS, Work, grpc_echo, http_echo

_CALLERS = 64
_KILLS = 20
_DRAINS = 20
_CALL_SECONDS = 30.0
#: Before and after each phase, and between its steps. Seconds.
_QUIET_SECONDS = 1.0
#: A killed process' calls fail within this time. Seconds.
_DEATH_SECONDS = 1.0
#: The kernel takes a killed process apart, its listening sockets among the rest, within this time. Seconds.
_DYING_SECONDS = 0.25
#: Longest wait for what was killed or drained to be replaced. Seconds.
_REPLACED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Failure:
    """One call that failed: when it began and ended (``time.monotonic()``), and what the client said."""

    began: float
    ended: float
    words: str


@dataclass
class Phase:
    """What the callers saw while one kind of thing was done."""

    name: str
    calls: int = 0
    failures: list[Failure] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    longest_seconds: float = 0.0
    steps_seconds: list[float] = field(default_factory=list)

    def lost_at_a_kill(self) -> int:
        """Calls that were under way when their instance was killed."""
        return sum(any(one.began <= kill <= one.ended for kill in self._soon_before(one)) for one in self.failures)

    def met_a_dying_listener(self) -> int:
        """Calls that began at once after a kill, to connect anew, while the kernel closed the dead one's sockets."""
        return sum(
            any(kill < one.began < kill + _DYING_SECONDS for kill in self._soon_before(one)) for one in self.failures
        )

    @property
    def others(self) -> int:
        return len(self.failures) - self.lost_at_a_kill() - self.met_a_dying_listener()

    def _soon_before(self, failure: Failure) -> list[float]:
        return [kill for kill in self.kills if kill <= failure.ended <= kill + _DEATH_SECONDS]


class Callers:
    """64 callers that never stop; what they see goes to the phase of the moment."""

    def __init__(self, system: System) -> None:
        self.phase = Phase("warm-up")
        self._system = system

    async def http(self) -> None:
        work = http_echo(16)
        url, timeout = f"http://{self._system.http}{work.path}", aiohttp.ClientTimeout(total=_CALL_SECONDS)
        async with aiohttp.ClientSession(headers=dict(work.headers), timeout=timeout) as session:

            async def call() -> None:
                async with session.post(url, data=work.bodies[0]) as answer:
                    content = await answer.read()
                    if answer.status != 200:
                        raise RuntimeError(f"{answer.status} {content[:200].decode('utf-8', 'replace')}")

            await self._forever(call)

    async def grpc(self) -> None:
        work: Work = grpc_echo(16)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(self._system.grpc, options=options) as channel:
            method = channel.unary_unary(work.path)

            async def call() -> None:
                await method(work.bodies[0], timeout=_CALL_SECONDS, wait_for_ready=True)

            await self._forever(call)

    async def _forever(self, call: Callable[[], Awaitable[None]]) -> None:
        while True:
            began = time.monotonic()
            try:
                await call()
            except (aiohttp.ClientError, TimeoutError, RuntimeError, grpc.aio.AioRpcError) as error:
                self.phase.failures.append(Failure(began, time.monotonic(), _words(error)))
            self.phase.calls += 1
            self.phase.longest_seconds = max(self.phase.longest_seconds, time.monotonic() - began)


def _words(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"[:160]
    return f"{type(error).__name__}: {error}"[:160]


async def _drill(system: System) -> list[Phase]:
    callers = Callers(system)
    tasks = [asyncio.create_task(callers.http() if number % 2 else callers.grpc()) for number in range(_CALLERS)]
    phases = []
    try:
        await asyncio.sleep(_QUIET_SECONDS)
        for name, act in (("rolling update", _update), ("instance kills", _kill), ("replica drains", _drain)):
            callers.phase = Phase(name)
            phases.append(callers.phase)
            await act(system, callers.phase)
            await asyncio.sleep(_QUIET_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    broken = [end for end in ends if isinstance(end, Exception)]
    if broken:
        raise broken[0]
    return phases


async def _update(system: System, phase: Phase) -> None:
    """Replace every instance by one with other settings."""
    document = yaml.safe_load(system.config.read_text())
    document["gateway"]["idle_client_seconds"] = 74.0
    system.config.write_text(yaml.safe_dump(document))
    began = time.monotonic()
    command = [sys.executable, "-m", "tidegate", "reload", "--config", str(system.config)]
    await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
    phase.steps_seconds.append(time.monotonic() - began)


async def _kill(system: System, phase: Phase) -> None:
    for number in range(_KILLS):
        before = await _instances(system, lambda found: len(found) == 2)
        began = time.monotonic()
        pids = (await asyncio.to_thread(system.gateway)).pids
        phase.kills.append(time.monotonic())
        os.kill(pids[number % len(pids)], signal.SIGKILL)
        await _instances(system, lambda found, before=before: len(found) == 2 and found != before)  # type: ignore[misc]
        phase.steps_seconds.append(time.monotonic() - began)
        await asyncio.sleep(_QUIET_SECONDS)


async def _instances(system: System, fits: Callable[[set[str]], bool]) -> set[str]:
    def found() -> set[str]:
        return {row["instance"] for row in system.status()["gateways"] if not row["draining"]}

    return await _until(found, fits)


async def _drain(system: System, phase: Phase) -> None:
    def ready() -> set[str]:
        return {
            lease["id"] for pool in system.status()["pools"] for lease in pool["replicas"] if lease["state"] == "ready"
        }

    for _ in range(_DRAINS):
        before = await _until(ready, lambda found: len(found) >= 2)
        began = time.monotonic()
        victim = sorted(before)[0]
        (pid,) = [row["pid"] for row in (await asyncio.to_thread(system.status))["processes"] if row["name"] == victim]
        os.kill(pid, signal.SIGTERM)
        await _until(ready, lambda found, victim=victim: len(found) >= 2 and victim not in found)  # type: ignore[misc]
        phase.steps_seconds.append(time.monotonic() - began)


async def _until(look: Callable[[], set[str]], fits: Callable[[set[str]], bool]) -> set[str]:
    """Raises TimeoutError."""
    async with asyncio.timeout(_REPLACED_SECONDS):
        while not fits(found := await asyncio.to_thread(look)):  # noqa: ASYNC110 (it happens in other processes)
            await asyncio.sleep(0.2)
    return found


def _outcome(phases: list[Phase]) -> Outcome:
    outcome = Outcome("drills")
    for phase in phases:
        outcome.target(f"{phase.name}: calls", [phase.calls], "calls", at_least(1000))
        outcome.figure(f"{phase.name}: seconds a step", phase.steps_seconds, "s")
        outcome.figure(f"{phase.name}: longest call", [phase.longest_seconds], "s")
        if phase.kills:
            # Each caller has one call at a time.
            limit = at_most(_CALLERS * len(phase.kills))
            outcome.target(f"{phase.name}: under way at a kill", [phase.lost_at_a_kill()], "calls", limit)
            outcome.figure(f"{phase.name}: met a dying listener", [phase.met_a_dying_listener()], "calls")
        outcome.target(f"{phase.name}: calls that failed otherwise", [phase.others], "calls", at_most(0))
    return outcome


def main() -> int:
    """Exit code 1 when a call failed that had a choice."""
    console = Console(width=140)
    console.print(f"drills: {machine()}")
    pool = {"scaling": {"min_replicas": 2, "max_replicas": 3}}
    with tempfile.TemporaryDirectory(prefix="tidegate-drills-") as folder:
        deployments = Path(folder) / "deployments"
        (deployments / "bench").mkdir(parents=True)
        (deployments / "bench" / "models").symlink_to((DEPLOYMENTS / "bench" / "models").resolve())
        document = yaml.safe_load((DEPLOYMENTS / "bench" / "pool.yaml").read_text())
        (deployments / "bench" / "pool.yaml").write_text(yaml.safe_dump(document | pool))
        ports = {"instances": 2}
        with running_system(Path(folder), deployments, workers={"processes": 0}, queues={}, gateway=ports) as system:
            system.replicas(2)
            phases = asyncio.run(_drill(system))
    outcome = _outcome(phases)
    report.show(outcome, console)
    for phase in phases:
        for words, count in Counter(failure.words for failure in phase.failures).most_common():
            console.print(f"{phase.name}: {count} x {words}")
    console.print(f"written to {report.write_alone(outcome, Path('reports'))}")
    return 0 if all(row.met is not False for row in outcome.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
