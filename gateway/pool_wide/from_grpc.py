"""Reading an operation out of a gRPC message. Field numbers: Triton's ``grpc_service.proto``."""

import json
import re

from gateway.ingress.protobuf import fields
from gateway.pool_wide.operations import Asked, Operation
from wire.changes import Call, CallProtocol

#: What can stand in the path of a request.
_IN_PATH = re.compile(r"[!-.0-~]+").fullmatch


def read_operation(operation: Operation, method: str, message: bytes) -> Asked:
    """What ``method`` (its bare name) asks for.

    Raises:
        ValueError: ``message`` is no protobuf message.
    """
    call = Call(protocol=CallProtocol.GRPC, target=method, body=message)
    strings: dict[int, str] = {}
    keys: list[str] = []
    ready = False
    for number, value in fields(message):
        if isinstance(value, int):
            ready = ready or (number == 2 and value != 0)
        elif (operation, number) in _MAPS:
            keys += [key.decode("utf-8", "replace") for field, key in fields(value) if field == 1 and key]  # type: ignore[union-attr]
        else:
            strings[number] = value.decode("utf-8", "replace")
    if operation is Operation.STATISTICS:
        return _statistics(call, strings.get(1) or None, strings.get(2, ""))
    if operation is Operation.INDEX:
        body = json.dumps({"ready": True}).encode() if ready else b""
        return Asked(operation, call, method="POST", path="/v2/repository/index", body=body)
    if operation.shares_memory:
        memory, name = "system" if method.startswith("System") else "cuda", strings.get(1, "")
        place = f"/region/{name}" if name else ""
        path = f"/v2/{memory}sharedmemory{place}/status"
        return Asked(operation, call, region=f"{memory}/{name}", method="GET", path=path)
    model = strings.get(2, "") if operation in (Operation.LOAD, Operation.UNLOAD) else strings.get(2) or None
    return Asked(operation, call, model, tuple(keys))


#: Fields that are maps by name.
_MAPS = {(Operation.LOAD, 3), (Operation.UNLOAD, 3), (Operation.TRACE, 1), (Operation.LOG, 1)}


def _statistics(call: Call, model: str | None, version: str) -> Asked:
    path = "/v2/models/stats"
    if model is not None:
        path = f"/v2/models/{model}/versions/{version}/stats" if version else f"/v2/models/{model}/stats"
    return Asked(Operation.STATISTICS, call, model, method="GET", path=path)


def can_be_asked(asked: Asked) -> bool:
    """Whether a replica can be asked over HTTP for what came over gRPC: its names must fit into a path."""
    return all(_IN_PATH(part) for part in asked.path.split("/")[1:])
