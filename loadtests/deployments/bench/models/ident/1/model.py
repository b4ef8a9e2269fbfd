"""Echo model: answers with its input."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """See the module."""

    def execute(self, requests: list) -> list:
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            output = pb_utils.Tensor("OUTPUT0", tensor)
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
