"""COMMAND: ``tell`` (what came with the request), ``fail CODE words``, ``size BYTES``, ``sleep SECONDS``."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    command = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy().reshape(-1)[0].decode("utf-8", "replace")
    verb, _, rest = command.partition(" ")
    if verb == "fail":
        code, _, words = rest.partition(" ")
        return pb_utils.InferenceResponse([], error=pb_utils.TritonError(words, getattr(pb_utils.TritonError, code)))
    if verb == "sleep":
        time.sleep(float(rest))
    said = "x" * int(rest) if verb == "size" else _told(request) if verb == "tell" else command
    return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", np.array([said.encode()], dtype=np.object_))])


def _told(request):
    told = {
        "id": request.request_id(),
        "correlation": request.correlation_id(),
        "flags": request.flags(),
        "timeout": request.timeout(),
        "parameters": json.loads(request.parameters() or "{}"),
        "wanted": sorted(request.requested_output_names()),
    }
    return json.dumps(told, sort_keys=True)
