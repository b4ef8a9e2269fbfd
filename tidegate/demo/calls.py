"""The gateway as any program calls it: with the stock client, over both protocols."""

import time
from dataclasses import dataclass

import numpy as np

from tidegate.demo.system import DemoError

_MODEL = "classifier"
_SHAPE = (1, 3, 48, 192)


@dataclass(frozen=True, slots=True)
class Call:
    """One call and its answer."""

    protocol: str
    milliseconds: float
    scores: list[float]
    """The classifier's two scores: upright, upside down."""


def call_both(http_address: str, grpc_address: str) -> list[Call]:
    """The same input over HTTP and gRPC.

    Raises:
        DemoError: a call failed, or the answers differ.
    """
    import tritonclient.grpc
    import tritonclient.http

    calls = []
    for protocol, module, address in (
        ("HTTP", tritonclient.http, http_address),
        ("gRPC", tritonclient.grpc, grpc_address),
    ):
        crop = np.linspace(-1.0, 1.0, num=int(np.prod(_SHAPE)), dtype=np.float32).reshape(_SHAPE)
        with module.InferenceServerClient(address) as client:
            tensor = module.InferInput("x", list(_SHAPE), "FP32")
            tensor.set_data_from_numpy(crop)
            began = time.perf_counter()
            try:
                result = client.infer(_MODEL, [tensor])
            except Exception as error:
                raise DemoError(f"the {protocol} call failed: {error}") from error
            milliseconds = (time.perf_counter() - began) * 1000
            # Not every exporter names its output alike; there is one.
            (name,) = _output_names(result.get_response())
            calls.append(Call(protocol, milliseconds, [float(score) for score in result.as_numpy(name).ravel()]))
    if not np.allclose(calls[0].scores, calls[1].scores, atol=1e-5):
        raise DemoError(f"HTTP and gRPC answer differently: {calls[0].scores} and {calls[1].scores}")
    return calls


def _output_names(response: object) -> list[str]:
    outputs = response["outputs"] if isinstance(response, dict) else response.outputs  # type: ignore[attr-defined]
    return [output["name"] if isinstance(output, dict) else output.name for output in outputs]
