"""What the benchmarks send: one request, prepared once as bytes, for any generator and any side."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tritonclient.grpc import service_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Echo models of this pool: ``ident`` answers once, ``repeat`` as often as asked.
DEPLOYMENTS = Path(__file__).parent / "deployments"

_SERVICE = "/inference.GRPCInferenceService"


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of request. ``bodies`` are sent in turn: HTTP bodies, or gRPC messages without their prefix."""

    protocol: Literal["http", "grpc"]
    path: str
    headers: tuple[tuple[str, str], ...]
    bodies: tuple[bytes, ...]
    streams: bool = False
    """gRPC: the answer is a stream of replies."""

    @property
    def framed_body(self) -> bytes:
        """The first body as it stands on the wire."""
        body = self.bodies[0]
        return body if self.protocol == "http" else struct.pack(">BI", 0, len(body)) + body


def http_infer(model: str, name: str, tensors: "list[NDArray[np.float32]]") -> Work:
    """Binary infer requests with one FP32 input each, all of one shape."""
    first = tensors[0]
    described: dict[str, Any] = {"name": name, "shape": list(first.shape), "datatype": "FP32"}
    described["parameters"] = {"binary_data_size": first.nbytes}
    head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    headers = (("content-type", "application/octet-stream"), ("inference-header-content-length", str(len(head))))
    bodies = tuple(head + tensor.tobytes() for tensor in tensors)
    return Work("http", f"/v2/models/{model}/infer", headers, bodies)


def http_echo(values: int) -> Work:
    """FP32[1, values] in and out."""
    return http_infer("ident", "INPUT0", [np.arange(values, dtype=np.float32).reshape(1, values)])


def grpc_echo(values: int) -> Work:
    """FP32[1, values] in and out."""
    request = service_pb2.ModelInferRequest(model_name="ident")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, values])
    request.raw_input_contents.append(np.arange(values, dtype=np.float32).tobytes())
    return _grpc("ModelInfer", request)


def grpc_repeat(values: int, replies: int) -> Work:
    """FP32[values] in, and out ``replies`` times in one stream."""
    request = service_pb2.ModelInferRequest(model_name="repeat")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[values])
    request.inputs.add(name="REPLIES", datatype="INT32", shape=[1])
    request.raw_input_contents.append(np.arange(values, dtype=np.float32).tobytes())
    request.raw_input_contents.append(np.array([replies], np.int32).tobytes())
    return _grpc("ModelStreamInfer", request, streams=True)


def _grpc(rpc: str, request: Any, *, streams: bool = False) -> Work:
    headers = (("content-type", "application/grpc"), ("te", "trailers"))
    return Work("grpc", f"{_SERVICE}/{rpc}", headers, (request.SerializeToString(),), streams)
