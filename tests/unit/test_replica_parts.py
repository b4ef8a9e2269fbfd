"""The parts of a replica that need no Triton."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

from replicas import leftovers, repository, selfcheck, server, sockets, wheel
from replicas.addresses import port_of
from replicas.drain import StopRequests, wait_until_idle
from replicas.layout import LayoutError, lay_out
from wire.pools import PoolSettings

ROOT = Path(__file__).parent.parent.parent

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0
   1: 0100007F:1F40 0100007F:973A 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0 100 0 0 10 0
   2: 0100007F:1F40 0100007F:973B 08 00000000:00000001 00:00000000 00000000     0        0 13 1 0 100 0 0 10 0
   3: 0100007F:973B 0100007F:1F40 05 00000000:00000000 00:00000000 00000000     0        0 0 1 0 100 0 0 10 0
   4: 0100007F:973C 0100007F:1F40 05 00000000:00000000 00:00000000 00000000     0        0 14 1 0 100 0 0 10 0
   5: 0100007F:97
"""


def test_connections_are_counted_by_the_callers_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that closed altogether is not counted, though Triton still has its socket; one that closed half is."""
    monkeypatch.setattr(sockets, "_entries", lambda: sockets.parse_table(TABLE))
    assert sockets.connections([8000]) == 2
    assert sockets.connections([8001]) == 0
    assert sockets.anyone_listens(8000) and not sockets.anyone_listens(38714)


def test_port_of_an_address() -> None:
    assert port_of("127.0.0.1:8000") == port_of("[::1]:8000") == 8000
    with pytest.raises(ValueError, match="invalid literal"):
        port_of("localhost:")


async def test_idle_is_two_quiet_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller seen on the second look starts the count anew; each change is told."""
    monkeypatch.setattr(asyncio, "sleep", _no_sleep)
    seen, told = iter([2, 0, 1, 1, 0, 0]), []
    await wait_until_idle([8000], told.append, lambda ports: next(seen))
    assert told == ["2 connections with requests in flight to close", "1 connection with requests in flight to close"]
    assert next(seen, None) is None


async def test_the_first_reason_to_leave_stays_and_the_second_signal_forces() -> None:
    stop = StopRequests()
    stop.ask("the supervisor is gone")
    stop._signalled("SIGTERM")
    assert stop.reason == "the supervisor is gone" and stop.forced.is_set()


def test_the_known_answer() -> None:
    selfcheck.compare({"outputs": [{"name": "ANSWER", "data": [4.0, -3.0, 1.0, 2049.0]}]})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"outputs": [{"name": "ANSWER", "shape": [0], "data": []}]}, "needs a numpy below 2 and numpy 1"),
        ({"outputs": [{"name": "ANSWER", "shape": [0]}]}, "empty tensors"),
        ({}, "empty tensors"),
        ({"outputs": [{"name": "ANSWER", "data": [4.0, -3.0, 1.0, 0.0]}]}, "computes wrongly"),
    ],
)
def test_another_answer_is_refused(answer: dict[str, Any], said: str) -> None:
    with pytest.raises(selfcheck.SelfCheckFailed, match=said):
        selfcheck.compare(answer)


def test_an_empty_tensor_looks_like_this_in_json() -> None:
    said = "output tensor shape does not match size of output for 'ANSWER'"
    assert "numpy below 2" in str(selfcheck.failure(said))
    assert str(selfcheck.failure("no")) == "the self-check of Triton's Python backend failed: no"


def test_load_failures_are_one_sentence() -> None:
    said = (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: TritonModelException: the model file "
        "model.onnx is missing\n\nAt:\n  /somewhere/model.py(37): initialize\n;"
    )
    assert repository.load_failure("m", said) == "model 'm' cannot be loaded: the model file model.onnx is missing"
    assert repository.load_failure("m", "failed to load 'm', failed to poll from model repository") == (
        "model 'm' cannot be loaded: failed to load 'm', failed to poll from model repository"
    )


def test_models_are_checked_before_triton_starts(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(repository.RepositoryError) as caught:
            repository.check_model(tmp_path, "m")
        return str(caught.value)

    assert refusal() == "model 'm' is not in the model repository: there is no folder m"
    (tmp_path / "m").mkdir()
    assert refusal() == "model 'm' has no config.pbtxt"
    (tmp_path / "m/config.pbtxt").write_text('# platform: "ensemble"\nbackend: "onnxruntime"')
    assert refusal() == "the model file of 'm' is missing: the repository has no m/1/model.onnx"
    (tmp_path / "m/3").mkdir()
    (tmp_path / "m/3/model.onnx").touch()
    repository.check_model(tmp_path, "m")
    (tmp_path / "m/config.pbtxt").write_text('backend: "onnxruntime"\ndefault_model_filename: "other.onnx"')
    assert "m/1/other.onnx" in refusal()
    (tmp_path / "m/config.pbtxt").write_text('platform: "ensemble"')
    repository.check_model(tmp_path, "m")


def test_only_a_complete_config_needs_no_completing(tmp_path: Path) -> None:
    for model in ("segmenter", "classifier", "reader"):
        assert server._says_it_all(ROOT / "deployments/vision/models" / model)
    (tmp_path / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 4\n# input [ ]\noutput [ ]')
    assert not server._says_it_all(tmp_path)
    assert not server._says_it_all(tmp_path / "missing")


def test_how_triton_ended_is_one_sentence() -> None:
    log = 'I1201 10:00:00.1 1 a.cc:1] "fine"\nE1201 10:00:00.2 1 main.cc:2] "failed to start HTTP service"\nI1201 x'
    assert server._how_it_ended(1, log) == "Triton ended with exit code 1: failed to start HTTP service"
    assert server._how_it_ended(-9, log) == "Triton was ended by SIGKILL"
    assert server._how_it_ended(127, "") == "Triton ended with exit code 127"


def test_another_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.platform, "machine", lambda: "aarch64")
    with pytest.raises(wheel.CannotLaunch, match="needs an x86-64 processor and this one is aarch64"):
        wheel.find_wheel()


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "find_spec", lambda name: None)
    with pytest.raises(wheel.CannotLaunch, match="put one on PATH or install the wheel nvidia-pytriton"):
        wheel.find_wheel()


def test_another_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "_python", lambda: "3.7")
    with pytest.raises(wheel.CannotLaunch, match=r"no Python backend for Python 3\.7; use 3\.11 or 3\.12"):
        wheel.find_wheel()


def test_a_missing_libpython_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loader of the stub is asked when the library is in none of the usual places."""
    monkeypatch.setattr(wheel, "_LIBRARY_FOLDERS", ())
    monkeypatch.setattr(wheel.sysconfig, "get_config_var", lambda name: None)
    monkeypatch.setattr(wheel, "_python", lambda: "3.12")
    said = b"stub: error while loading shared libraries: libpython3.12.so.1.0: cannot open shared object file\n"
    monkeypatch.setattr(wheel.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 127, b"", said))
    with pytest.raises(wheel.CannotLaunch, match=r"needs libpython3\.12\.so\.1\.0.*apt install libpython3\.12\)"):
        wheel.library_folder(tmp_path)


def test_a_sweep_takes_what_dead_owners_left_and_nothing_else(tmp_path: Path) -> None:
    """Marks of a dead agent, of a reused process id and of this living process; and files of others."""
    run_dir, shm = tmp_path / "run", tmp_path / "shm"
    shm.mkdir()
    living = leftovers.this_process()
    dead = subprocess.Popen(["true"])
    dead.wait()
    reused = leftovers.Owner(living.pid, living.start_ticks - 1)
    for owner in (living, reused, leftovers.Owner(dead.pid, 5)):
        (shm / (leftovers.mark(run_dir, owner) + "region")).touch()
        leftovers.replica_dir(run_dir, owner).mkdir(parents=True)
    others = leftovers.mark(tmp_path / "another", leftovers.Owner(dead.pid, 5)) + "region"
    for name in (others, "triton_python_backend_shm_region_1", "tidegate", f"x{leftovers.mark(run_dir, reused)}"):
        (shm / name).touch()

    swept = leftovers.sweep(run_dir, shm=shm, tmp=tmp_path)

    assert len(swept.files) == 2 and swept.processes == []
    assert (shm / (leftovers.mark(run_dir, living) + "region")).exists()
    assert len(list(shm.iterdir())) == 5
    assert list((run_dir / "replicas").iterdir()) == [leftovers.replica_dir(run_dir, living)]


def test_environment_folders_go_when_no_living_triton_can_have_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign Triton runs since 5000 and may load its Python backend any day; ours did so between 1000 and 1010."""
    monkeypatch.setattr(leftovers, "_loading_times", lambda run_dir: iter([(5000.0, float("inf")), (1000.0, 1010.0)]))
    made = {"before": 900, "ours_1": 1005, "ours_2": 1069, "midway": 1100, "others": 6000, "in_use": 1100}
    for name, at in made.items():
        folder = tmp_path / f"python_env_{name}"
        folder.mkdir()
        if name == "in_use":
            (folder / "file").touch()
        os.utime(folder, (at, at))
    (tmp_path / "python_env_linked").symlink_to(tmp_path)
    (tmp_path / "python_env_longer_name").mkdir()

    removed = leftovers.sweep(tmp_path / "run", shm=tmp_path, tmp=tmp_path).files

    assert sorted(removed) == ["python_env_before", "python_env_midway"]
    assert len(list(tmp_path.glob("python_env_*"))) == 6


def test_this_process_is_no_triton_and_a_tritonserver_is(tmp_path: Path) -> None:
    assert not leftovers._may_be_triton(os.getpid())
    with subprocess.Popen(["tritonserver", "30"], executable="/bin/sleep") as process:
        try:
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
                pass  # the kernel is still setting up the new program; what has made a folder is past that
            assert leftovers._may_be_triton(process.pid)
            started = [since for since, until in leftovers._loading_times(tmp_path) if until == float("inf")]
            assert any(abs(since - time.time()) < 30 for since in started)
        finally:
            process.kill()


# ---- laying out


def make_package(folder: Path, name: str, *, labels: str | None) -> None:
    """A package that must not be imported, with one ONNX file."""
    (folder / name / "models").mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise ImportError('must not be imported')")
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
    if labels is not None:
        onnx.helper.set_model_props(model, {"character": labels})
    onnx.save(model, str(folder / name / "models/some.onnx"))


def make_pool(folder: Path, package: str, **more: str) -> Path:
    source = {"package": package, "wheel": "some-wheel", "file": "models/some.onnx", **more}
    (folder / "pool").mkdir()
    (folder / "pool/sources.yaml").write_text(yaml.safe_dump({"models": {"m": source}}))
    return folder / "pool"


def test_laying_out_twice_writes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    make_package(tmp_path, "some_package_a", labels="a\n\u3000\n字\n")
    pool = make_pool(tmp_path, "some_package_a", labels="character")
    model, labels = pool / "models/m/1/model.onnx", pool / "models/m/labels.txt"
    assert lay_out(pool) == [model, labels]
    assert labels.read_text(encoding="utf-8") == "a\n\u3000\n字\n"
    assert lay_out(pool) == []
    assert sorted(path.name for path in model.parent.iterdir()) == ["model.onnx"]
    assert sorted(path.name for path in (pool / "models/m").iterdir()) == [".laid-out", "1", "labels.txt"]
    model.unlink()
    assert lay_out(pool) == [model, labels]


def test_a_model_file_that_the_user_put_there_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Replaced are files that were laid out and whose source changed, nothing else."""
    monkeypatch.syspath_prepend(str(tmp_path))
    make_package(tmp_path, "some_package_c", labels="a\nb\n")
    pool = make_pool(tmp_path, "some_package_c", labels="character")
    model, labels = pool / "models/m/1/model.onnx", pool / "models/m/labels.txt"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"my own")
    for _ in range(2):
        assert lay_out(pool) == []
    assert model.read_bytes() == b"my own" and not labels.exists()
    assert caplog.messages[0] == (
        f"model 'm': {model} is not the one of the wheel some-wheel and is kept as it is; delete it to get the wheel's"
    )
    model.unlink()
    assert lay_out(pool) == [model, labels]

    # A new version of the wheel replaces what the old one gave, also where no record was made of it.
    for text, has_record in (("c\n", True), ("d\n", False)):
        if not has_record:
            (pool / "models/m/.laid-out").unlink()
            assert lay_out(pool) == []
        file = tmp_path / "some_package_c/models/some.onnx"
        changed = onnx.load(str(file))
        onnx.helper.set_model_props(changed, {"character": text})
        onnx.save(changed, str(file))
        assert lay_out(pool) == [model, labels]
        assert labels.read_text(encoding="utf-8") == text and model.read_bytes() == file.read_bytes()

    # What the user then changes is the user's.
    model.write_bytes(b"my own again")
    assert lay_out(pool) == [] and model.read_bytes() == b"my own again"


def test_a_pool_without_sources_needs_no_laying_out(tmp_path: Path) -> None:
    assert lay_out(tmp_path) == []


def test_what_cannot_be_laid_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = make_pool(tmp_path, "some_package_b", labels="character")
    with pytest.raises(LayoutError, match="not installed: pip install --no-deps some-wheel"):
        lay_out(pool)
    make_package(tmp_path, "some_package_b", labels=None)
    importlib.invalidate_caches()
    with pytest.raises(LayoutError, match="has no metadata 'character'"):
        lay_out(pool)
    (tmp_path / "some_package_b/models/some.onnx").unlink()
    with pytest.raises(LayoutError, match=r"the installed wheel some-wheel has no file models/some\.onnx"):
        lay_out(pool)
    (pool / "sources.yaml").write_text("models: {m: {package: p, wheel: w, file: f, sha: 1}}")
    with pytest.raises(LayoutError, match=r"sources\.yaml: models\.m\.sha: unknown key"):
        lay_out(pool)


def test_the_shipped_pool_equals_the_defaults() -> None:
    text = (ROOT / "deployments/vision/pool.yaml").read_text(encoding="utf-8")
    shipped = PoolSettings.model_validate(yaml.safe_load(text))
    models = [{"name": name} for name in ("segmenter", "classifier", "reader")]
    assert shipped == PoolSettings.model_validate({"models": models})

    # Every field stands in the file, with its documentation as a comment.
    told = " ".join(line.strip().removeprefix("# ") for line in text.splitlines())
    for section in (shipped, *(getattr(shipped, name) for name in type(shipped).model_fields if name != "models")):
        assert section.model_fields_set == set(type(section).model_fields)
        for name, field in type(section).model_fields.items():
            assert " ".join((field.description or "").replace("``", "").split()) in told, name


# ---- our Python-based onnxruntime backend


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that Triton's stub would import, with a stand-in for Triton's own module."""

    class Response(SimpleNamespace):
        def __init__(self, output_tensors: Any = (), error: Any = None) -> None:
            super().__init__(output_tensors=output_tensors, error=error)

    stub = ModuleType("triton_python_backend_utils")
    stub.Tensor = FakeTensor  # type: ignore[attr-defined]
    stub.InferenceResponse = Response  # type: ignore[attr-defined]
    stub.TritonError = str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)
    path = ROOT / "replicas/backends/onnxruntime/model.py"
    spec = importlib.util.spec_from_file_location("onnxruntime_backend", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeTensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class FakeRequest:
    def __init__(self, array: np.ndarray, *wanted: str) -> None:
        self._array, self._wanted = array, wanted

    def inputs(self) -> list[FakeTensor]:
        return [FakeTensor("x", self._array)]

    def requested_output_names(self) -> tuple[str, ...]:
        return self._wanted


class FakeSession:
    """Doubles and negates; refuses negative numbers."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, ...]] = []

    def run(self, wanted: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        self.batches.append(inputs["x"].shape)
        if (inputs["x"] < 0).any():
            raise RuntimeError("no negative numbers\nand a long explanation")
        known = {"double": inputs["x"] * 2, "minus": -inputs["x"]}
        return [known[name] for name in wanted]


def model_of(backend: ModuleType, *, batched: bool) -> tuple[Any, FakeSession]:
    model = backend.TritonPythonModel()
    model._session, model._outputs, model._string_inputs = FakeSession(), ["double", "minus"], set()
    model._name, model._batched = "m", batched
    return model, model._session


def outputs(response: Any) -> dict[str, list[Any]]:
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors}


def test_requests_of_one_shape_run_as_one_batch(backend: ModuleType) -> None:
    model, session = model_of(backend, batched=True)
    rows = [FakeRequest(np.array(v, dtype=np.float32), "double") for v in ([[1, 2]], [[3, 4], [5, 6]], [[7, 8, 9]])]
    answers = model.execute(rows)
    assert [outputs(a)["double"] for a in answers] == [[[2, 4]], [[6, 8], [10, 12]], [[14, 16, 18]]]
    assert session.batches == [(3, 2), (1, 3)]


def test_each_request_gets_the_outputs_it_asked_for(backend: ModuleType) -> None:
    model, _ = model_of(backend, batched=True)
    ones = np.ones((1, 1), dtype=np.float32)
    answers = model.execute([FakeRequest(ones, "double"), FakeRequest(ones, "minus", "double")])
    assert [list(outputs(a)) for a in answers] == [["double"], ["minus", "double"]]


def test_a_bad_request_fails_alone(backend: ModuleType) -> None:
    model, _ = model_of(backend, batched=True)
    good, bad = np.ones((1, 1), dtype=np.float32), -np.ones((1, 1), dtype=np.float32)
    first, second, third = model.execute([FakeRequest(v, "double") for v in (good, bad, good)])
    assert outputs(first) == outputs(third) == {"double": [[2]]}
    assert second.error == "model 'm' failed: no negative numbers"


def test_without_a_batch_dimension_each_request_runs_alone(backend: ModuleType) -> None:
    model, session = model_of(backend, batched=False)
    model.execute([FakeRequest(np.ones(3, dtype=np.float32), "double") for _ in range(2)])
    assert session.batches == [(3,), (3,)]


async def _no_sleep(seconds: float) -> None:
    del seconds


def test_the_mark_is_of_this_process() -> None:
    assert leftovers.this_process().pid == os.getpid() and leftovers.this_process().start_ticks > 0
