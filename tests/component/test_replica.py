"""A replica against a real Triton and a real Valkey: start, serve, drain, leave, and what a hard kill leaves."""

import asyncio
import base64
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http.aio as httpclient

from replicas import leftovers, server, sockets, wheel
from replicas.server import LaunchedTriton
from replicas.triton import Triton
from stores.membership import CatalogueStore
from stores.store import Store
from tests.triton import ReplicaProcess, replica_process, running_triton, write_model
from tests.valkey import RunningValkey
from wire.membership import ReplicaLease, ReplicaState
from wire.pools import PoolSettings


async def infer(address: str | None, model: str, values: list[float]) -> list[float]:
    assert address is not None
    async with httpclient.InferenceServerClient(address) as client:
        given = httpclient.InferInput("INPUT0", [len(values)], "FP32")
        given.set_data_from_numpy(np.array(values, dtype=np.float32))
        return [float(value) for value in (await client.infer(model, [given])).as_numpy("OUTPUT0")]


async def test_vision_is_ready_with_its_stages_and_leaves_nothing(
    store: Store, valkey: RunningValkey, vision_repository: Path, tmp_path: Path
) -> None:
    """The three models, each stage timed, the catalogue word for word, an orderly end."""
    models = ["segmenter", "classifier", "reader"]
    async with replica_process(store, valkey.settings, vision_repository, models, tmp_path) as replica:
        lease = await replica.until(ReplicaState.READY)
        assert lease.models == tuple(models)
        assert {stage.name for stage in lease.stages} == {"process", "self-check", *(f"load {m}" for m in models)}
        assert lease.stages[0].name == "process" and all(stage.seconds > 0 for stage in lease.stages)
        assert lease.waiting_for is None and lease.ready_at is not None and lease.ready_at > lease.started_at > 1e9
        assert lease.http_address and lease.grpc_address and lease.metrics_address

        async with httpclient.InferenceServerClient(lease.http_address) as client:
            metadata = [(await client.get_model_metadata(model))["platform"] for model in models]
            assert metadata == ["onnxruntime_onnx"] * 3
            index = await client.get_model_repository_index()
            assert sorted(entry["name"] for entry in index if entry.get("state") == "READY") == sorted(models)
            page = httpclient.InferInput("x", [1, 3, 64, 96], "FP32")
            page.set_data_from_numpy(np.zeros((1, 3, 64, 96), dtype=np.float32))
            answer = (await client.infer("segmenter", [page])).as_numpy("sigmoid_0.tmp_0")
            assert answer.shape == (1, 1, 64, 96)

        for _ in range(100):
            catalogue = await CatalogueStore(store).get("test")
            if catalogue is not None:
                break
            await asyncio.sleep(0.05)
        assert catalogue is not None and set(catalogue.models) == set(models)
        triton = Triton(_addresses(lease))
        assert catalogue.server_metadata_http.encode() == await triton.server_metadata()
        assert catalogue.models["reader"].config_http.encode() == await triton.model_config("reader")
        direct = grpcclient.service_pb2.ModelConfigResponse()
        direct.ParseFromString(base64.b64decode(catalogue.models["reader"].config_grpc))
        assert direct.config.name == "reader" and direct.config.max_batch_size == 8

        replica.signal(signal.SIGTERM)
        assert await replica.exit_code() == 0
        assert await replica.lease() is None
        _assert_nothing_left(tmp_path)
        assert not list((tmp_path / "replicas").iterdir())


async def test_the_backend_joins_and_splits_requests(vision_repository: Path, tmp_path: Path) -> None:
    """Concurrent requests of two widths give what each gives alone, and Triton counts batches of several."""
    random = np.random.default_rng(7)
    lines = [random.random((1, 3, 48, width), dtype=np.float32) for width in (96, 160) * 8]
    async with running_triton(vision_repository, ["reader"], tmp_path) as addresses:
        async with httpclient.InferenceServerClient(addresses.http) as client:

            async def read(line: np.ndarray) -> np.ndarray:
                given = httpclient.InferInput("x", list(line.shape), "FP32")
                given.set_data_from_numpy(line)
                return (await client.infer("reader", [given])).as_numpy("softmax_11.tmp_0")

            alone = [await read(line) for line in lines]
            together = await asyncio.gather(*(read(line) for line in lines))
            statistics = (await client.get_inference_statistics("reader"))["model_stats"][0]
        for one, other in zip(alone, together, strict=True):
            assert one.shape == other.shape and np.allclose(one, other, atol=1e-4)
        assert int(statistics["execution_count"]) < int(statistics["inference_count"])


async def test_three_replicas_have_nine_ports(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """A-058: the usual ports are taken; every replica has three of its own."""
    taken = []
    for port in (8000, 8001, 8002):
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
            held.listen()
        except OSError:
            pass  # taken by somebody else, which is just as well
        taken.append(held)
    try:
        async with (
            replica_process(store, valkey.settings, echo_repository, ["ident"], tmp_path) as one,
            replica_process(store, valkey.settings, echo_repository, ["ident"], tmp_path) as two,
            replica_process(store, valkey.settings, echo_repository, ["ident"], tmp_path) as three,
        ):
            leases = [await replica.until(ReplicaState.READY) for replica in (one, two, three)]
            addresses = {a for le in leases for a in (le.http_address, le.grpc_address, le.metrics_address)}
            assert len(addresses) == 9
            assert not {f"127.0.0.1:{port}" for port in (8000, 8001, 8002)} & addresses
    finally:
        for held in taken:
            held.close()


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_lost_race_for_a_port_is_run_again(
    echo_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """A-058: somebody took one of the three ports between the choice and the start."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        lost = sockets.free_ports(3)
        lost[place] = held.getsockname()[1]
        choices = iter([lost, sockets.free_ports(3)])
        monkeypatch.setattr(sockets, "free_ports", lambda count: next(choices))
        async with running_triton(echo_repository, ["ident"], tmp_path) as addresses:
            assert await infer(addresses.http, "ident", [1.0]) == [1.0]


async def test_ports_lost_every_time_are_named(
    echo_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-058: a real failure names the port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        monkeypatch.setattr(sockets, "free_ports", lambda count: [port, port + 1, port + 2])
        settings = PoolSettings.model_validate({"models": [{"name": "ident"}]})
        triton = LaunchedTriton(repository=echo_repository, run_dir=tmp_path, replica_id="r", settings=settings)
        try:
            with pytest.raises(server.CannotLaunch, match=str(port)):
                await triton.answers()
        finally:
            triton.kill()


async def test_the_triton_on_the_path_goes_first(
    echo_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Triton's own image: its backends are its own, and so is its Python."""
    program = wheel.lay_out_server(wheel.find_wheel(), tmp_path / "image")
    script = tmp_path / "bin/tritonserver"
    script.parent.mkdir()
    backends = program.parent / "backends"
    script.write_text(f'#!/bin/bash\nexec -a tritonserver {program} --backend-directory={backends} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    async with running_triton(echo_repository, ["ident"], tmp_path / "run") as addresses:
        assert await infer(addresses.http, "ident", [2.0]) == [2.0]
        assert not list((tmp_path / "run/replicas").glob("*/server"))
    _assert_nothing_left(tmp_path / "run")


@pytest.mark.parametrize("name", ["with a space", "ümlaut"])
async def test_folders_may_have_any_name(tmp_path: Path, name: str) -> None:
    """Triton's Python backend hangs on a path with a space and fails on one that is not ASCII."""
    write_model(tmp_path / name / "models", "ident")
    async with running_triton(tmp_path / name / "models", ["ident"], tmp_path / name / "run") as addresses:
        assert await infer(addresses.http, "ident", [2.0]) == [2.0]


async def test_killed_agents_leave_nothing(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """A-059: SIGKILL to three agents, one with a request in flight; their children end, other processes do not."""
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        async with (
            replica_process(store, valkey.settings, echo_repository, ["ident"], tmp_path) as one,
            replica_process(store, valkey.settings, echo_repository, ["ident"], tmp_path) as two,
            replica_process(store, valkey.settings, echo_repository, ["slow"], tmp_path) as busy,
        ):
            for replica in (one, two):
                await replica.until(ReplicaState.READY)
            lease = await busy.until(ReplicaState.READY)
            request = asyncio.create_task(infer(lease.http_address, "slow", [1.0]))
            await asyncio.sleep(0.3)
            for replica in (one, two, busy):
                replica.signal(signal.SIGKILL)
            await asyncio.gather(request, return_exceptions=True)
            await _until(lambda: not one.triton_processes() and not two.triton_processes(), 5.0)
            # A stub that was in the middle of a request waits for ever to hand its answer to a server that is gone.
            await _until(lambda: len(busy.triton_processes()) <= 1, 5.0)
            leftovers.sweep(tmp_path)
            _assert_nothing_left(tmp_path)
            assert not list((tmp_path / "replicas").iterdir())
            async with replica_process(store, valkey.settings, echo_repository, ["ident"], tmp_path) as again:
                await again.until(ReplicaState.READY)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_a_sweep_ends_orphans_at_once(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """A-059: a busy stub outlives its server for a while; the sweep ends it, and spares replicas that live."""
    async with (
        replica_process(store, valkey.settings, echo_repository, ["ident"], tmp_path) as living,
        replica_process(store, valkey.settings, echo_repository, ["slow"], tmp_path) as busy,
    ):
        await living.until(ReplicaState.READY)
        lease = await busy.until(ReplicaState.READY)
        request = asyncio.create_task(infer(lease.http_address, "slow", [1.0]))
        await asyncio.sleep(0.3)
        busy.signal(signal.SIGKILL)
        await busy.exit_code()
        leftovers.sweep(tmp_path)
        assert busy.triton_processes() == [] and busy.region_files() == []
        assert living.triton_processes() and living.region_files()
        await asyncio.gather(request, return_exceptions=True)
        assert (await living.until(ReplicaState.READY)).id == living.id


async def test_twenty_killed_replicas_do_not_fill_shared_memory(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """A-060: each start clears what the killed one before it left; files of other owners are untouched."""
    foreign = Path("/dev/shm") / f"not-ours-{os.getpid()}"
    foreign.write_text("keep")
    try:
        for _ in range(10):  # two at a time
            pair = [ReplicaProcess(store, valkey.settings, echo_repository, ["ident"], tmp_path) for _ in range(2)]
            for replica in pair:
                replica.start()
            for replica in pair:
                await replica.until(ReplicaState.READY)
            files = [path.name for path, _ in leftovers.marked_files(tmp_path, Path("/dev/shm"))]
            assert 2 <= len(files) == sum(len(replica.region_files()) for replica in pair)
            for replica in pair:
                replica.process.kill()
                replica.process.wait()
        leftovers.sweep(tmp_path)
        _assert_nothing_left(tmp_path)
        assert foreign.read_text() == "keep"
    finally:
        foreign.unlink()


async def test_sigterm_lets_a_request_in_flight_finish(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """The drain is announced at once and lasts as long as the request."""
    async with replica_process(store, valkey.settings, echo_repository, ["slow"], tmp_path) as replica:
        lease = await replica.until(ReplicaState.READY)
        request = asyncio.create_task(infer(lease.http_address, "slow", [3.0]))
        await asyncio.sleep(0.3)
        replica.signal(signal.SIGTERM)
        draining = await replica.until(ReplicaState.DRAINING, limit_seconds=3.0)
        assert draining.reason == "asked to leave by SIGTERM" and not request.done()
        assert await request == [3.0]
        assert await replica.exit_code() == 0
        _assert_nothing_left(tmp_path)


async def test_a_second_signal_forces(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """The second SIGTERM ends the replica at once, request in flight or not."""
    async with replica_process(store, valkey.settings, echo_repository, ["slow"], tmp_path) as replica:
        lease = await replica.until(ReplicaState.READY)
        request = asyncio.create_task(infer(lease.http_address, "slow", [3.0]))
        await asyncio.sleep(0.3)
        replica.signal(signal.SIGTERM)
        await replica.until(ReplicaState.DRAINING, limit_seconds=3.0)
        replica.signal(signal.SIGTERM)
        begun = time.monotonic()
        await replica.exit_code()
        assert time.monotonic() - begun < 3.0
        assert isinstance((await asyncio.gather(request, return_exceptions=True))[0], Exception)
        _assert_nothing_left(tmp_path)


async def test_the_end_of_the_lifeline_is_a_request_to_leave(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    try:
        async with replica_process(
            store, valkey.settings, echo_repository, ["ident"], tmp_path, lifeline_fd=reading
        ) as replica:
            await replica.until(ReplicaState.READY)
            os.close(writing)
            assert await replica.exit_code() == 0
            assert "the supervisor is gone" in replica.log
    finally:
        os.close(reading)


async def test_a_dead_triton_ends_the_replica_at_once(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    async with replica_process(store, valkey.settings, echo_repository, ["ident"], tmp_path) as replica:
        await replica.until(ReplicaState.READY)
        (triton,) = [pid for pid in replica.triton_processes() if b"model-repository" in _cmdline(pid)]
        os.kill(triton, signal.SIGKILL)
        begun = time.monotonic()
        assert await replica.exit_code() == 1
        assert time.monotonic() - begun < 5.0
        assert await replica.lease() is None
        assert "Triton was ended by SIGKILL" in replica.log
        _assert_nothing_left(tmp_path)


async def test_a_dead_stub_ends_the_replica(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """The out-of-memory killer takes a stub: the replica takes nothing new, finishes what can finish, and leaves."""
    async with replica_process(store, valkey.settings, echo_repository, ["ident", "slow"], tmp_path) as replica:
        lease = await replica.until(ReplicaState.READY)
        request = asyncio.create_task(infer(lease.http_address, "slow", [3.0]))
        await asyncio.sleep(0.3)
        (stub,) = [pid for pid in replica.triton_processes() if b"models/ident/" in _cmdline(pid)]
        os.kill(stub, signal.SIGKILL)
        draining = await replica.until(ReplicaState.DRAINING, limit_seconds=4.0)
        assert "a process of Triton's Python backend died" in (draining.reason or "")
        assert await request == [3.0]
        assert await replica.exit_code() == 1
        assert await replica.lease() is None
        _assert_nothing_left(tmp_path)


async def test_models_may_come_and_go_while_it_serves(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """Somebody unloads and reloads models: their stubs end in order, which is no fault."""
    async with replica_process(store, valkey.settings, echo_repository, ["ident", "batched"], tmp_path) as replica:
        triton = Triton(_addresses(await replica.until(ReplicaState.READY)))
        for _ in range(3):
            await triton.unload("batched")
            await asyncio.sleep(0.6)
            await triton.load("batched")
            await triton.load("ident")
        await asyncio.sleep(1.5)
        assert (await replica.until(ReplicaState.READY, 0.5)).reason is None and "leaving" not in replica.log


async def test_a_hung_triton_is_not_ready_until_it_answers(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """A-035: frozen, it leaves routing; going on, it comes back; frozen for good, it is ended."""
    async with replica_process(
        store, valkey.settings, echo_repository, ["ident"], tmp_path, hung_seconds=8.0
    ) as replica:
        await replica.until(ReplicaState.READY)
        (triton,) = [pid for pid in replica.triton_processes() if b"model-repository" in _cmdline(pid)]
        os.kill(triton, signal.SIGSTOP)
        hung = await replica.until(ReplicaState.WARMING, limit_seconds=8.0)
        assert hung.reason == "Triton hangs: it does not answer" and hung.waiting_for == "Triton to answer again"
        os.kill(triton, signal.SIGCONT)
        again = await replica.until(ReplicaState.READY, limit_seconds=4.0)
        assert again.reason is None and await infer(again.http_address, "ident", [1.0]) == [1.0]
        os.kill(triton, signal.SIGSTOP)
        assert await replica.exit_code(15.0) == 1
        assert "leaving: Triton hangs: it has not answered for" in replica.log
        assert await replica.lease() is None
        _assert_nothing_left(tmp_path)


async def test_a_missing_model_file_is_said_in_the_lease(store: Store, valkey: RunningValkey, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "ident")
    (tmp_path / "models/ident/1/model.py").unlink()
    async with replica_process(store, valkey.settings, tmp_path / "models", ["ident"], tmp_path) as replica:
        failed = await replica.until(ReplicaState.FAILED)
        assert failed.reason == "the model file of 'ident' is missing: the repository has no ident/1/model.py"
        assert await replica.exit_code() == 1
        assert await replica.lease() is None


async def test_a_failed_load_is_said_in_the_lease(store: Store, valkey: RunningValkey, tmp_path: Path) -> None:
    """One of two models cannot be loaded: the replica is never ready, and Triton is gone while it says why."""
    write_model(tmp_path / "models", "ident")
    write_model(tmp_path / "models", "badload", refuse="the weights are for another model")
    async with replica_process(store, valkey.settings, tmp_path / "models", ["ident", "badload"], tmp_path) as replica:
        failed = await replica.until(ReplicaState.FAILED)
        assert failed.reason == "model 'badload' cannot be loaded: the weights are for another model"
        assert await replica.exit_code() == 1
        _assert_nothing_left(tmp_path)


async def test_a_start_that_takes_too_long_is_given_up(store: Store, valkey: RunningValkey, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "loadslow", load_seconds=30)
    settings = {"models": [{"name": "loadslow"}], "replica": {"start_limit_seconds": 2.0, "lease_seconds": 1.0}}
    async with replica_process(
        store, valkey.settings, tmp_path / "models", ["loadslow"], tmp_path, settings=settings
    ) as replica:
        failed = await replica.until(ReplicaState.FAILED)
        told = "not ready within 2 s; it was still waiting for model loadslow to load"
        assert failed.reason is not None and failed.reason.startswith(told)
        assert await replica.exit_code() == 1
        _assert_nothing_left(tmp_path)


async def test_sigterm_while_it_starts(store: Store, valkey: RunningValkey, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "loadslow", load_seconds=30)
    async with replica_process(store, valkey.settings, tmp_path / "models", ["loadslow"], tmp_path) as replica:
        warming = await replica.until(ReplicaState.WARMING)
        assert warming.http_address and "loadslow" in (warming.waiting_for or "")
        replica.signal(signal.SIGTERM)
        assert await replica.exit_code(15.0) == 0
        _assert_nothing_left(tmp_path)


async def test_attached_replica_leaves_its_triton_alone(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """It loads what is not loaded, serves under a lease, leaves on SIGTERM; Triton goes on with its models."""
    async with running_triton(echo_repository, [], tmp_path / "triton") as addresses:
        attach = (addresses.http, addresses.grpc, addresses.metrics)
        async with replica_process(
            store, valkey.settings, echo_repository, ["ident"], tmp_path / "run", attach=attach
        ) as replica:
            lease = await replica.until(ReplicaState.READY)
            assert (lease.http_address, lease.grpc_address, lease.metrics_address) == attach
            assert await infer(lease.http_address, "ident", [5.0]) == [5.0]
            replica.signal(signal.SIGTERM)
            assert await replica.exit_code(5.0) == 0
            assert await replica.lease() is None
            assert await infer(addresses.http, "ident", [6.0]) == [6.0]


async def test_attached_replica_leaves_when_its_triton_dies(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    async with running_triton(echo_repository, ["ident"], tmp_path / "triton") as addresses:
        attach = (addresses.http, addresses.grpc, addresses.metrics)
        async with replica_process(
            store, valkey.settings, echo_repository, ["ident"], tmp_path / "run", attach=attach
        ) as replica:
            await replica.until(ReplicaState.READY)
            for pid, _ in leftovers.marked_processes(tmp_path / "triton"):
                os.kill(pid, signal.SIGKILL)
            assert await replica.exit_code() == 1
            assert "no longer answers" in replica.log


async def test_serving_goes_on_while_the_store_is_away(
    store: Store, valkey: RunningValkey, echo_repository: Path, tmp_path: Path
) -> None:
    """It starts without a store, joins when it comes, serves through an absence and joins again."""
    await valkey.stop()
    async with replica_process(store, valkey.settings, echo_repository, ["ident"], tmp_path) as replica:
        await _until(lambda: "ready but for what operators have changed" in replica.log, 30.0)
        await valkey.start()
        lease = await replica.until(ReplicaState.READY)
        await valkey.kill()
        await asyncio.sleep(2.0)
        assert await infer(lease.http_address, "ident", [1.0]) == [1.0]
        await valkey.start()
        assert (await replica.until(ReplicaState.READY, 5.0)).http_address == lease.http_address


async def _until(holds, limit_seconds: float) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + limit_seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_seconds} s"
        await asyncio.sleep(0.05)


def _assert_nothing_left(run_dir: Path) -> None:
    assert list(leftovers.marked_processes(run_dir)) == []
    assert list(leftovers.marked_files(run_dir, Path("/dev/shm"))) == []


def _addresses(lease: ReplicaLease):  # type: ignore[no-untyped-def]
    from replicas.addresses import AttachAddresses

    assert lease.http_address and lease.grpc_address
    return AttachAddresses(lease.http_address, lease.grpc_address, lease.metrics_address)


def _cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
