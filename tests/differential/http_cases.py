"""Calls over HTTP: endpoints, framings, connections, errors. Inference by content: http_infer_cases."""

import gzip
import json
import zlib
from typing import Any

from tests.differential.http_requests import (
    Parts,
    by_json,
    by_text,
    chunked,
    encoded,
    get,
    in_binary,
    infer_path,
    post,
    tensor,
)

# -- every path with every method ---------------------------------------------------------------------------

_OF_TYPES = ("", "/ready", "/config", "/infer", "/generate", "/generate_stream", "/nothing", "/", "/ready/", "/Ready")
PATHS = [
    *("/v2", "/v2/", "//v2", "/V2", "/v2?", "/v2?a=b", "/v2#a", "/v1", "/", "/metrics", "/v2/health", "/v2/models"),
    *("/v2/health/live", "/v2/health/ready", "/v2/health/live/", "/v2/health/live?x", "/v2//health/live"),
    *("/v2/models/", "/v2/models//ready", "/v2//models/types", "/v2/models//types", "/v2/models/types/versions"),
    *(f"/v2/models/types{rest}" for rest in _OF_TYPES),
    *(f"/v2/models/types{rest}?verbose=1" for rest in ("", "/ready", "/config")),
    *(f"/v2/models/nope{rest}" for rest in _OF_TYPES),
    *(
        f"/v2/models/types/versions/{version}"
        for version in ("1", "01", "0", "-1", "x", "99", "1.0.0", "", "1/", "%31")
    ),
    *(f"/v2/models/types/versions/{version}/ready" for version in ("1", "01", "0", "-1", "x", "99", "1.0.0", "1/1")),
    *(f"/v2/models/types/versions/{version}/config" for version in ("1", "0", "x", "99")),
    *(f"/v2/models/types/versions/{9**digits}{rest}" for digits in (18, 20, 25) for rest in ("", "/ready")),
    *(f"/v2/models/versions{rest}" for rest in ("", "/versions/1", "/versions/2", "/versions/3", "/versions/2/ready")),
    *("/v2/models/t%79pes", "/v2/models/types%20", "/v2/models/types%2Fready", "/v2/models/ty+pes", "/v2/models/%"),
    *("/v2/models/" + "n" * 2000, "/v2/models/types/ready?" + "q" * 5000, "/v2/models/a:b@c"),
    *("/v2/models/ensemble", "/v2/models/ensemble/config", "/v2/models/ensemble/ready", "/v2/models/stats/ready"),
    *("/v2/repository", "/v2/repository/", "/v2/repository/index/", "/v2/repository/models", "/v2/repository//index"),
    *("/v2/models/types/trace", "/v2/models/types/versions/1/trace/setting", "/v2/trace", "/v2/logging/"),
    *("/v2/systemsharedmemory", "/v2/systemsharedmemory/", "/v2/cudasharedmemory/region//status"),
]
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")
#: Triton answers HEAD with a body, which breaks the connection; the gateway does not. See the runner.
ENDPOINTS: dict[str, Parts] = {
    f"{method} {path[:80]}": (
        get(path, method=method) if method in ("GET", "HEAD", "TRACE") else post(path, method=method),
    )
    for path in PATHS
    for method in METHODS
}

_SOME = by_json("types", tensor("IN_FP32", "FP32", [0.1, 2, -3, 4e9]))
_MIXED = in_binary(
    "types",
    ("IN_FP32", "FP32", [4], bytes(range(16))),
    id="a/ü 1",
    outputs=[{"name": "OUT_FP32", "parameters": {"binary_data": True}}],
)
_BODY = _SOME.partition(b"\r\n\r\n")[2]
_MIXED_BODY = _MIXED.partition(b"\r\n\r\n")[2]

SERVER: dict[str, Parts] = {
    "absolute target": (get("http://host/v2/models/types"),),
    "absolute target with a port": (get("http://host:8000/v2/models/types/ready?x=1"),),
    "absolute target, other scheme": (get("HTTPS://host/v2"),),
    "absolute target without a path": (get("http://host"),),
    "GET with a body": (post("/v2/models/types", b"{}", method="GET"),),
    "GET with a chunked body": (chunked(post("/v2/models/types", b"{}", method="GET"), 1),),
    "logging": (get("/v2/logging"),),
    "logging, changed": (
        post("/v2/logging", b'{"log_verbose_level":1}'),
        post("/v2/logging", b'{"log_verbose_level":0}'),
    ),
    "logging, bad": (post("/v2/logging", b'{"log_nothing":1}'), post("/v2/logging", b"{")),
    "trace": (get("/v2/trace/setting"), get("/v2/models/types/trace/setting")),
    "trace, unknown model": (get("/v2/models/nope/trace/setting"),),
    "trace, changed": (
        post("/v2/models/types/trace/setting", b'{"trace_rate":"5"}'),
        post("/v2/models/types/trace/setting", b'{"trace_rate":null}'),
    ),
    "trace, bad": (post("/v2/models/types/trace/setting", b'{"trace_rate":"x"}'),),
    "stats of an unknown model": (get("/v2/models/nope/stats"), get("/v2/models/nope/versions/1/stats")),
    "stats of an unknown version": (get("/v2/models/types/versions/9/stats"),),
}

FRAMINGS: dict[str, Parts] = {
    "content-length": (_SOME,),
    "A-001 right, wrong, missing, right": (
        _MIXED,
        in_binary("types", ("IN_FP32", "FP32", [4], bytes(16)), length=99999),
        in_binary("types", ("IN_FP32", "FP32", [4], bytes(16)), length="abc"),
        post(infer_path("types"), _MIXED_BODY),
        _MIXED,
    ),
    "length of the JSON, less": (in_binary("types", ("IN_FP32", "FP32", [4], bytes(16)), length=20),),
    "length of the JSON, negative": (in_binary("types", ("IN_FP32", "FP32", [4], bytes(16)), length=-1),),
    "length of the JSON, hexadecimal": (in_binary("types", ("IN_FP32", "FP32", [4], bytes(16)), length="0x80"),),
    "length of the JSON, huge": (in_binary("types", ("IN_FP32", "FP32", [4], bytes(16)), length="9" * 30),),
    "length of the JSON, all of it": (encoded(_SOME, _BODY, f"Inference-Header-Content-Length: {len(_BODY)}"),),
    **{f"chunks of {size}": (chunked(_SOME, size), chunked(_MIXED, size)) for size in (1, 3, 7, 16, 1000)},
    "chunked and nothing": (chunked(post(infer_path("types")), 5),),
    "chunked, upper case hexadecimal": (chunked(_SOME, 0xAB).replace(b"\r\nab\r\n", b"\r\n00AB\r\n"),),
    "A-004 expected": (
        encoded(_SOME, b"", "Expect: 100-continue").replace(b"Length: 0", b"Length: %d" % len(_BODY)),
        _BODY,
    ),
    "HTTP/1.0": (_SOME.replace(b"HTTP/1.1", b"HTTP/1.0"),),
    "HTTP/1.0 metadata": (get("/v2/models/types").replace(b"HTTP/1.1", b"HTTP/1.0"),),
    "HTTP/1.0 error": (get("/v2/models/types/versions/9").replace(b"HTTP/1.1", b"HTTP/1.0"),),
    "close": (encoded(_SOME, _BODY, "Connection: close"),),
    "Close, in capitals": (encoded(_SOME, _BODY, "CONNECTION: Close"),),
    "keep-alive": (encoded(_SOME, _BODY, "Connection: keep-alive"), _SOME),
    "no host": (_SOME.replace(b"Host: triton\r\n", b""),),
    "two hosts": (_SOME.replace(b"Host: triton", b"Host: a\r\nHost: b"),),
    "upgrade": (encoded(_SOME, _BODY, "Connection: Upgrade", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),),
    "odd headers": (
        encoded(_SOME, _BODY, "X-Empty:", "X-Odd:  a  b ", "x-l\xe4tin: \xe4".replace("l\xe4", "la"), "Cookie: a=b"),
    ),
    "many headers": (encoded(_SOME, _BODY, *(f"X-{number}: {'v' * 100}" for number in range(100))),),
    "a long header": (encoded(_SOME, _BODY, f"X-Long: {'v' * 8000}"),),
    "content type is ignored": (encoded(_SOME, _BODY, "Content-Type: text/xml"),),
    "ten requests on one connection": (_SOME, _MIXED, get("/v2"), by_text("types", "{"), get("/v2/models/types/ready"))
    * 2,
}

_PACKED = gzip.compress(_BODY, mtime=0)
_DEFLATED = zlib.compress(_MIXED_BODY)
_IH = next(line.decode() for line in _MIXED.split(b"\r\n") if line.startswith(b"Inference-Header"))
_LARGE = by_json("types", tensor("IN_INT32", "INT32", list(range(5000))))
COMPRESSION: dict[str, Parts] = {
    "gzip in": (encoded(_SOME, _PACKED, "Content-Encoding: gzip"),),
    "gzip in, chunked": (chunked(encoded(_SOME, _PACKED, "Content-Encoding: gzip"), 13),),
    "gzip, large": (
        encoded(
            _LARGE,
            gzip.compress(_LARGE.partition(b"\r\n\r\n")[2], mtime=0),
            "Content-Encoding: gzip",
            "Accept-Encoding: gzip",
        ),
    ),
    "deflate both ways": (
        post(infer_path("types"), _DEFLATED, _IH, "Content-Encoding: deflate", "Accept-Encoding: deflate"),
    ),
    "raw deflate": (encoded(_SOME, zlib.compress(_BODY)[2:-4], "Content-Encoding: deflate"),),
    "corrupt gzip": (encoded(_SOME, _PACKED[:30] + b"\0" * 10 + _PACKED[40:], "Content-Encoding: gzip"),),
    "gzip cut short": (encoded(_SOME, _PACKED[:-12], "Content-Encoding: gzip"),),
    "no gzip at all": (encoded(_SOME, _BODY, "Content-Encoding: gzip"),),
    "two members": (
        encoded(
            _SOME, gzip.compress(_BODY[:50], mtime=0) + gzip.compress(_BODY[50:], mtime=0), "Content-Encoding: gzip"
        ),
    ),
    **{
        f"in: {name}": (encoded(_SOME, _BODY, f"Content-Encoding: {name}"),)
        for name in ("identity", "br", "GZIP", "gzip, deflate", "zstd", "")
    },
    **{
        f"out: {value}": (
            encoded(_SOME, _BODY, f"Accept-Encoding: {value}"),
            encoded(_MIXED, _MIXED_BODY, f"Accept-Encoding: {value}"),
        )
        for value in (
            "gzip",
            "deflate",
            "identity",
            "br",
            "*",
            "",
            "gzip, deflate",
            "deflate, gzip",
            "gzip;q=0.5, deflate;q=0.8",
            "gzip;q=0",
            "GZIP",
            "x",
        )
    },
    "errors and metadata are plain": (
        encoded(by_text("types", "{"), b"{", "Accept-Encoding: gzip"),
        get("/v2/models/types", "Accept-Encoding: gzip"),
        get("/v2/models/types/config", "Accept-Encoding: gzip"),
    ),
    "generate, gzip in": (
        post("/v2/models/probe/generate", gzip.compress(b'{"COMMAND":"a"}', mtime=0), "Content-Encoding: gzip"),
    ),
}

_TELL = tensor("COMMAND", "BYTES", ["tell"])
_GENERATE = "/v2/models/probe/generate"
_STREAM = "/v2/models/decoupled/generate_stream"


def _generated(path: str, *bodies: Any) -> Parts:
    return tuple(post(path, body.encode() if isinstance(body, str) else json.dumps(body).encode()) for body in bodies)


GENERATE: dict[str, Parts] = {
    "generate": _generated(_GENERATE, {"COMMAND": "hello"}, {"COMMAND": "tell"}),
    "generate with an id and parameters": _generated(
        _GENERATE, {"COMMAND": "tell", "id": "7", "a": 1, "b": "x", "c": True, "d": 1.5, "parameters": {"e": 2}}
    ),
    "generate, bad": _generated(
        _GENERATE,
        "",
        "{",
        "[]",
        "null",
        "{}",
        {"COMMAND": 1},
        {"COMMAND": ["a", "b"]},
        {"COMMAND": None},
        {"COMMAND": {"a": 1}},
        {"COMMAND": "tell", "x": None},
        {"COMMAND": "tell", "x": [1]},
        {"COMMAND": "tell", "triton_x": 1},
        {"COMMAND": "tell", "id": 5},
    ),
    "generate, the model fails": _generated(
        _GENERATE, {"COMMAND": "fail UNAVAILABLE no"}, {"COMMAND": "fail NOT_FOUND no"}
    ),
    "generate, unknown": _generated("/v2/models/nope/generate", {"COMMAND": "a"}),
    "generate, unknown version": _generated("/v2/models/probe/versions/9/generate", {"COMMAND": "a"}),
    "generate, with a version": _generated("/v2/models/probe/versions/1/generate", {"COMMAND": "a"}),
    "generate on a decoupled model": _generated(
        "/v2/models/decoupled/generate", {"COUNT": 1}, {"COUNT": 0}, {"COUNT": 2}
    ),
    "stream": _generated(_STREAM, {"COUNT": 5, "TEXT": "ü"}, {"COUNT": 1}, {"COUNT": 0}),
    "stream with pauses": _generated(_STREAM, {"COUNT": 3, "TEXT": "pause 0.01"}),
    "stream with an error in it": _generated(_STREAM, {"COUNT": 3, "TEXT": "fail 1"}, {"COUNT": 3, "TEXT": "fail 0"}),
    "stream, bad": _generated(_STREAM, "", "{", "{}", {"COUNT": "x"}, {"COUNT": [1, 2]}, {"NOPE": 1}),
    "stream of a model with one answer": _generated(
        "/v2/models/probe/generate_stream", {"COMMAND": "a"}, {"COMMAND": "fail INTERNAL x"}
    ),
    "stream, unknown": _generated("/v2/models/nope/generate_stream", {"COUNT": 1}),
    "stream, long": _generated(_STREAM, {"COUNT": 300}),
    "inference on a decoupled model": (by_json("decoupled", tensor("COUNT", "INT32", [3])),),
}

_ADD = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [5]}


def _step(sequence: Any, *, start: bool = False, end: bool = False) -> bytes:
    parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
    return by_json("sequence", _ADD, parameters=parameters)


SEQUENCES: dict[str, Parts] = {
    "three steps": (_step(71, start=True), _step(71), _step(71, end=True)),
    "a text for an id": (_step("abc", start=True), _step("abc"), _step("abc", end=True)),
    "without a start": (_step(72),),
    "behind the end": (_step(73, start=True, end=True), _step(73)),
    "start twice": (_step(74, start=True), _step(74, start=True), _step(74, end=True)),
    "without an id": (by_json("sequence", _ADD),),
    "id zero": (_step(0, start=True, end=True),),
    "id of the wrong kind": (
        _step(-1, start=True),
        _step(1.5, start=True),
        _step(True, start=True),
        _step(None, start=True),
    ),
    "flags of the wrong kind": (_step(75, start=1, end=True),),  # type: ignore[arg-type]
    "a batch": (
        by_json(
            "sequence", _ADD | {"shape": [2, 1], "data": [1, 2]}, parameters={"sequence_id": 76, "sequence_start": True}
        ),
    ),
}
