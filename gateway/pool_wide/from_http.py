"""Reading an operation out of an HTTP request."""

import json
from collections.abc import Mapping
from typing import Any

from gateway.pool_wide.operations import Asked, Operation
from wire.changes import Call, CallProtocol


def read_operation(operation: Operation, model: str | None, method: str, path: str, body: bytes) -> Asked:
    """What a request asks for. Its body need not make sense: then Triton says so."""
    given = _object(body)
    names: tuple[str, ...] = ()
    region = ""
    if operation in (Operation.LOAD, Operation.UNLOAD):
        parameters = given.get("parameters", {})
        # What cannot be understood is no plain load.
        names = tuple(parameters) if isinstance(parameters, Mapping) else ("?",)
    elif operation in (Operation.TRACE, Operation.LOG) and method == "POST":
        names = tuple(given)
    elif operation.shares_memory:
        memory = "system" if path.startswith("/v2/systemsharedmemory/") else "cuda"
        parts = path.split("/")
        region = f"{memory}/{parts[4] if len(parts) > 5 else ''}"
    call = Call(protocol=CallProtocol.HTTP, target=path, body=body)
    return Asked(operation, call, model, names, region, method, path, body)


def _object(body: bytes) -> Mapping[str, Any]:
    if not body:
        return {}
    try:
        given = json.loads(body)
    except ValueError:
        return {"parameters": None}
    return given if isinstance(given, Mapping) else {"parameters": None}
