"""What a scrape shows."""

from gateway.telemetry import Telemetry
from wire.errors import ErrorKind


def test_a_request_is_counted_once_in_each_series() -> None:
    telemetry = Telemetry("g1")
    common = {"pool": "vision", "protocol": "http"}
    telemetry.request_ended(**common, status=200, own_error=None, held_seconds=2.0, total_seconds=2.1)
    telemetry.request_ended(**common, status=503, own_error=ErrorKind.NO_REPLICA, held_seconds=0.0, total_seconds=0.01)
    telemetry.request_ended(
        pool=None, protocol="grpc", status=5, own_error=ErrorKind.NOT_FOUND, held_seconds=0.0, total_seconds=0.001
    )
    text = telemetry.exposition().decode()
    for line in (
        'tidegate_requests_total{gateway="g1",pool="vision",protocol="http",status="200"} 1.0',
        'tidegate_requests_total{gateway="g1",pool="vision",protocol="http",status="503"} 1.0',
        'tidegate_requests_total{gateway="g1",pool="none",protocol="grpc",status="5"} 1.0',
        'tidegate_own_errors_total{gateway="g1",kind="no_replica",pool="vision",protocol="http"} 1.0',
        'tidegate_hold_seconds_count{gateway="g1",pool="vision",protocol="http"} 1.0',
        'tidegate_request_seconds_count{gateway="g1",pool="vision",protocol="http"} 2.0',
    ):
        assert line in text
