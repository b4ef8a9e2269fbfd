"""What a request line asks for: the endpoints of Triton's HTTP front end, and who answers each.

Paths are compared as they come: like Triton, nothing is percent-decoded, and a query string is ignored.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import lru_cache

from gateway.pool_wide.operations import Operation


class Endpoint(Enum):
    """What is asked for. docs/protocol.md has the table with the answers."""

    LIVE = auto()
    READY = auto()
    SERVER_METADATA = auto()
    INDEX = auto()
    MODEL_METADATA = auto()
    MODEL_CONFIG = auto()
    MODEL_READY = auto()
    MODEL_STATS = auto()
    ALL_STATS = auto()
    INFER = auto()
    GENERATE = auto()
    SETTINGS = auto()
    """Trace or log settings, of a model or of the server."""
    REPOSITORY_CONTROL = auto()
    SHARED_MEMORY = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint, the model it names (None: the server as a whole) and the methods it knows; ``operation``: it may
    concern more than one replica."""

    endpoint: Endpoint
    methods: frozenset[bytes]
    model: str | None = None
    versioned: bool = False
    operation: Operation | None = None

    @property
    def for_operators(self) -> bool:
        """Whether it changes or watches the server: where API keys are known, that takes an operator's."""
        return self.operation is not None and self.operation.for_operators


_GET = frozenset((b"GET",))
_POST = frozenset((b"POST",))
_BOTH = _GET | _POST

_EXACT = {
    b"/v2/health/live": Route(Endpoint.LIVE, _GET),
    b"/v2/health/ready": Route(Endpoint.READY, _GET),
    b"/v2": Route(Endpoint.SERVER_METADATA, _GET),
    b"/v2/models/stats": Route(Endpoint.ALL_STATS, _GET),
    b"/v2/repository/index": Route(Endpoint.INDEX, _POST),
    b"/v2/trace/setting": Route(Endpoint.SETTINGS, _BOTH),
    b"/v2/logging": Route(Endpoint.SETTINGS, _BOTH),
}
#: What may follow a model's name (and version).
_OF_MODEL = {
    b"": (Endpoint.MODEL_METADATA, _GET),
    b"/infer": (Endpoint.INFER, _POST),
    b"/generate": (Endpoint.GENERATE, _POST),
    b"/generate_stream": (Endpoint.GENERATE, _POST),
    b"/ready": (Endpoint.MODEL_READY, _GET),
    b"/config": (Endpoint.MODEL_CONFIG, _GET),
    b"/stats": (Endpoint.MODEL_STATS, _GET),
    b"/trace/setting": (Endpoint.SETTINGS, _BOTH),
}
_MODELS = b"/v2/models/"
_REPOSITORY = b"/v2/repository/"
_SHARED_MEMORY = (b"/v2/systemsharedmemory/", b"/v2/cudasharedmemory/")
_REGION_ACTIONS = (b"status", b"register", b"unregister")


#: Targets up to this length are remembered: callers ask for the same few again and again. Bytes.
_REMEMBERED_LENGTH = 256


def route(target: bytes) -> Route | None:
    """The endpoint behind a request target, or None where Triton has none (404 Not Found)."""
    return _remembered(target) if len(target) <= _REMEMBERED_LENGTH else _find(target)


def path_of(target: bytes) -> bytes:
    """The path of a request target: without its query and, as some callers address a proxy, scheme and host."""
    path = target.partition(b"?")[0]
    if not path.startswith(b"/"):
        scheme, _, rest = path.partition(b"://")
        path = b"/" + rest.partition(b"/")[2] if scheme.isalpha() and rest else path
    return path


def _find(target: bytes) -> Route | None:
    path = path_of(target)
    found = _endpoint_of(path)
    if found is None:
        return None
    return replace(found, operation=_operation_of(found.endpoint, path.rpartition(b"/")[2]))


def _operation_of(endpoint: Endpoint, last: bytes) -> Operation | None:
    """``last`` is the last part of the path."""
    if endpoint is Endpoint.REPOSITORY_CONTROL:
        return Operation.LOAD if last == b"load" else Operation.UNLOAD
    if endpoint is Endpoint.SETTINGS:
        return Operation.LOG if last == b"logging" else Operation.TRACE
    if endpoint is Endpoint.SHARED_MEMORY:
        return {b"status": Operation.REGIONS, b"register": Operation.REGISTER}.get(last, Operation.UNREGISTER)
    if endpoint is Endpoint.INDEX:
        return Operation.INDEX
    return Operation.STATISTICS if endpoint in (Endpoint.MODEL_STATS, Endpoint.ALL_STATS) else None


def _endpoint_of(path: bytes) -> Route | None:
    found = _EXACT.get(path)
    if found is not None:
        return found
    if path.startswith(_MODELS):
        return _route_of_model(path)
    if path.startswith(_REPOSITORY):
        return _route_of_repository(path)
    if path.startswith(_SHARED_MEMORY):
        return _route_of_shared_memory(path)
    return None


_remembered = lru_cache(maxsize=1024)(_find)


def _route_of_model(path: bytes) -> Route | None:
    name, slash, rest = path[len(_MODELS) :].partition(b"/")
    versioned = rest.startswith(b"versions/")
    if versioned:
        version, slash, rest = rest[len(b"versions/") :].partition(b"/")
        if not version.isdigit():
            return None
    known = _OF_MODEL.get(slash + rest)
    if known is None or not name:
        return None
    endpoint, methods = known
    if versioned and endpoint is Endpoint.SETTINGS:
        return None
    return Route(endpoint, methods, name.decode("latin-1"), versioned)


def _route_of_repository(path: bytes) -> Route | None:
    parts = path[len(_REPOSITORY) :].split(b"/")
    if not all(parts):
        return None
    if len(parts) == 2 and parts[1] == b"index":
        return Route(Endpoint.INDEX, _POST)
    if len(parts) in (3, 4) and parts[-3] == b"models" and parts[-1] in (b"load", b"unload"):
        return Route(Endpoint.REPOSITORY_CONTROL, _POST, parts[-2].decode("latin-1"))
    return None


def _route_of_shared_memory(path: bytes) -> Route | None:
    parts = path.split(b"/")[3:]
    if parts[-1] not in _REGION_ACTIONS or not all(parts):
        return None
    if len(parts) == 1 or (len(parts) == 3 and parts[0] == b"region"):
        return Route(Endpoint.SHARED_MEMORY, _GET if parts[-1] == b"status" else _POST)
    return None
