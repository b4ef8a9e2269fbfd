"""A real Triton, and real replicas, for tests.

``vision_repository``   (session fixture) the shipped pool ``vision``, laid out in a temporary folder
``write_model``         adds a small Python-backed model to a repository: an echo that can be slow, fail or crash
``echo_repository``     (session fixture) a repository with ``ident`` (FP32 [-1]), ``slow`` (the same, 1.5 s a request)
                        and ``batched`` (FP32 [16], dynamic batching)
``mixed_triton``        (session fixture) addresses of a Triton with all of tests/triton_models: every data type, errors
                        on demand, versions, batches, decoupled answers, sequences, an ensemble
``running_triton``      a Triton of this process, without an agent:
                            async with running_triton(repository, ["ident"]) as addresses: ...
``ReplicaProcess``      an agent in a process of its own, with its lease to look at:
                            async with replica_process(store_settings, repository, ["ident"], run_dir) as replica:
                                lease = await replica.until(ReplicaState.READY)
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from replicas import leftovers
from replicas.addresses import AttachAddresses
from replicas.layout import lay_out
from replicas.server import LaunchedTriton
from replicas.triton import Triton
from stores.membership import ReplicaDirectory
from stores.settings import StoreSettings
from stores.store import Store
from wire.membership import ReplicaLease, ReplicaState
from wire.pools import PoolSettings

ROOT = Path(__file__).parent.parent

_ECHO = """
import json, os, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        given = json.loads(args["model_config"]).get("parameters", {})
        self.given = {key: value["string_value"] for key, value in given.items()}
        time.sleep(float(self.given.get("load_seconds", "0")))
        if "refuse" in self.given:
            raise pb_utils.TritonModelException(self.given["refuse"])

    def execute(self, requests):
        if "crash" in self.given:
            os._exit(1)
        time.sleep(float(self.given.get("delay_seconds", "0")))
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(each.name().replace("INPUT", "OUTPUT"), each.as_numpy()) for each in request.inputs()]
            )
            for request in requests
        ]
"""


def write_model(
    repository: Path,
    name: str,
    *,
    datatype: str = "FP32",
    dims: Sequence[int] = (-1,),
    max_batch_size: int = 0,
    more: str = "",
    **parameters: str | float,
) -> None:
    """An echo of INPUT0 as OUTPUT0. ``parameters``: ``delay_seconds`` a request, ``load_seconds``, ``refuse`` (the
    sentence its load fails with), ``crash`` (ends the process that runs it). ``more`` is appended to config.pbtxt."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_ECHO, encoding="utf-8")
    config = [
        'backend: "python"',
        f"max_batch_size: {max_batch_size}",
        *(
            f'{kind.lower()} [ {{ name: "{kind}0" data_type: TYPE_{datatype} dims: {list(dims)} }} ]'
            for kind in ("INPUT", "OUTPUT")
        ),
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
        *(f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in parameters.items()),
        more,
    ]
    (repository / name / "config.pbtxt").write_text("\n".join(config), encoding="utf-8")


@pytest.fixture(scope="session")
def vision_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the shipped repository of the pool ``vision`` with its model files."""
    repository = tmp_path_factory.mktemp("vision") / "models"
    for config in (ROOT / "deployments/vision/models").glob("*/config.pbtxt"):
        target = repository / config.parent.name / "config.pbtxt"
        target.parent.mkdir(parents=True)
        shutil.copyfile(config, target)
    lay_out(ROOT / "deployments/vision", repository)
    return repository


@pytest.fixture(scope="session")
def echo_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the light models ``ident``, ``batched`` and ``slow``."""
    repository = tmp_path_factory.mktemp("echo") / "models"
    write_model(repository, "ident")
    write_model(repository, "batched", dims=(16,), max_batch_size=8, more="dynamic_batching { }")
    write_model(repository, "slow", delay_seconds=1.5)
    return repository


@asynccontextmanager
async def running_triton(
    repository: Path, models: Sequence[str], run_dir: Path, *, triton_args: Sequence[str] = ()
) -> AsyncIterator[AttachAddresses]:
    """A Triton on free ports with ``models`` loaded; gone at the end, with all it had. ``run_dir`` is its own."""
    # Settings want at least one model; the server alone loads none of them by itself.
    named = [{"name": name} for name in models or ["none"]]
    settings = PoolSettings.model_validate({"models": named, "replica": {"triton_args": list(triton_args)}})
    server = LaunchedTriton(repository=repository, run_dir=run_dir, replica_id="triton", settings=settings)
    try:
        await server.answers()
        triton = Triton(server.addresses)
        await asyncio.gather(*(triton.load(model) for model in models))
        yield server.addresses
    finally:
        server.kill()


#: What tests/triton_models holds.
MIXED_MODELS = ("batched", "decoupled", "ensemble", "probe", "sequence", "types", "versions")


@pytest.fixture(scope="session")
def mixed_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachAddresses]:
    """See the module."""
    folder = tmp_path_factory.mktemp("mixed")
    # A copy, as Triton's Python writes __pycache__ beside the models.
    shutil.copytree(ROOT / "tests/triton_models", folder / "models", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "models/ensemble/1").mkdir(exist_ok=True)  # version control keeps no empty folders
    settings = PoolSettings.model_validate({"models": [{"name": "none"}]})
    server = LaunchedTriton(
        repository=folder / "models", run_dir=folder / "run", replica_id="triton", settings=settings
    )

    async def start() -> None:
        await server.answers()
        triton = Triton(server.addresses)
        await asyncio.gather(*(triton.load(model) for model in MIXED_MODELS if model != "ensemble"))
        await triton.load("ensemble")

    try:
        asyncio.run(start())
        yield server.addresses
    finally:
        server.kill()


class ReplicaProcess:
    """One agent in a process of its own."""

    def __init__(
        self, store: Store, store_settings: StoreSettings, repository: Path, models: Sequence[str], run_dir: Path
    ) -> None:
        self.id = f"r{os.getpid()}-{time.monotonic_ns() % 10**9}"
        self.run_dir = run_dir
        self._store = store
        self._given: dict[str, Any] = {
            "store_url": store_settings.resolved_url,
            "pool": "test",
            "settings": {"models": [{"name": name} for name in models], "replica": {"lease_seconds": 1.5}},
            "repository": str(repository),
            "run_dir": str(run_dir),
            "replica_id": self.id,
        }
        self.process: subprocess.Popen[bytes]

    def start(self, **given: Any) -> None:
        """Start it; ``given`` overrides the document that tests/component/replica_main.py reads."""
        document = self._given | given
        lifeline = document.get("lifeline_fd")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / f"{self.id}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.component.replica_main", json.dumps(document)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                pass_fds=() if lifeline is None else (lifeline,),
                start_new_session=True,
            )

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self._given["settings"]
        return settings

    @property
    def log(self) -> str:
        return (self.run_dir / f"{self.id}.log").read_text()

    async def lease(self) -> ReplicaLease | None:
        leases = await ReplicaDirectory(self._store).list("test")
        return next((lease for lease in leases if lease.id == self.id), None)

    async def until(self, state: ReplicaState, limit_seconds: float = 60.0) -> ReplicaLease:
        """The lease as soon as it says ``state``."""
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            lease = await self.lease()
            if lease is not None and lease.state is state:
                return lease
            assert self.process.poll() is None, f"the replica ended: {self.log}"
            await asyncio.sleep(0.02)
        raise AssertionError(f"not {state} within {limit_seconds} s: {await self.lease()}\n{self.log}")

    async def exit_code(self, limit_seconds: float = 30.0) -> int:
        """Its exit code as soon as it ends."""
        async with asyncio.timeout(limit_seconds):
            while self.process.poll() is None:
                await asyncio.sleep(0.02)
        return self.process.returncode

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def triton_processes(self) -> list[int]:
        """Process ids of its tritonserver and stubs; meaningful also after it ended."""
        return [pid for pid, owner in leftovers.marked_processes(self.run_dir) if owner.pid == self.process.pid]

    def region_files(self) -> list[str]:
        """Names of its shared-memory files."""
        return [
            path.name
            for path, owner in leftovers.marked_files(self.run_dir, Path("/dev/shm"))
            if owner.pid == self.process.pid
        ]

    async def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        leftovers.sweep(self.run_dir)


@asynccontextmanager
async def replica_process(
    store: Store,
    store_settings: StoreSettings,
    repository: Path,
    models: Sequence[str],
    run_dir: Path,
    **given: Any,
) -> AsyncIterator[ReplicaProcess]:
    """A started replica of pool ``test``; nothing of it is left at the end. Its lease lasts 1.5 s."""
    replica = ReplicaProcess(store, store_settings, repository, models, run_dir)
    replica.start(**given)
    try:
        yield replica
    finally:
        await replica.end()
