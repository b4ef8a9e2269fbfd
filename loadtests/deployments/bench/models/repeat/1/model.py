"""Decoupled echo: answers each request with its input, as many times as it asks for."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """See the module."""

    def execute(self, requests: list) -> None:
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            replies = int(pb_utils.get_input_tensor_by_name(request, "REPLIES").as_numpy()[0])
            sender = request.get_response_sender()
            for _ in range(replies):
                output = pb_utils.Tensor("OUTPUT0", values)
                sender.send(pb_utils.InferenceResponse(output_tensors=[output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
