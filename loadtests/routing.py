"""Routing settings side by side on real Tritons (CPU): throughput, p50 and mean batch of each.

    python -m loadtests.routing depth       one replica: depth factors against no slots at all
    python -m loadtests.routing policies    two replicas: spread against pack

Names of models may follow, to measure these only.

The gateway's HTTP door runs in a process of its own, without Ray and without a store; its pool is told of the
replicas by hand. Models: ``steady`` (an echo that takes 30 ms for a batch of up to 16, whatever its size and
however busy the machine: as a GPU does), ``ident`` of the bench pool (dynamic batching), ``plain`` (the same echo, one
request at a time) and the ``classifier`` of the shipped pool. Results are a table on standard output.
"""

import asyncio
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvloop

from gateway.ingress.http_door import HttpDoor
from gateway.routing.pool import Pool
from gateway.settings import GatewaySettings
from gateway.telemetry import Telemetry
from loadtests.lone_triton import lone_triton
from replicas.layout import lay_out
from replicas.server import LaunchedTriton
from wire.membership import Catalogue, ModelCatalogue, ReplicaLease, ReplicaState
from wire.pools import PoolSettings

_ROOT = Path(__file__).parent.parent
_SHAPES = {"steady": (1, 16), "ident": (1, 16), "plain": (16,), "classifier": (1, 3, 48, 192)}
_INPUTS = {"steady": "INPUT0", "ident": "INPUT0", "plain": "INPUT0", "classifier": "x"}
_ROUNDS = 3
_SECONDS = 2.0
#: Before that, not counted. Seconds.
_WARM_UP_SECONDS = 0.7
_NO_SLOTS: dict[str, Any] = {"depth_factor": 1000.0}

_STEADY = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.03)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", one.inputs()[0].as_numpy())]) for one in requests
        ]
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a model, so many callers at once and a gateway with these routing settings."""

    model: str
    callers: int
    name: str
    routing: dict[str, Any]


def main() -> int:
    """Run ``depth`` or ``policies``, see the module."""
    if sys.argv[1:2] not in (["depth"], ["policies"]) or not set(sys.argv[2:]) <= set(_SHAPES):
        print(__doc__)
        return 2
    if sys.argv[1] == "depth":
        replicas, settings = 1, {"none": _NO_SLOTS} | {f"{n:g}": {"depth_factor": n} for n in (1.0, 2.0)}
    else:
        replicas, settings = 2, {policy: {"policy": policy} for policy in ("spread", "pack")}
    with tempfile.TemporaryDirectory(prefix="tidegate-routing-") as folder, ExitStack() as stack:
        repository = _repository(Path(folder) / "models")
        served = PoolSettings.model_validate({"models": [{"name": model} for model in _SHAPES]})
        tritons = [
            stack.enter_context(lone_triton(repository, served, run_dir=Path(folder) / name, name=name))
            for name in (f"r{n}" for n in range(replicas))
        ]
        print(
            "| model | callers | setting | requests/s | p50 ms | p99 ms | mean batch by replica | share of the first |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for model in sys.argv[2:] or _SHAPES:
            for callers in (32, 64) if replicas == 1 else (8, 24, 48):
                _compare([Case(model, callers, name, routing) for name, routing in settings.items()], tritons)
    return 0


def _compare(cases: Sequence[Case], tritons: Sequence[LaunchedTriton]) -> None:
    """The cases in turns, several rounds, and a row for each."""
    rounds = [[_measure(case, tritons) for case in cases] for _ in range(_ROUNDS)]
    for index, case in enumerate(cases):
        mine = [one[index] for one in rounds]
        batches = " ".join(f"{batch:.1f}" for batch in mine[-1].batches)
        rate = median(one.per_second for one in mine)
        p50, p99 = (median(getattr(one, column) for one in mine) * 1e3 for column in ("p50_seconds", "p99_seconds"))
        share = median(one.share_of_first for one in mine)
        print(
            f"| {case.model} | {case.callers} | {case.name} | {rate:.0f} | {p50:.1f} | {p99:.1f} | {batches} "
            f"| {share:.0%} |",
            flush=True,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """One case, once. ``batches``: the mean batch of each replica; ``share_of_first``: of all inferences."""

    per_second: float
    p50_seconds: float
    p99_seconds: float
    batches: list[float]
    share_of_first: float


def _measure(case: Case, tritons: Sequence[LaunchedTriton]) -> Seen:
    with _gateway(case, tritons) as port:
        before = [_statistics(triton, case.model) for triton in tritons]
        latencies = uvloop.run(_callers(port, case))
        after = [_statistics(triton, case.model) for triton in tritons]
    done = [(new[0] - old[0], new[1] - old[1]) for old, new in zip(before, after, strict=True)]
    latencies.sort()
    return Seen(
        per_second=len(latencies) / _SECONDS,
        p50_seconds=latencies[len(latencies) // 2],
        p99_seconds=latencies[int(len(latencies) * 0.99)],
        batches=[count / executions if executions else 0.0 for count, executions in done],
        share_of_first=done[0][0] / max(1, sum(count for count, _ in done)),
    )


def _statistics(triton: LaunchedTriton, model: str) -> tuple[int, int]:
    """Inferences and executions so far."""
    with urllib.request.urlopen(f"http://{triton.addresses.http}/v2/models/{model}/stats", timeout=10) as answer:
        said = json.load(answer)["model_stats"][0]
    return int(said["inference_count"]), int(said["execution_count"])


# -- replicas ---------------------------------------------------------------------------------------------


def _repository(target: Path) -> Path:
    for config in (_ROOT / "deployments/vision/models").glob("*/config.pbtxt"):
        (target / config.parent.name).mkdir(parents=True)
        shutil.copyfile(config, target / config.parent.name / "config.pbtxt")
    lay_out(_ROOT / "deployments/vision", target)
    bench = _ROOT / "loadtests/deployments/bench/models/ident"
    shutil.copytree(bench, target / "ident")
    shutil.copytree(bench, target / "plain")
    text = (bench / "config.pbtxt").read_text()
    text = text.replace("max_batch_size: 64", "max_batch_size: 0").replace("dynamic_batching { }", "")
    (target / "plain" / "config.pbtxt").write_text(text)
    _write_steady(target / "steady", text)
    return target


def _write_steady(folder: Path, plain_config: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_STEADY)
    config = plain_config.replace("max_batch_size: 0", "max_batch_size: 16")
    (folder / "config.pbtxt").write_text(config + "\ndynamic_batching { max_queue_delay_microseconds: 1000 }\n")


# -- the gateway ------------------------------------------------------------------------------------------


@contextmanager
def _gateway(case: Case, tritons: Sequence[LaunchedTriton]) -> Iterator[int]:
    """A door in a process of its own; the port it listens on."""
    ours, theirs = multiprocessing.Pipe()
    addresses = [str(triton.addresses.http) for triton in tritons]
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, case.routing, addresses))
    process.start()
    theirs.close()
    try:
        yield int(ours.recv())
    finally:
        ours.close()
        process.join()


def _serve(control: Connection, routing: dict[str, Any], addresses: list[str]) -> None:
    uvloop.run(_serve_until_told(control, routing, addresses))


class _OnePool:
    def __init__(self, pool: Pool) -> None:
        self.pools = {pool.name: pool}

    def pool_of(self, model: str) -> Pool:
        return self.pools["bench"]


class _NoMemory:
    def http(self, method: str, path: str) -> None:
        return None


async def _serve_until_told(control: Connection, routing: dict[str, Any], addresses: list[str]) -> None:
    loop = asyncio.get_running_loop()
    named = [{"name": model} for model in _SHAPES]
    settings = PoolSettings.model_validate({"models": named, "routing": routing})
    pool = Pool("bench", settings, clock=loop.time, on_wanted=lambda _: None)
    pool.catalogue = _catalogue(addresses[0])
    pool.update(
        ReplicaLease(id=f"r{n}", pool="bench", state=ReplicaState.READY, http_address=one, models=tuple(_SHAPES))
        for n, one in enumerate(addresses)
    )
    door = HttpDoor(_OnePool(pool), GatewaySettings(), _NoMemory(), Telemetry("bench"))
    control.send(await door.start("127.0.0.1", 0, reuse_port=False))
    told = asyncio.Event()
    loop.add_reader(control.fileno(), told.set)
    await told.wait()
    loop.remove_reader(control.fileno())
    await door.drain(0.0)


def _catalogue(address: str) -> Catalogue:
    configs = {}
    for model in _SHAPES:
        with urllib.request.urlopen(f"http://{address}/v2/models/{model}/config", timeout=10) as answer:
            configs[model] = answer.read().decode()
    return Catalogue(
        server_metadata_http="{}",
        server_metadata_grpc="",
        models={
            name: ModelCatalogue(metadata_http="{}", config_http=config, metadata_grpc="", config_grpc="")
            for name, config in configs.items()
        },
    )


# -- callers ----------------------------------------------------------------------------------------------


async def _callers(port: int, case: Case) -> list[float]:
    """Latencies of a closed loop, in seconds, after a warm-up."""
    request = _request(case.model)
    latencies: list[float] = []
    began = time.perf_counter()
    counted, until = began + _WARM_UP_SECONDS, began + _WARM_UP_SECONDS + _SECONDS

    async def caller() -> None:
        async with _connection(port) as (reader, writer):
            while (start := time.perf_counter()) < until:
                writer.write(request)
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200"), answer
                await reader.readexactly(int(answer.lower().split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0]))
                if start >= counted:
                    latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(caller() for _ in range(case.callers)))
    return latencies


@asynccontextmanager
async def _connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


def _request(model: str) -> bytes:
    shape = _SHAPES[model]
    tensor = np.random.default_rng(7).random(shape, dtype=np.float32).tobytes()
    wanted: dict[str, Any] = {"name": _INPUTS[model], "shape": list(shape), "datatype": "FP32"}
    wanted["parameters"] = {"binary_data_size": len(tensor)}
    head = json.dumps({"inputs": [wanted], "parameters": {"binary_data_output": True}}).encode()
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: bench\r\nInference-Header-Content-Length: {len(head)}\r\n"
        f"Content-Length: {len(head) + len(tensor)}\r\n\r\n"
    )
    return lines.encode() + head + tensor


if __name__ == "__main__":
    sys.exit(main())
