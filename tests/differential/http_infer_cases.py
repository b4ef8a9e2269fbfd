"""Inference over HTTP: every data type and form, parameters, and bodies that are wrong in every way."""

import json
import random
import struct
from typing import Any

from tests.differential.http_requests import (
    Parts,
    by_json,
    by_text,
    in_binary,
    infer_path,
    post,
    strings,
    tensor,
)

_RANDOM = random.Random(1)
_SIZES = {"BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
          "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8}  # fmt: skip
_FLOATS = ("FP32", "FP64")
_BITS = {"FP16": ("<e", 2), "FP32": ("<f", 4), "FP64": ("<d", 8)}


def _binary(datatype: str, content: bytes, **more: Any) -> bytes:
    count = len(content) // _SIZES[datatype]
    return in_binary("types", (f"IN_{datatype}", datatype, [count], content), **more)


def _out(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": f"OUT_{name}", "parameters": parameters}


def _edges(datatype: str) -> list[Any]:
    if datatype == "BOOL":
        return [True, False]
    if datatype in _FLOATS or datatype in ("FP16", "BF16"):
        return [0, -0.0, 1, -1.5, 0.1, 1e-40, 3.4e38]
    bits = int(datatype.lstrip("UINT"))
    unsigned = datatype.startswith("U")
    return [0, 1, 2 ** (bits - (not unsigned)) - 1, 0 if unsigned else -(2 ** (bits - 1))]


TYPES: dict[str, Parts] = {}
for _name, _size in _SIZES.items():
    _some = bytes(_RANDOM.randrange(2) for _ in range(9)) if _name == "BOOL" else _RANDOM.randbytes(9 * _size)
    TYPES |= {
        f"{_name} in JSON": (by_json("types", tensor(f"IN_{_name}", _name, _edges(_name))),),
        f"{_name} in binary": (_binary(_name, _some, outputs=[_out(_name, binary_data=True)]),),
        f"{_name} in binary, out in JSON": (_binary(_name, _some),),
        f"{_name} in JSON, out in binary": (
            by_json("types", tensor(f"IN_{_name}", _name, _edges(_name)), parameters={"binary_data_output": True}),
        ),
        f"{_name}, nothing": (
            by_json("types", tensor(f"IN_{_name}", _name, [])),
            _binary(_name, b"", parameters={"binary_data_output": True}),
        ),
        f"{_name}, raw": (
            post(infer_path("types"), _some, "Inference-Header-Content-Length: 0"),  # which of the inputs?
        ),
        f"{_name}, too little and too much": (
            in_binary("types", (f"IN_{_name}", _name, [9], _some[:-1])),
            in_binary("types", (f"IN_{_name}", _name, [9], _some + b"x")),
            in_binary("types", (f"IN_{_name}", _name, [9], _some), size=9 * _size + 1),
        ),
        f"{_name}, values of other kinds": tuple(
            by_json("types", tensor(f"IN_{_name}", _name, [value]))
            for value in (True, 1, -1, 300, 70000, 2**32, 2**63, 2**64, -(2**63), 1.5, -0.5, 1e300, "1", "", None, [1], {}, [])
        ),
        f"{_name} called by another name": (by_json("types", tensor(f"IN_{_name}", "INVALID", [1])),),
    }  # fmt: skip

for _name in _FLOATS:
    TYPES[f"A-012 {_name}, not finite, in JSON"] = tuple(
        by_text(
            "types", '{"inputs":[{"name":"IN_%s","shape":[1],"datatype":"%s","data":[%s]}]}' % (_name, _name, token)
        )
        for token in (
            "NaN",
            "Infinity",
            "-Infinity",
            "Inf",
            "nan",
            "1e400",
            "-1e400",
            "1e-400",
            "0.1e",
            "01",
            ".5",
            "+1",
        )
    )
for _name, (_form, _) in _BITS.items():
    _odd = b"".join(struct.pack(_form, value) for value in (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0))
    TYPES[f"A-009 A-012 {_name}, not finite, in binary"] = (
        _binary(_name, _odd, outputs=[_out(_name, binary_data=True)]),
        _binary(_name, _odd),
    )
TYPES["signalling NaN"] = (_binary("FP32", b"\x01\0\xa0\x7f\x01\0\xa0\xff", outputs=[_out("FP32", binary_data=True)]),)

_ALL_BYTES = bytes(range(256))
TYPES |= {
    "A-011 BYTES in JSON": (by_json("types", tensor("IN_BYTES", "BYTES", ["", "a", "é€", "\0", "\U0001f600", '"\\'])),),
    "A-011 BYTES in binary": (
        in_binary("types", ("IN_BYTES", "BYTES", [4], strings(b"", b"a", "é€".encode(), _ALL_BYTES)), outputs=[_out("BYTES", binary_data=True)]),
    ),
    "A-011 BYTES in binary, out in JSON": (
        in_binary("types", ("IN_BYTES", "BYTES", [2], strings(b"a", "é€".encode()))),
        in_binary("types", ("IN_BYTES", "BYTES", [1], strings(_ALL_BYTES))),
    ),
    "A-011 BYTES, large": (
        in_binary("types", ("IN_BYTES", "BYTES", [1], strings(_RANDOM.randbytes(1_000_000))), outputs=[_out("BYTES", binary_data=True)]),
    ),
    "BYTES, raw": (
        post(infer_path("probe"), strings(b"hello"), "Inference-Header-Content-Length: 0"),
        post(infer_path("probe"), b"hello", "Inference-Header-Content-Length: 0"),
        post(infer_path("probe"), strings(b"hello")),
        post(infer_path("probe"), strings(b"a", b"b"), "Inference-Header-Content-Length: 0"),
        post(infer_path("probe"), b"", "Inference-Header-Content-Length: 0"),
    ),
    "BYTES, wrong lengths": (
        in_binary("types", ("IN_BYTES", "BYTES", [1], b"\xff\xff\xff\xffa")),
        in_binary("types", ("IN_BYTES", "BYTES", [2], strings(b"a"))),
        in_binary("types", ("IN_BYTES", "BYTES", [1], strings(b"a", b"b"))),
        in_binary("types", ("IN_BYTES", "BYTES", [1], b"\0\0")),
    ),
    "BYTES, values of other kinds": tuple(
        by_json("types", tensor("IN_BYTES", "BYTES", [value])) for value in (1, True, None, 1.5, ["a"], {})
    ),
    "A-010 two inputs, the first one empty": (
        in_binary("types", ("IN_FP32", "FP32", [0], b""), ("IN_INT32", "INT32", [2], bytes(range(8))), parameters={"binary_data_output": True}),
        by_json("types", tensor("IN_FP32", "FP32", []), tensor("IN_INT32", "INT32", [1, 2])),
    ),
    "A-010 a zero in the shape": (
        by_json("types", tensor("IN_GRID", "FP32", [], [2, 0])),
        by_json("types", tensor("IN_GRID", "FP32", [], [0, 3])),
        in_binary("types", ("IN_GRID", "FP32", [2, 0], b""), parameters={"binary_data_output": True}),
    ),
    "all types at once": (
        in_binary(
            "types",
            *((f"IN_{name}", name, [3], _RANDOM.randbytes(3 * size) if name != "BOOL" else b"\0\1\1") for name, size in _SIZES.items()),
            ("IN_BYTES", "BYTES", [1], strings(b"x")),
            parameters={"binary_data_output": True},
        ),
    ),
    "nested data": (
        by_json("types", tensor("IN_GRID", "FP32", [[1, 2], [3, 4]], [2, 2])),
        by_json("types", tensor("IN_GRID", "FP32", [1, 2, 3, 4], [2, 2])),
        by_json("types", tensor("IN_GRID", "FP32", [[[1], 2], 3, [[4]]], [2, 2])),
        by_json("types", tensor("IN_GRID", "FP32", [[1, 2], [3]], [2, 2])),
    ),
    "one kilobyte to two megabytes": tuple(
        in_binary("types", ("IN_UINT8", "UINT8", [size], _RANDOM.randbytes(size)), parameters={"binary_data_output": True})
        for size in (1_000, 65_535, 65_536, 65_537, 200_000, 2_000_000)
    ),
}  # fmt: skip

_FP32 = tensor("IN_FP32", "FP32", [1, 5, 3])
_TELL = tensor("COMMAND", "BYTES", ["tell"])

REQUESTS: dict[str, Parts] = {
    "A-016 ids": tuple(
        by_json("types", _FP32, id=value)
        for value in ("", "a", "a/ü 1", '"', "\\", "\0", "x" * 5000, 7, None, True, [], {}, 1.5)
    ),
    "ids reach the model": tuple(by_json("probe", _TELL, id=value) for value in ("a/ü 1", "")),
    "parameters reach the model": (
        by_json("probe", _TELL, parameters={"a": 1, "b": -1, "c": "text", "d": True, "e": 1.5, "f": 2**63 - 1}),
    ),
    "parameters of other kinds": tuple(
        by_json("probe", _TELL, parameters=value)
        for value in ({"a": None}, {"a": []}, {"a": {"b": 1}}, {"a": 2**64}, {"": 1}, [], [1], "x", 1, None, {})
    ),
    "reserved parameters": tuple(
        by_json("probe", _TELL, parameters={key: True}) for key in ("triton_x", "triton_enable_empty_final_response", "Triton_x")
    ),
    "priority and timeout": tuple(
        by_json("batched", tensor("INPUT0", "FP32", [1] * 16, [1, 16]), tensor("INPUT1", "INT64", [1], [1, 1]), parameters=value)
        for value in (
            {"priority": 1}, {"priority": 3}, {"priority": 4}, {"priority": 0}, {"priority": -1}, {"priority": "1"}, {"priority": 2**64},
            {"timeout": 10_000_000}, {"timeout": 0}, {"timeout": -1}, {"timeout": "5"}, {"timeout": 1.5}, {"binary_data_output": 1},
        )
    ),
    "outputs": tuple(
        by_json("types", _FP32, tensor("IN_INT32", "INT32", [7]), outputs=value)
        for value in (
            [], [{"name": "OUT_INT32"}, {"name": "OUT_FP32"}], [{"name": "OUT_FP32"}, {"name": "OUT_FP32"}], [{"name": "nope"}],
            [{"name": "OUT_BOOL"}], [{}], [{"name": 1}], {}, "x", None, [None], [{"name": "OUT_FP32", "parameters": []}],
            [{"name": "OUT_FP32", "parameters": {"binary_data": 1}}], [{"name": "OUT_FP32", "parameters": {"nothing": 1}}],
        )
    ),
    "binary for some outputs": (
        by_json("types", _FP32, tensor("IN_INT32", "INT32", [7]), outputs=[_out("FP32", binary_data=True), _out("INT32", binary_data=False)]),
        by_json(
            "types", _FP32, tensor("IN_INT32", "INT32", [7]),
            outputs=[_out("FP32", binary_data=False), {"name": "OUT_INT32"}], parameters={"binary_data_output": True},
        ),
    ),
    "classification": tuple(
        by_json("types", _FP32, outputs=[_out("FP32", classification=count)]) for count in (0, 1, 2, 3, 9, -1, "2", 1.5, True, 2**40)
    ),
    "classification in binary": (by_json("types", _FP32, outputs=[_out("FP32", classification=3, binary_data=True)]),),
    "classification of what has no labels": (
        by_json("types", tensor("IN_UINT8", "UINT8", [1, 2]), outputs=[_out("UINT8", classification=1)]),
        by_json("types", tensor("IN_BOOL", "BOOL", [True, False]), outputs=[_out("BOOL", classification=1)]),
        in_binary("types", ("IN_FP16", "FP16", [2], b"abcd"), outputs=[_out("FP16", classification=1)]),
    ),
    "shared memory that nobody registered": (
        by_json("types", {"name": "IN_FP32", "shape": [4], "datatype": "FP32", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}}),
        by_json("types", _FP32, outputs=[_out("FP32", shared_memory_region="r", shared_memory_byte_size=16)]),
    ),
    "versions": tuple(
        post(f"/v2/models/versions{version}/infer", json.dumps({"inputs": [tensor("IN", "INT32", [1])]}).encode())
        for version in ("", "/versions/1", "/versions/3", "/versions/2", "/versions/0", "/versions/03", "/versions/x", "/versions/")
    ),
    "A-015 versions that are none": tuple(
        post(f"/v2/models/types/versions/{version}/infer", json.dumps({"inputs": [_FP32]}).encode())
        for version in ("1.0.0", "99", "-1", "+1", "1 ".strip() + "a", "99999999999999999999", "9223372036854775807", "9223372036854775808")
    ),
    "ensemble": (
        by_json("ensemble", tensor("FIRST", "FP32", [0.5] * 32, [2, 16]), tensor("SECOND", "INT64", [1, 2**62], [2, 1])),
        by_json("ensemble", tensor("FIRST", "FP32", [0.5] * 16, [1, 16])),
        by_json("ensemble", tensor("FIRST", "FP32", [0.5] * 15, [1, 15]), tensor("SECOND", "INT64", [1], [1, 1])),
        by_json("ensemble", tensor("FIRST", "FP32", [0.5] * 144, [9, 16]), tensor("SECOND", "INT64", [1] * 9, [9, 1])),
    ),
    "a batch": tuple(
        by_json("batched", tensor("INPUT0", "FP32", [0.5] * 16 * size, [size, 16]), tensor("INPUT1", "INT64", [7] * size, [size, 1]))
        for size in (1, 2, 8, 9, 0)
    ),
    "batches that disagree": (
        by_json("batched", tensor("INPUT0", "FP32", [0.5] * 16, [1, 16]), tensor("INPUT1", "INT64", [7, 7], [2, 1])),
        by_json("batched", tensor("INPUT0", "FP32", [0.5] * 16, [16]), tensor("INPUT1", "INT64", [7], [1])),
    ),
    "errors of the model": tuple(
        by_json("probe", tensor("COMMAND", "BYTES", [f"fail {code} said with ü and \" and \n"]))
        for code in ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED", "NOTHING")
    ),
    "A-019 a long error": (by_json("probe", tensor("COMMAND", "BYTES", ["fail INTERNAL " + "long " * 2000])),),
    "a large answer in JSON": (by_json("probe", tensor("COMMAND", "BYTES", ["size 300000"])),),
    "unknown model": (by_json("nope", _FP32), by_json("typesx", _FP32)),
}  # fmt: skip


def _with(**changed: Any) -> str:
    """A good request with keys of its input changed; ``...`` takes a key away."""
    given = {**_FP32, **changed}
    return json.dumps({"inputs": [{key: value for key, value in given.items() if value is not ...}]})


_GOOD = json.dumps({"inputs": [_FP32]})
#: A-018. Left out is what ends this Triton, or comes near to it (the gateway refuses some of it): shapes of more elements
#: than memory holds, JSON nested many thousand deep, classification of BYTES and of nothing.
MALFORMED: dict[str, str] = {
    **{f"not JSON {number}": body for number, body in enumerate((
        "{", "}", "[", "]", "{}", "[]", "null", "true", "1", '""', "abc", "{'inputs':[]}", '{"inputs":}', '{"inputs":[}', '{"inputs":[]',
        '{"inputs":[],}', '{"inputs":[],"inputs":[]}', "\ufeff" + _GOOD, _GOOD + "x", _GOOD + "{}", " \t\r\n" + _GOOD + "\n", _GOOD[:-1], "/*a*/" + _GOOD,
        _GOOD.replace("5", "5,"), _GOOD.replace("5", "0x5"), _GOOD.replace("5", "5_0"), _GOOD.replace('"FP32"', "'FP32'"), "\0", _GOOD + "\0", "\0" + _GOOD,
    ))},
    **{f"inputs: {json.dumps(value)[:30]}": json.dumps({"inputs": value}) for value in ({}, None, "x", 1, True, [None], [1], ["x"], [[]], [{}], [_FP32, None])},
    "no inputs": json.dumps({"id": "a"}),
    "an input twice": json.dumps({"inputs": [_FP32, _FP32]}),
    "an unknown input": _with(name="IN_NOPE"),
    "more unknown keys": json.dumps({"inputs": [{**_FP32, "x": 1}], "y": {"z": []}}),
    **{f"name: {json.dumps(value)[:30]}": _with(name=value) for value in (1, None, [], {}, "", "IN_FP32\0", ...) if value is not ...},
    **{f"shape: {json.dumps(value)[:40]}": _with(shape=value) for value in (
        "3", 3, None, {}, ["3"], [3.0], [3.5], [None], [[3]], [-3], [-1], [4], [2], [], [3, 1], [1, 3], [3, 0], [True],
    )},
    **{f"datatype: {json.dumps(value)[:30]}": _with(datatype=value) for value in (1, None, [], {}, "", "fp32", "FP33", "INT32", "BYTES", "FP32 ")},
    **{f"data: {json.dumps(value)[:30]}": _with(data=value) for value in (
        1, None, "x", {}, True, [1, 2], [1, 2, 3, 4], [], [[1, 2, 3]], [[1], [2, 3]], [[[[1, 2, 3]]]], [1, "2", 3], [1, None, 3], [1, {}, 3], [1, True, 3], [[], 1, 2, 3],
    )},
    **{f"without {key}": _with(**{key: ...}) for key in ("name", "shape", "datatype", "data")},
    **{f"parameters: {json.dumps(value)[:40]}": _with(parameters=value) for value in (
        [], None, "x", 1, {"a": 1}, {"a": None}, {"binary_data_size": 12}, {"binary_data_size": -1}, {"binary_data_size": "12"}, {"binary_data_size": 2**63}, {"binary_data_size": 1.5},
        {"shared_memory_region": 1}, {"shared_memory_region": "r"}, {"shared_memory_region": "r", "shared_memory_byte_size": -1},
    )},
    "a lone surrogate": _GOOD.replace('"IN_FP32"', '"\\ud800"'),
    "a bad escape": _GOOD.replace('"IN_FP32"', '"\\x"'),
    "a control character in a string": _GOOD.replace('"IN_FP32"', '"a\x01b"'),
    "an escaped name": _GOOD.replace("IN_FP32", "IN_FP3\\u0032"),
    "deep lists as data": _GOOD.replace("[1, 5, 3]", "[" * 40 + "1, 5, 3" + "]" * 40),
    "keys twice": _GOOD.replace('"name"', '"name": "IN_INT32", "name"'),
    "a number of a thousand digits": _GOOD.replace("5", "5" * 1000),
    "a key of 100 kB": _GOOD.replace('"name"', '"' + "k" * 100_000 + '": 1, "name"'),
}  # fmt: skip
BODIES: dict[str, Parts] = {name: (by_text("types", body),) for name, body in MALFORMED.items()}
BODIES |= {
    "A-018 an empty body": (post(infer_path("types")), post(infer_path("batched")), post(infer_path("probe"))),
    "bytes that are no UTF-8": (post(infer_path("types"), b'{"inputs":"\xff\xfe"}'), post(infer_path("types"), b"\xff\xfe{\0}\0")),
    "UTF-16": (post(infer_path("types"), _GOOD.encode("utf-16")),),
    "binary_data_size": tuple(
        in_binary("types", ("IN_FP32", "FP32", [4], bytes(16)), size=size) for size in (0, 1, 15, 17, -1, 2**31, 2**62)
    ),
    "binary_data_size that is no number": tuple(
        in_binary("types", ("IN_FP32", "FP32", [4], bytes(16)), size=size) for size in ("16", 16.0, None, True)  # type: ignore[arg-type]
    ),
    "bytes left over": (in_binary("types", ("IN_FP32", "FP32", [4], bytes(16)), size=8),),
}  # fmt: skip
