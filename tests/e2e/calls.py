"""Calls that end-to-end tests make: the classifier over HTTP and gRPC with the stock tritonclient, and raw bytes."""

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

MODEL = "classifier"
OUTPUT = "save_infer_model/scale_0.tmp_1"
#: One crop, the same in every test: what it is classified as does not matter, that it always is the same does.
CROP = np.linspace(-1, 1, 3 * 48 * 192, dtype=np.float32).reshape(1, 3, 48, 192)


def infer_http(address: str, timeout: float = 120) -> np.ndarray:
    """One inference over HTTP; the probabilities [1, 2]."""
    client = triton_http.InferenceServerClient(address, network_timeout=timeout, connection_timeout=timeout)
    try:
        tensor = triton_http.InferInput("x", list(CROP.shape), "FP32")
        tensor.set_data_from_numpy(CROP)
        return np.asarray(client.infer(MODEL, [tensor]).as_numpy(OUTPUT))
    finally:
        client.close()


def infer_grpc(address: str, timeout: float = 120) -> np.ndarray:
    """One inference over gRPC; the probabilities [1, 2]."""
    client = triton_grpc.InferenceServerClient(address)
    try:
        tensor = triton_grpc.InferInput("x", list(CROP.shape), "FP32")
        tensor.set_data_from_numpy(CROP)
        return np.asarray(client.infer(MODEL, [tensor], client_timeout=timeout).as_numpy(OUTPUT))
    finally:
        client.close()


def json_request() -> bytes:
    """An infer body that is all JSON."""
    tensor = {"name": "x", "shape": list(CROP.shape), "datatype": "FP32", "data": CROP.ravel().tolist()}
    return json.dumps({"id": "a/ü 1", "inputs": [tensor]}).encode()


def binary_request() -> tuple[bytes, int]:
    """An infer body with binary input and output, and the length of its JSON part."""
    data = CROP.tobytes()
    tensor = {
        "name": "x",
        "shape": list(CROP.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"id": "7", "inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + data, len(head)


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer as it came over the wire, nothing decoded."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    first_byte_at: float = field(compare=False)
    """Unix seconds when the head of the answer was there."""


def raw_http(
    address: str, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """One HTTP exchange on a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        first_byte_at = time.time()
        return Answer(response.status, sorted(response.getheaders()), response.read(), first_byte_at)
    finally:
        connection.close()
