"""The sum of what a sequence has sent so far."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.total = 0

    def execute(self, requests):
        return [self._add(request) for request in requests]

    def _add(self, request):
        if _number(request, "START"):
            self.total = 0
        self.total += _number(request, "IN")
        total = np.array([[self.total]], dtype=np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", total)])


def _number(request, name):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0])
