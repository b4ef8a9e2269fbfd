"""The backend ``onnxruntime`` for a Triton without the C++ one: serves ``<version>/model.onnx`` on the CPU.

Triton takes this file for any model whose config.pbtxt says ``backend: "onnxruntime"``. It reads the same
``parameters`` as the C++ backend: ``intra_op_thread_count``, ``inter_op_thread_count``, ``enable_mem_arena``,
``enable_mem_pattern``. Parameters of the GPU (``gpu_mem_limit`` ...) have no meaning here and are ignored.

The requests of one ``execute`` are one batch: they are joined along the first dimension, run once and split again.
Requests whose shapes differ in another dimension cannot be joined and run in one group for each shape.
"""

import json
import os
import select
import threading

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance of one model; Triton gives each instance a process of its own."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        # config.pbtxt says it all; a guess of ours could differ from what the C++ backend says of the same file.
        return auto_complete_model_config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self._name = args["model_name"]
        _end_with_triton()
        self._batched = config["max_batch_size"] > 0
        path = os.path.join(
            args["model_repository"], args["model_version"], config.get("default_model_filename") or "model.onnx"
        )
        if not os.path.isfile(path):
            raise pb_utils.TritonModelException(f"the model file {os.path.basename(path)} is missing")
        try:
            self._session = onnxruntime.InferenceSession(
                path, _session_options(config), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # noqa: BLE001 - whatever the library raises, Triton gets one sentence
            raise pb_utils.TritonModelException(f"the model file cannot be opened: {_sentence(error)}") from None
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._string_inputs = {i.name for i in self._session.get_inputs() if i.type == "tensor(string)"}
        _check_names(config, self._session)

    def execute(self, requests):
        groups = {}
        responses = [None] * len(requests)
        for position, request in enumerate(requests):
            inputs = {tensor.name(): self._array(tensor) for tensor in request.inputs()}
            key = tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(inputs.items()))
            groups.setdefault(key if self._batched else position, []).append((position, request, inputs))
        for group in groups.values():
            for position, response in self._run(group):
                responses[position] = response
        return responses

    def _run(self, group):
        """[(position, request, inputs)] of joinable requests -> [(position, response)]."""
        requests = [request for _, request, _ in group]
        wanted = [name for name in self._outputs if any(name in r.requested_output_names() for r in requests)]
        arrays = [inputs for _, _, inputs in group]
        try:
            split = [self._session.run(wanted, arrays[0])] if len(group) == 1 else self._run_joined(wanted, arrays)
        except Exception as error:  # noqa: BLE001 - whatever the library raises, the caller gets one sentence
            if len(group) > 1:
                # One bad request must not fail those that happened to wait next to it.
                return [answer for member in group for answer in self._run([member])]
            message = f"model '{self._name}' failed: {_sentence(error)}"
            return [(group[0][0], pb_utils.InferenceResponse(error=pb_utils.TritonError(message)))]
        return [
            (position, _response(request, dict(zip(wanted, outputs, strict=True))))
            for (position, request, _), outputs in zip(group, split, strict=True)
        ]

    def _run_joined(self, wanted, arrays):
        sizes = [next(iter(inputs.values())).shape[0] for inputs in arrays]
        joined = {name: np.concatenate([inputs[name] for inputs in arrays]) for name in arrays[0]}
        outputs = self._session.run(wanted, joined)
        for name, output in zip(wanted, outputs, strict=True):
            if output.shape[:1] != (sum(sizes),):
                raise ValueError(f"output '{name}' does not have one row for each row of the inputs")
        cuts = np.cumsum(sizes)[:-1]
        return list(zip(*(np.split(output, cuts) for output in outputs), strict=True))

    def _array(self, tensor):
        array = tensor.as_numpy()
        if tensor.name() in self._string_inputs:
            return np.array([value.decode("utf-8", "replace") for value in array.flat], dtype=object).reshape(
                array.shape
            )
        return array


def _end_with_triton():
    """A stub in the middle of a request does not notice that its server was killed, and would stay for ever."""
    server = os.pidfd_open(os.getppid())

    def wait():
        select.select([server], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _response(request, outputs):
    tensors = [pb_utils.Tensor(name, outputs[name]) for name in request.requested_output_names() if name in outputs]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _session_options(config):
    parameters = {key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()}
    options = onnxruntime.SessionOptions()
    # Idle threads that spin for work would take the processor from the other models of this replica.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", "0"))
    options.inter_op_num_threads = int(parameters.get("inter_op_thread_count", "0"))
    options.enable_cpu_mem_arena = parameters.get("enable_mem_arena", "1") != "0"
    options.enable_mem_pattern = parameters.get("enable_mem_pattern", "1") != "0"
    return options


def _check_names(config, session):
    """config.pbtxt may only name tensors that the model has."""
    for kind, tensors in (("input", session.get_inputs()), ("output", session.get_outputs())):
        known = [tensor.name for tensor in tensors]
        for declared in config[kind]:
            if declared["name"] not in known:
                raise pb_utils.TritonModelException(
                    f"config.pbtxt declares the {kind} '{declared['name']}' and the model has {', '.join(known)}"
                )


def _sentence(error):
    """The last line of a library's error that says something, without its path prefix."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
