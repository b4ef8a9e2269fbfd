"""COUNT answers, numbered; TEXT ``fail N`` makes the one of that number an error, ``pause S`` waits between them."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            _answer(request)


def _answer(request):
    sender = request.get_response_sender()
    count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().reshape(-1)[0])
    text = pb_utils.get_input_tensor_by_name(request, "TEXT")
    said = b"" if text is None else text.as_numpy().reshape(-1)[0]
    verb, _, rest = said.partition(b" ")
    for number in range(count):
        if verb == b"pause":
            time.sleep(float(rest))
        if verb == b"fail" and number == int(rest):
            error = pb_utils.TritonError("told to fail", pb_utils.TritonError.UNAVAILABLE)
            sender.send(pb_utils.InferenceResponse([], error=error))
            continue
        index = pb_utils.Tensor("INDEX", np.array([number], dtype=np.int32))
        sender.send(
            pb_utils.InferenceResponse([index, pb_utils.Tensor("TEXT_OUT", np.array([said], dtype=np.object_))])
        )
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
