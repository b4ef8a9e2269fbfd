"""What the gateway answers for a pool without a ready replica: Triton's own words, kept from its last replica.

Clients ask for health, metadata and the index before they infer. Were these refused at zero, the inference that wakes
the pool would never come; would they wake the pool, every health check would keep it awake.
"""

import base64
import json
import re
from collections.abc import Mapping
from typing import Protocol

from gateway.ingress.protobuf import first_string
from gateway.pool_wide import merging
from gateway.pool_wide.messages import message
from gateway.pool_wide.operations import Operation
from gateway.routing.pool import Pool
from wire.membership import Catalogue, ModelCatalogue

#: Status, headers and body.
HttpAnswer = tuple[int, list[tuple[bytes, bytes]], bytes]

_JSON = [(b"Content-Type", b"application/json")]
_OF_MODEL = re.compile(r"^/v2/models/([^/]+)(?:/versions/(\d+))?(/config|/ready)?$")
_INDEX = re.compile(r"^/v2/repository(?:/[^/]+)?/index$")
_NOT_READY = json.dumps({"error": "Model version not ready"}, separators=(",", ":")).encode()


class Pools(Protocol):
    """The pools of this gateway instance; gateway.routing.router.Router is one."""

    @property
    def pools(self) -> Mapping[str, Pool]: ...


class AtZero:
    """Answers from memory. Every method returns None where the answer is not known: then the request is held and
    wakes the pool like any other."""

    def __init__(self, router: Pools) -> None:
        self._router = router

    def http(self, method: str, path: str) -> HttpAnswer | None:
        """Status, headers and body for ``GET`` of server metadata, model metadata, config and readiness and ``POST`` of
        the repository index."""
        if _INDEX.match(path):
            return (200, _JSON, _written(self._index())) if method == "POST" else None
        if method != "GET":
            return None
        if path == "/v2":
            catalogue = self._any_catalogue()
            return None if catalogue is None else (200, _JSON, catalogue.server_metadata_http.encode())
        match = _OF_MODEL.match(path)
        if match is None:
            return None
        model, version, what = match.groups()
        if what == "/ready":
            ready = self.serves(model, version or "")
            return None if ready is None else (200, [], b"") if ready else (400, _JSON, _NOT_READY)
        known = self._catalogue_of(model)
        if known is None or not self.serves(model, version or ""):
            return None
        body = known.config_http if what == "/config" else known.metadata_http
        return 200, _JSON, body.encode()

    def grpc(self, method: str, request: bytes) -> bytes | None:
        """The serialised response of ``method`` (its bare name, e.g. ``ModelMetadata``) to ``request``."""
        if method == "ServerMetadata":
            catalogue = self._any_catalogue()
            return None if catalogue is None else base64.b64decode(catalogue.server_metadata_grpc)
        if method == "RepositoryIndex":
            return message(Operation.INDEX, method, self._index())
        if method not in ("ModelReady", "ModelMetadata", "ModelConfig"):
            return None
        model, version = first_string(request, 1) or "", first_string(request, 2) or ""
        served = self.serves(model, version)
        if method == "ModelReady":
            return None if served is None else b"\x08\x01" if served else b""
        known = self._catalogue_of(model)
        if known is None or not served:
            return None
        return base64.b64decode(known.config_grpc if method == "ModelConfig" else known.metadata_grpc)

    def serves(self, model: str, version: str) -> bool | None:
        """Whether a version ("" = any) of the model can be served once its pool is awake; None when unknown."""
        if not any(model in pool.model_names for pool in self._router.pools.values()):
            return False
        if not version:
            return True
        known = self._catalogue_of(model)
        versions = None if known is None else json.loads(known.metadata_http).get("versions")
        return None if versions is None else version in versions

    def _catalogue_of(self, model: str) -> ModelCatalogue | None:
        for pool in self._router.pools.values():
            if pool.catalogue is not None and model in pool.catalogue.models:
                return pool.catalogue.models[model]
        return None

    def _any_catalogue(self) -> Catalogue | None:
        return next((pool.catalogue for pool in self._router.pools.values() if pool.catalogue is not None), None)

    def index(self, pool: Pool) -> list[dict[str, str]]:
        """The models of a pool as a repository index: what can be served counts as ready."""
        ready = [{"name": name, "state": "READY"} for name in pool.model_names]
        gone = [{"name": name, "state": "UNAVAILABLE", "reason": "unloaded"} for name in pool.unloaded]
        return sorted(ready + gone, key=lambda entry: entry["name"])

    def _index(self) -> list[dict[str, str]]:
        return merging.index(self.index(pool) for pool in self._router.pools.values())


def _written(index: list[dict[str, str]]) -> bytes:
    return json.dumps(index, separators=(",", ":")).encode()
