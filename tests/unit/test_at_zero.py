"""What is answered from memory while a pool has no ready replica (A-043)."""

import base64
import json

import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.at_zero import AtZero
from gateway.routing.pool import Pool
from wire.membership import Catalogue, ModelCatalogue
from wire.pools import ModelSettings, PoolSettings

_METADATA = '{"name":"ident","versions":["1","3"],"platform":"python","inputs":[],"outputs":[]}'
_CONFIG = '{"name":"ident","max_batch_size":8}'


class _Pools:
    def __init__(self, *, known: bool) -> None:
        settings = PoolSettings(models=(ModelSettings(name="ident"), ModelSettings(name="slow")))
        pool = Pool("vision", settings, clock=lambda: 0.0, on_wanted=lambda _: None)
        self.pools = {"vision": pool}
        if known:
            metadata = base64.b64encode(pb.ModelMetadataResponse(name="ident", versions=["1", "3"]).SerializeToString())
            model = ModelCatalogue(
                metadata_http=_METADATA, config_http=_CONFIG, metadata_grpc=metadata.decode(), config_grpc="CgA="
            )
            server = base64.b64encode(pb.ServerMetadataResponse(name="triton").SerializeToString()).decode()
            pool.catalogue = Catalogue(
                server_metadata_http='{"name":"triton"}', server_metadata_grpc=server, models={"ident": model}
            )


@pytest.fixture
def known() -> AtZero:
    return AtZero(_Pools(known=True))


@pytest.fixture
def unknown() -> AtZero:
    return AtZero(_Pools(known=False))


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/v2", 200, b'{"name":"triton"}'),
        ("/v2/models/ident", 200, _METADATA.encode()),
        ("/v2/models/ident/versions/3", 200, _METADATA.encode()),
        ("/v2/models/ident/config", 200, _CONFIG.encode()),
        ("/v2/models/ident/ready", 200, b""),
        ("/v2/models/ident/versions/1/ready", 200, b""),
        ("/v2/models/ident/versions/2/ready", 400, b'{"error":"Model version not ready"}'),
        ("/v2/models/nope/ready", 400, b'{"error":"Model version not ready"}'),
    ],
)
def test_http_answers_are_tritons(known: AtZero, path: str, status: int, body: bytes) -> None:
    answer = known.http("GET", path)
    assert answer is not None
    assert (answer[0], answer[2]) == (status, body)


@pytest.mark.parametrize("path", ["/v2/models/ident/versions/2", "/v2/models/slow/config", "/v2/models/ident/infer"])
def test_http_what_is_not_known_is_left_to_a_replica(known: AtZero, path: str) -> None:
    assert known.http("GET", path) is None


def test_http_index_lists_what_can_be_served(unknown: AtZero) -> None:
    answer = unknown.http("POST", "/v2/repository/index")
    assert answer is not None
    assert json.loads(answer[2]) == [{"name": "ident", "state": "READY"}, {"name": "slow", "state": "READY"}]
    assert unknown.http("GET", "/v2/repository/index") is None


def test_before_any_replica_lived_only_readiness_is_known(unknown: AtZero) -> None:
    assert unknown.http("GET", "/v2") is None
    assert unknown.http("GET", "/v2/models/ident") is None
    assert unknown.http("GET", "/v2/models/ident/versions/1/ready") is None
    ready = unknown.http("GET", "/v2/models/ident/ready")
    assert ready is not None and ready[0] == 200
    assert unknown.grpc("ServerMetadata", b"") is None


def test_grpc_answers_are_tritons(known: AtZero) -> None:
    ask = pb.ModelMetadataRequest(name="ident").SerializeToString()
    metadata = pb.ModelMetadataResponse.FromString(known.grpc("ModelMetadata", ask) or b"")
    assert list(metadata.versions) == ["1", "3"]
    assert known.grpc("ModelConfig", pb.ModelConfigRequest(name="ident").SerializeToString()) == b"\n\x00"
    server = pb.ServerMetadataResponse.FromString(known.grpc("ServerMetadata", b"") or b"")
    assert server.name == "triton"


@pytest.mark.parametrize(
    ("name", "version", "ready"), [("ident", "", True), ("ident", "3", True), ("ident", "9", False)]
)
def test_grpc_readiness(known: AtZero, name: str, version: str, ready: bool) -> None:
    answer = known.grpc("ModelReady", pb.ModelReadyRequest(name=name, version=version).SerializeToString())
    assert answer is not None
    assert pb.ModelReadyResponse.FromString(answer).ready is ready
