"""Merged answers as gRPC messages: the fields of Triton's ``grpc_service.proto`` are named as in its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.ingress.protobuf import bytes_field, nested_field, varint_field
from gateway.pool_wide.operations import Operation

#: HTTP statuses of Triton's errors as gRPC statuses.
_STATUSES = {400: 3, 404: 5, 500: 13, 501: 12, 503: 14}


@dataclass(frozen=True)
class _Message:
    """A message by the numbers of its fields: of text and integers, and of messages; ``maps`` are by text."""

    plain: Mapping[str, int]
    nested: Mapping[str, tuple[int, "_Message"]]
    maps: frozenset[str] = frozenset()


_DURATION = _Message({"count": 1, "ns": 2}, {})


def _durations(*names: str) -> dict[str, tuple[int, _Message]]:
    return {name: (number, _DURATION) for number, name in enumerate(names, 1)}


_INFER = _Message(
    {},
    _durations(
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"
    ),
)
_RESPONSE = _Message({}, _durations("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"))
_BATCH = _Message(
    {"batch_size": 1},
    {"compute_input": (2, _DURATION), "compute_infer": (3, _DURATION), "compute_output": (4, _DURATION)},
)
_MEMORY = _Message({"type": 1, "id": 2, "byte_size": 3}, {})
_STATISTICS = _Message(
    {"name": 1, "version": 2, "last_inference": 3, "inference_count": 4, "execution_count": 5},
    {
        "inference_stats": (6, _INFER),
        "batch_stats": (7, _BATCH),
        "memory_usage": (8, _MEMORY),
        "response_stats": (9, _RESPONSE),
    },
    maps=frozenset(("response_stats",)),
)
_INDEX = _Message({"name": 1, "version": 2, "state": 3, "reason": 4}, {})
_SYSTEM_REGION = _Message({"name": 1, "key": 2, "offset": 3, "byte_size": 4}, {})
_CUDA_REGION = _Message({"name": 1, "device_id": 2, "byte_size": 3}, {})


def message(operation: Operation, target: str, document: Any) -> bytes:
    """The answer to the method ``target``, out of the merged ``document``."""
    if operation is Operation.STATISTICS:
        return b"".join(nested_field(1, _encoded(_STATISTICS, model)) for model in document["model_stats"])
    if operation is Operation.INDEX:
        return b"".join(nested_field(1, _encoded(_INDEX, entry)) for entry in document)
    region = _SYSTEM_REGION if target.startswith("System") else _CUDA_REGION
    return b"".join(_entry(1, each["name"], _encoded(region, each)) for each in document)


def status(http_status: int) -> int:
    """The gRPC status of an error that came with ``http_status``; UNKNOWN where Triton has none."""
    return _STATUSES.get(http_status, 2)


def _encoded(shape: _Message, value: Mapping[str, Any]) -> bytes:
    """In the order of the fields' numbers, as any encoder writes them; zero and empty are left out."""
    parts: list[tuple[int, bytes]] = []
    for name, number in shape.plain.items():
        given = value.get(name)
        if isinstance(given, str) and given:
            parts.append((number, bytes_field(number, given.encode())))
        elif isinstance(given, int) and given:
            parts.append((number, varint_field(number, given)))
    for name, (number, inner) in shape.nested.items():
        given = value.get(name)
        if name in shape.maps and given:
            parts += [(number, _entry(number, key, _encoded(inner, each))) for key, each in given.items()]
        elif isinstance(given, Sequence):
            parts += [(number, nested_field(number, _encoded(inner, each))) for each in given]
        elif given is not None and name not in shape.maps:
            parts.append((number, nested_field(number, _encoded(inner, given))))
    return b"".join(part for _, part in sorted(parts, key=lambda part: part[0]))


def _entry(number: int, key: str, value: bytes) -> bytes:
    """One entry of a map."""
    return nested_field(number, bytes_field(1, key.encode()) + nested_field(2, value))
