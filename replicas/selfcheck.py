"""The known-answer check: a known input must give the known output through Triton's Python backend.

Under numpy 2 the stub of the nvidia-pytriton wheel answers with tensors of size zero and no error, so a replica that
looks healthy would serve nothing. The model is loaded from the request itself and unloaded again: it never stands in
the repository nor in its index. Triton writes it to a directory of its own in /tmp, which only an orderly end removes;
the mark in its first line lets ``leftovers`` find it after a hard one.
"""

import base64
from importlib.metadata import version

from replicas.triton import Triton, TritonRefused

_MODEL = "tidegate_selfcheck"
_LIMIT_SECONDS = 60.0
_GIVEN = [1.5, -2.0, 0.0, 1024.0]
_KNOWN = [4.0, -3.0, 1.0, 2049.0]

_CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "GIVEN").as_numpy()
            output = pb_utils.Tensor("ANSWER", given * 2 + given.dtype.type(1))
            answers.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return answers
"""

_CONFIG = {
    "name": _MODEL,
    "backend": "python",
    "max_batch_size": 0,
    "input": [{"name": "GIVEN", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "ANSWER", "data_type": "TYPE_FP32", "dims": [-1]}],
    "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
}


class SelfCheckFailed(Exception):
    """The Python backend does not compute; the message is one sentence that says why, as far as it is known."""


async def check_known_answer(triton: Triton, mark: str) -> None:
    """Load the model, ask it, compare, unload it. ``mark`` is the replica's (see ``replicas.leftovers``).

    Raises:
        SelfCheckFailed: the answer is not the known one, or the model cannot be loaded or asked.
        TritonUnreachable: Triton went away meanwhile.
    """
    code = base64.b64encode(f"# {mark}\n{_CODE}".encode()).decode()
    try:
        await triton.load(_MODEL, config=_CONFIG, files={"1/model.py": code})
        try:
            request = {"inputs": [{"name": "GIVEN", "datatype": "FP32", "shape": [len(_GIVEN)], "data": _GIVEN}]}
            answer = await triton.infer(_MODEL, request, limit_seconds=_LIMIT_SECONDS)
        finally:
            await triton.unload(_MODEL)
    except TritonRefused as error:
        raise failure(str(error)) from error
    compare(answer)


def failure(said: str) -> SelfCheckFailed:
    """What Triton's refusal of the self-check means."""
    # How an empty tensor looks when the answer is JSON; in binary it is no error at all.
    if "shape does not match size" in said:
        return _empty()
    return SelfCheckFailed(f"the self-check of Triton's Python backend failed: {said}")


def compare(answer: dict[str, object]) -> None:
    """Raises SelfCheckFailed unless ``answer`` (JSON of the inference) is the known one."""
    outputs = answer.get("outputs")
    output = outputs[0] if isinstance(outputs, list) and outputs else {}
    data = output.get("data") if isinstance(output, dict) else None
    if data == _KNOWN:
        return
    if not data:
        raise _empty()
    raise SelfCheckFailed(f"Triton's Python backend computes wrongly: {_KNOWN} was expected and {data} came")


def _empty() -> SelfCheckFailed:
    return SelfCheckFailed(
        f"Triton's Python backend answers with empty tensors: "
        f"it needs a numpy below 2 and numpy {version('numpy')} is installed"
    )
