"""Where the data plane's time goes, in microseconds a request: ``python -m loadtests.profile`` prints tables.

The two doors run in a process of their own, without Ray and without a store, in front of one real Triton, under h2load.
CPU time a request comes from ``/proc``, of a run that nobody samples; its shares are py-spy's samples, of a second run.
C code counts for the Python function that calls it; what the event loop itself does (waiting for sockets, receiving)
for the one that runs the loop. py-spy also samples a thread that waits for a processor: where others want it too, what
wakes them (sending) looks longer than it is.
"""

import asyncio
import multiprocessing
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from gateway.at_zero import AtZero
from gateway.ingress.http_door import HttpDoor
from gateway.ingress.rpc_door import GrpcDoor
from gateway.routing.pool import Pool
from gateway.settings import GatewaySettings
from gateway.telemetry import Telemetry
from loadtests.h2load import H2load
from loadtests.lone_triton import lone_triton
from loadtests.measured import Side
from loadtests.processes import user_and_system_seconds
from loadtests.work import DEPLOYMENTS, Work, grpc_echo, grpc_repeat, http_echo
from replicas.server import LaunchedTriton
from wire.membership import ReplicaLease, ReplicaState
from wire.pools import PoolSettings

_MODELS = ("ident", "repeat")
_SETTINGS = PoolSettings.model_validate({"models": [{"name": name} for name in _MODELS]})
_SECONDS = 6.0
_SAMPLES_PER_SECOND = 400
#: Functions with less than this share are summed up as the rest.
_LEAST_SHARE = 0.012


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tidegate-profile-") as name, ExitStack() as stack:
        folder = Path(name)
        models = DEPLOYMENTS / "bench/models"
        triton = stack.enter_context(lone_triton(models, _SETTINGS, run_dir=folder / "replica", name="r1"))
        doors = stack.enter_context(_doors(triton))
        generator = H2load(folder)
        for title, work, connections, streams in (
            ("HTTP, 64 bytes, 64 callers", http_echo(16), 64, 1),
            ("gRPC unary, 64 bytes, 8 connections x 8 streams", grpc_echo(16), 8, 8),
            ("gRPC streams of 100 replies, 4 connections x 2 streams", grpc_repeat(16, 100), 4, 2),
        ):
            _profile(title, work, doors, generator, connections, streams)
    return 0


def _profile(title: str, work: Work, doors: Side, generator: H2load, connections: int, streams: int) -> None:
    def load(seconds: float) -> int:
        return generator.run(work, doors, connections=connections, streams=streams, seconds=seconds).requests

    load(1.0)
    before = user_and_system_seconds(doors.pids[0])
    requests = load(_SECONDS)
    user, system = (
        (now - then) / requests * 1e6 for now, then in zip(user_and_system_seconds(doors.pids[0]), before, strict=True)
    )
    loading = threading.Thread(target=load, args=(_SECONDS + 2.0,))
    loading.start()
    samples = _sampled(doors.pids[0])
    loading.join()
    print(f"\n### {title}\n")
    print(f"{user + system:.0f} us of CPU a request: {user:.0f} in the program, {system:.0f} in the kernel.\n")
    print("| us | share | where |\n|---|---|---|")
    total = sum(samples.values())
    rest = 0.0
    for where, count in samples.most_common():
        if count / total < _LEAST_SHARE:
            rest += count / total
        else:
            print(f"| {count / total * (user + system):.1f} | {count / total:.0%} | {where} |")
    print(f"| {rest * (user + system):.1f} | {rest:.0%} | everything else |", flush=True)


def _sampled(pid: int) -> "Counter[str]":
    """Samples by the function that was running, with its file."""
    with tempfile.NamedTemporaryFile(prefix="tidegate-profile-") as raw:
        program = Path(sys.executable).with_name("py-spy")
        options = ["--rate", str(_SAMPLES_PER_SECOND), "--duration", f"{_SECONDS:.0f}", "--format", "raw"]
        command = [str(program), "record", "--pid", str(pid), *options, "--output", raw.name]
        subprocess.run(command, check=True, capture_output=True)
        samples: Counter[str] = Counter()
        for line in Path(raw.name).read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            samples[stack.rpartition(";")[2].rpartition(":")[0] + ")"] += int(count)
    return samples


@contextmanager
def _doors(triton: LaunchedTriton) -> Iterator[Side]:
    ours, theirs = multiprocessing.Pipe()
    lease = ReplicaLease(
        id="r1",
        pool="bench",
        state=ReplicaState.READY,
        models=_MODELS,
        http_address=triton.addresses.http,
        grpc_address=triton.addresses.grpc,
    )
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, lease))
    process.start()
    theirs.close()
    try:
        http, grpc = ours.recv()
        assert process.pid is not None
        yield Side("doors", f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", (process.pid,))
    finally:
        ours.close()
        process.join()


class _OnePool:
    def __init__(self, pool: Pool) -> None:
        self.pools = {pool.name: pool}

    def pool_of(self, model: str) -> Pool:
        return self.pools["bench"]


def _serve(control: Connection, lease: ReplicaLease) -> None:
    uvloop.run(_serve_until_told(control, lease))


async def _serve_until_told(control: Connection, lease: ReplicaLease) -> None:
    loop = asyncio.get_running_loop()
    pool = Pool("bench", _SETTINGS, clock=loop.time, on_wanted=lambda _: None)
    pool.update([lease])
    router, telemetry = _OnePool(pool), Telemetry("profile")
    http = HttpDoor(router, GatewaySettings(), AtZero(router), telemetry)
    grpc = GrpcDoor(router, GatewaySettings(), AtZero(router), telemetry)
    control.send((await http.start("127.0.0.1", 0, reuse_port=False), await grpc.start("127.0.0.1", 0)))
    told = asyncio.Event()
    loop.add_reader(control.fileno(), told.set)
    await told.wait()
    loop.remove_reader(control.fileno())
    await asyncio.gather(http.drain(0.0), grpc.drain(0.0))


if __name__ == "__main__":
    sys.exit(main())
