"""Calls over gRPC: every method, tensors of every type and in both forms, streams, errors."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

_RANDOM = random.Random(2)


@dataclass(frozen=True)
class Call:
    """One call: method, messages (protobuf, or bytes as they are), metadata, compression."""

    method: str
    messages: tuple[Any, ...]
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    compression: Any = grpc.Compression.NoCompression
    timeout: float | None = 10.0

    @property
    def is_stream(self) -> bool:
        return self.method == "ModelStreamInfer"

    @property
    def sent(self) -> list[bytes]:
        return [each if isinstance(each, bytes) else each.SerializeToString() for each in self.messages]


def call(method: str, *messages: Any, **more: Any) -> Call:
    return Call(method, messages, **more)


def _input(name: str, datatype: str, shape: Sequence[int], **contents: Any) -> Any:
    made = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    for key, values in contents.items():
        getattr(made.contents, key).extend(values)
    return made


def _parameters(message: Any, **values: Any) -> Any:
    for key, value in values.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(message.parameters[key], kind, value)
    return message


def _raw(name: str, datatype: str, shape: Sequence[int], content: bytes, model: str = "types", **more: Any) -> Any:
    return pb.ModelInferRequest(
        model_name=model, inputs=[_input(name, datatype, shape)], raw_input_contents=[content], **more
    )


def _typed(name: str, datatype: str, model: str = "types", **contents: Any) -> Any:
    count = len(next(iter(contents.values())))
    return pb.ModelInferRequest(model_name=model, inputs=[_input(name, datatype, [count], **contents)])


def _command(words: str, **more: Any) -> Any:
    text = words.encode()
    return _raw("COMMAND", "BYTES", [1], len(text).to_bytes(4, "little") + text, model="probe", **more)


def _strings(*values: bytes) -> bytes:
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)


def _repeat(count: int, text: str = "", **more: Any) -> Any:
    inputs = [_input("COUNT", "INT32", [1]), _input("TEXT", "BYTES", [1])]
    raw = [count.to_bytes(4, "little", signed=True), _strings(text.encode())]
    return pb.ModelInferRequest(model_name="decoupled", inputs=inputs, raw_input_contents=raw, **more)


def _step(sequence: int | str, *, start: bool = False, end: bool = False, model: str = "sequence") -> Any:
    made = _raw("IN", "INT32", [1, 1], (5).to_bytes(4, "little"), model=model)
    return _parameters(made, sequence_id=sequence, sequence_start=start, sequence_end=end)


_SIZES = {"BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
          "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8}  # fmt: skip
_CONTENTS = {
    "BOOL": ("bool_contents", [True, False]), "UINT8": ("uint_contents", [0, 255, 256]), "UINT16": ("uint_contents", [65535]),
    "UINT32": ("uint_contents", [2**32 - 1]), "UINT64": ("uint64_contents", [2**64 - 1]), "INT8": ("int_contents", [-128, 127, 300]),
    "INT16": ("int_contents", [-32768]), "INT32": ("int_contents", [-(2**31)]), "INT64": ("int64_contents", [-(2**63)]),
    "FP16": ("fp32_contents", [1.0]), "BF16": ("fp32_contents", [1.0]), "FP32": ("fp32_contents", [0.1, float("nan"), float("-inf")]),
    "FP64": ("fp64_contents", [0.1, float("inf")]), "BYTES": ("bytes_contents", [b"", b"a", bytes(range(256))]),
}  # fmt: skip

CALLS: dict[str, Call] = {}
for _name, _size in _SIZES.items():
    _some = b"\0\1" if _name == "BOOL" else _RANDOM.randbytes(2 * _size)
    CALLS |= {
        f"{_name}, raw": call("ModelInfer", _raw(f"IN_{_name}", _name, [2], _some)),
        f"{_name}, nothing": call("ModelInfer", _raw(f"IN_{_name}", _name, [0], b"")),
        f"{_name}, too little": call("ModelInfer", _raw(f"IN_{_name}", _name, [3], _some)),
    }
for _name, (_key, _values) in _CONTENTS.items():
    CALLS[f"A-014 {_name}, typed"] = call("ModelInfer", _typed(f"IN_{_name}", _name, **{_key: _values}))

_FP32 = _raw("IN_FP32", "FP32", [3], b"abcdefghijkl")
_TWO = pb.ModelInferRequest(
    model_name="types",
    inputs=[_input("IN_FP32", "FP32", [0]), _input("IN_INT32", "INT32", [2])],
    raw_input_contents=[b"", bytes(range(8))],
    outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in ("OUT_INT32", "OUT_FP32")],
)
_CLASSES = pb.ModelInferRequest(model_name="types", inputs=[_input("IN_FP32", "FP32", [3], fp32_contents=[1, 5, 3])])
_CLASSES.outputs.add(name="OUT_FP32").parameters["classification"].int64_param = 2

CALLS |= {
    "A-011 BYTES, raw": call("ModelInfer", _raw("IN_BYTES", "BYTES", [3], _strings(b"", b"a", bytes(range(256))))),
    "BYTES, wrong lengths": call("ModelInfer", _raw("IN_BYTES", "BYTES", [2], _strings(b"abc") + b"\xff\xff")),
    "A-010 A-014 two inputs, outputs in another order": call("ModelInfer", _TWO),
    "typed and raw at once": call("ModelInfer", pb.ModelInferRequest(
        model_name="types", inputs=[_input("IN_FP32", "FP32", [1], fp32_contents=[1])], raw_input_contents=[b"abcd"])),
    "raw, one too many": call("ModelInfer", pb.ModelInferRequest(
        model_name="types", inputs=[_input("IN_FP32", "FP32", [1])], raw_input_contents=[b"abcd", b""])),
    "raw, one too few": call("ModelInfer", pb.ModelInferRequest(model_name="types", inputs=[_input("IN_FP32", "FP32", [1])])),
    "classification": call("ModelInfer", _CLASSES),
    "A-017 an output that is not": call("ModelInfer", pb.ModelInferRequest(
        model_name="types", inputs=[_input("IN_FP32", "FP32", [1], fp32_contents=[1])],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="nope")])),
    **{f"id {value[:9]!r}": call("ModelInfer", _raw("IN_FP32", "FP32", [1], b"abcd", id=value)) for value in ("", "a/ü 1", "x" * 5000)},
    **{f"A-015 version {value!r}": call("ModelInfer", _raw("IN_FP32", "FP32", [1], b"abcd", model_version=value))
       for value in ("", "1", "01", "1.0.0", "99", "-1", "x", "9" * 25, "0", " 1")},
    **{f"versions {value!r}": call("ModelInfer", _raw("IN", "INT32", [1], b"abcd", model="versions", model_version=value)) for value in ("", "1", "2", "3")},
    **{f"error {code}": call("ModelInfer", _command(f"fail {code} told with ü, % and \n"))
       for code in ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED", "NOTHING")},
    "A-019 a long error": call("ModelInfer", _command("fail INTERNAL " + "long " * 1000)),
    "told": call("ModelInfer", _parameters(_command("tell", id="7"), a=1, b="x", c=True, d=1.5)),
    "reserved": call("ModelInfer", _parameters(_command("tell"), triton_x=True)),
    "metadata": call("ModelInfer", _command("tell"), metadata=(("x-a", "b"), ("x-bin", b"\0\xff"), ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))),
    **{f"compressed: {algorithm}": call("ModelInfer", _raw("IN_FP32", "FP32", [2000], bytes(8000)), compression=getattr(grpc.Compression, algorithm)) for algorithm in ("Gzip", "Deflate")},
    "A-006 33 MB": call("ModelInfer", _raw("IN_UINT8", "UINT8", [33_816_576], bytes(33_816_576))),
    "large, compressed": call("ModelInfer", _raw("IN_UINT8", "UINT8", [3_000_000], _RANDOM.randbytes(1000) * 3000), compression=grpc.Compression.Gzip),
    "a large answer": call("ModelInfer", _command("size 300000")),
    "unknown model": call("ModelInfer", _raw("A", "FP32", [1], b"abcd", model="nope")),
    "no model": call("ModelInfer", pb.ModelInferRequest(inputs=[_input("IN_FP32", "FP32", [1], fp32_contents=[1])])),
    "nothing at all": call("ModelInfer", b""),
    "wrong type": call("ModelInfer", _raw("IN_FP32", "INT32", [1], b"abcd")),
    "wrong shape": call("ModelInfer", _raw("IN_FP32", "FP32", [1, 1], b"abcd")),
    "negative shape": call("ModelInfer", _raw("IN_FP32", "FP32", [-1], b"abcd")),
    "an unknown input": call("ModelInfer", _raw("IN_NOPE", "FP32", [1], b"abcd")),
    "no inputs": call("ModelInfer", pb.ModelInferRequest(model_name="types")),
    "an unknown field": call("ModelInfer", _FP32.SerializeToString() + b"\xf2\x3f\x03abc"),
    "an unknown field in front": call("ModelInfer", b"\xf2\x3f\x03abc" + _FP32.SerializeToString()),
    "the name at the end": call("ModelInfer", pb.ModelInferRequest(inputs=_FP32.inputs, raw_input_contents=_FP32.raw_input_contents).SerializeToString() + b"\x0a\x05types"),
    "the name twice": call("ModelInfer", b"\x0a\x04nope" + _FP32.SerializeToString()),
    "cut short": call("ModelInfer", _FP32.SerializeToString()[:-3]),
    "ensemble": call("ModelInfer", pb.ModelInferRequest(
        model_name="ensemble", inputs=[_input("FIRST", "FP32", [1, 16]), _input("SECOND", "INT64", [1, 1])], raw_input_contents=[bytes(64), bytes(8)])),
    "A-029 decoupled": call("ModelInfer", _repeat(3)),
    "sequence": call("ModelInfer", _step(101, start=True, end=True)),
    "sequence without a start": call("ModelInfer", _step(102)),
    "sequence by text": call("ModelInfer", _step("gabc", start=True, end=True)),
    **{f"metadata of {name or 'nothing'} {version}".strip(): call("ModelMetadata", pb.ModelMetadataRequest(name=name, version=version))
       for name, version in (("types", ""), ("types", "1"), ("types", "9"), ("types", "x"), ("versions", ""), ("versions", "2"), ("ensemble", ""), ("nope", ""), ("", ""))},
    **{f"config of {name or 'nothing'} {version}".strip(): call("ModelConfig", pb.ModelConfigRequest(name=name, version=version))
       for name, version in (("batched", ""), ("batched", "1"), ("types", "9"), ("nope", ""), ("", ""))},
    **{f"{name or 'nothing'} {version} ready": call("ModelReady", pb.ModelReadyRequest(name=name, version=version))
       for name, version in (("types", ""), ("types", "1"), ("types", "9"), ("types", "x"), ("types", "01"), ("nope", ""), ("", ""))},
    **{f"statistics of {name} {version}": call("ModelStatistics", pb.ModelStatisticsRequest(name=name, version=version))
       for name, version in (("nope", ""), ("nope", "1"), ("types", "9"), ("types", "x"))},
    "server live": call("ServerLive", pb.ServerLiveRequest()),
    "server ready": call("ServerReady", pb.ServerReadyRequest()),
    "server metadata": call("ServerMetadata", pb.ServerMetadataRequest()),
    "trace setting of nope": call("TraceSetting", pb.TraceSettingRequest(model_name="nope")),
}  # fmt: skip


def _stream(*messages: Any, **more: Any) -> Call:
    return call("ModelStreamInfer", *messages, **more)


_ERRORS = (("triton_grpc_error", "true"),)
_EMPTY_FINAL = {"triton_enable_empty_final_response": True}
CALLS |= {
    "stream of nothing": _stream(),
    "A-028 stream of five": _stream(*(_command("a", id=str(number)) for number in range(5))),
    "stream, decoupled": _stream(_repeat(5, "ü", id="9")),
    "stream, decoupled, no answers": _stream(_repeat(0)),
    "stream, decoupled, an empty end": _stream(_parameters(_repeat(2, id="1"), **_EMPTY_FINAL)),
    "stream, decoupled, only an empty end": _stream(_parameters(_repeat(0, id="1"), **_EMPTY_FINAL)),
    "stream, decoupled, many": _stream(_repeat(300)),
    "stream, decoupled, an error in it": _stream(_repeat(3, "fail 1", id="1")),
    "stream, the model fails": _stream(_command("fail UNAVAILABLE no", id="1"), _command("b", id="2")),
    "stream, the model fails, as a status": _stream(_command("fail UNAVAILABLE no", id="1"), metadata=_ERRORS),
    "stream, unknown model": _stream(_raw("A", "FP32", [1], b"abcd", model="nope", id="1")),
    "stream, unknown model, as a status": _stream(_raw("A", "FP32", [1], b"abcd", model="nope", id="1"), metadata=_ERRORS),
    "stream, unknown model, then a known one": _stream(_raw("A", "FP32", [1], b"abcd", model="nope", id="1"), _command("b", id="2")),
    "stream, a known model, then an unknown one": _stream(_command("b", id="2"), _raw("A", "FP32", [1], b"abcd", model="nope", id="1")),
    "stream, no model": _stream(pb.ModelInferRequest(id="1")),
    "stream, an empty message": _stream(b""),
    "stream, wrong type": _stream(_raw("IN_FP32", "INT32", [1], b"abcd", id="5")),
    "stream, wrong version": _stream(_raw("IN_FP32", "FP32", [1], b"abcd", id="5", model_version="9")),
    "stream, version x": _stream(_raw("IN_FP32", "FP32", [1], b"abcd", id="5", model_version="x")),
    "stream, compressed": _stream(_raw("IN_FP32", "FP32", [2000], bytes(8000)), compression=grpc.Compression.Gzip),
    "stream, large": _stream(_raw("IN_UINT8", "UINT8", [3_000_000], bytes(3_000_000)), _command("b")),
    "stream, a sequence": _stream(_step(201, start=True), _step(201), _step(201, end=True)),
}  # fmt: skip
