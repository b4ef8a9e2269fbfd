"""Our Python-based ``onnxruntime`` backend inside a real Triton."""

import asyncio
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.http.aio as httpclient
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from replicas.addresses import AttachAddresses
from replicas.repository import load_failure
from replicas.triton import Triton, TritonRefused
from tests.triton import running_triton

CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input [ {{ name: "{input}" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "twice" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "minus" data_type: TYPE_FP32 dims: [ -1 ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: 20000 }}
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "good" model_version: -1
      input_map { key: "x" value: "IN" } output_map { key: "twice" value: "between" } },
    { model_name: "good" model_version: -1
      input_map { key: "x" value: "between" } output_map { key: "minus" value: "OUT" } }
  ]
}
"""


def write_onnx(path: Path) -> None:
    """x [N, M] -> twice = x * [2, 2, 2] (so M is 3 or 1), minus = -x."""
    x, twice, minus = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in ("x", "twice", "minus")
    )
    two = helper.make_tensor("two", TensorProto.FLOAT, [3], [2.0, 2.0, 2.0])
    nodes = [helper.make_node("Mul", ["x", "two"], ["twice"]), helper.make_node("Neg", ["x"], ["minus"])]
    graph = helper.make_graph(nodes, "g", [x], [twice, minus], [two])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "models"
    for name, given in (("good", "x"), ("misnamed", "y"), ("corrupt", "x"), ("empty", "x")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG.format(input=given))
        if name != "empty":
            write_onnx(folder / name / "1/model.onnx")
    (folder / "corrupt/1/model.onnx").write_bytes(b"not a model")
    (folder / "chain/1").mkdir(parents=True)
    (folder / "chain/config.pbtxt").write_text(ENSEMBLE)
    return folder


async def ask(addresses: AttachAddresses, model: str, rows: list[list[float]], name: str, output: str) -> np.ndarray:
    async with httpclient.InferenceServerClient(addresses.http) as client:
        given = httpclient.InferInput(name, [len(rows), len(rows[0])], "FP32")
        given.set_data_from_numpy(np.array(rows, dtype=np.float32))
        answer = await client.infer(model, [given], outputs=[httpclient.InferRequestedOutput(output)])
        result: np.ndarray = answer.as_numpy(output)
        return result


async def test_what_it_serves_and_what_it_refuses(repository: Path, tmp_path: Path) -> None:
    """Joined requests of several shapes, one of them bad; an ensemble of dynamic shapes; models that cannot load."""
    async with running_triton(repository, ["good"], tmp_path) as addresses:
        triton = Triton(addresses)
        answers = await asyncio.gather(
            ask(addresses, "good", [[1, 2, 3]], "x", "twice"),
            ask(addresses, "good", [[4, 5, 6], [7, 8, 9]], "x", "minus"),
            ask(addresses, "good", [[5]], "x", "twice"),
            ask(addresses, "good", [[1, 2, 3, 4]], "x", "twice"),
            return_exceptions=True,
        )
        assert answers[0].tolist() == [[2, 4, 6]]  # type: ignore[union-attr]
        assert answers[1].tolist() == [[-4, -5, -6], [-7, -8, -9]]  # type: ignore[union-attr]
        assert answers[2].tolist() == [[10, 10, 10]]  # type: ignore[union-attr]
        refused = answers[3]
        assert isinstance(refused, InferenceServerException)
        assert "model 'good' failed: " in refused.message() and "\n" not in refused.message()

        await triton.load("chain")
        for row in ([1.0, 2.0, 3.0], [4.0]):
            assert (await ask(addresses, "chain", [row], "IN", "OUT")).tolist() == [
                [-2 * v for v in row * (3 // len(row))]
            ]

        for model, said in (
            ("empty", "the model file model.onnx is missing"),
            ("misnamed", "config.pbtxt declares the input 'y' and the model has x"),
            ("corrupt", "the model file cannot be opened: "),
        ):
            with pytest.raises(TritonRefused) as caught:
                await triton.load(model)
            sentence = load_failure(model, str(caught.value))
            assert sentence.startswith(f"model '{model}' cannot be loaded: {said}"), sentence
            assert "At:" not in sentence
