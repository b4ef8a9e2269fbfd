"""Building requests of the Open Inference Protocol as bytes."""

import json
from collections.abc import Sequence
from typing import Any

#: What is sent, in order; after each part one answer (an interim one counts) is read.
Parts = tuple[bytes, ...]


def head(first: str, *lines: str) -> bytes:
    return "\r\n".join((first, "Host: triton", *lines, "", "")).encode("latin-1")


def get(path: str, *lines: str, method: str = "GET") -> bytes:
    return head(f"{method} {path} HTTP/1.1", *lines)


def post(path: str, body: bytes = b"", *lines: str, method: str = "POST") -> bytes:
    return head(f"{method} {path} HTTP/1.1", *lines, f"Content-Length: {len(body)}") + body


def infer_path(model: str) -> str:
    return f"/v2/models/{model}/infer"


def tensor(
    name: str, datatype: str, data: Any, shape: Sequence[int] | None = None, **parameters: Any
) -> dict[str, Any]:
    """An input with its data in JSON."""
    made: dict[str, Any] = {"name": name, "shape": [len(data)] if shape is None else list(shape), "datatype": datatype}
    if parameters:
        made["parameters"] = parameters
    return made | {"data": data}


def by_json(model: str, *inputs: Any, lines: Sequence[str] = (), **more: Any) -> bytes:
    """Inference with everything in JSON; ``more`` are further keys of the request."""
    return post(infer_path(model), json.dumps({"inputs": inputs, **more}).encode(), *lines)


def by_text(model: str, body: str, *lines: str) -> bytes:
    """Inference with a body that need not be JSON."""
    return post(infer_path(model), body.encode(), *lines)


def in_binary(
    model: str,
    *inputs: tuple[str, str, Sequence[int], bytes],
    lines: Sequence[str] = (),
    size: int | None = None,
    length: int | str | None = None,
    **more: Any,
) -> bytes:
    """Inference with tensors as bytes behind the JSON: name, type, shape, content. ``size`` is what
    binary_data_size says, ``length`` what Inference-Header-Content-Length says, if not the truth."""
    described = [
        {
            "name": name,
            "datatype": datatype,
            "shape": list(shape),
            "parameters": {"binary_data_size": len(content) if size is None else size},
        }
        for name, datatype, shape, content in inputs
    ]
    words = json.dumps({"inputs": described, **more}).encode()
    told = len(words) if length is None else length
    body = words + b"".join(content for *_, content in inputs)
    return post(infer_path(model), body, *lines, f"Inference-Header-Content-Length: {told}")


def strings(*values: bytes) -> bytes:
    """A BYTES tensor as bytes."""
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)


def chunked(raw: bytes, size: int, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    """A request with its body in chunks of ``size`` bytes."""
    words, _, body = raw.partition(b"\r\n\r\n")
    lines = [line for line in words.split(b"\r\n") if not line.startswith(b"Content-Length:")]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return b"\r\n".join(
        (*lines, b"Transfer-Encoding: chunked", b"", framed + b"0" + extension + b"\r\n" + trailers, b"")
    )


def encoded(raw: bytes, body: bytes, *lines: str) -> bytes:
    """A request with another body and more headers."""
    words = raw.partition(b"\r\n\r\n")[0].split(b"\r\n")
    kept = [line for line in words if not line.startswith(b"Content-Length:")]
    more = [line.encode("latin-1") for line in (*lines, f"Content-Length: {len(body)}")]
    return b"\r\n".join((*kept, *more, b"", body))
