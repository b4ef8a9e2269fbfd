"""What the benchmarks and drills make of what they see; nothing is measured here."""

import json
from pathlib import Path

from loadtests import h2load, report
from loadtests.drills import Failure, Phase
from loadtests.measured import Measured, percentiles
from loadtests.rounds import Sample, Series, cpu_us, per_second
from loadtests.work import grpc_echo, http_echo

_SAID = """
finished in 2.00s, 12345.50 req/s, 2.55MB/s
requests: 24691 total, 24755 started, 24691 done, 24690 succeeded, 1 failed, 1 errored, 0 timeout
status codes: 24690 2xx, 0 3xx, 0 4xx, 1 5xx
traffic: 5.10MB (5350000) total, 2.10MB (2200000) headers (space savings 0.00%), 2.83MB (2962800) data
"""


def _series(**rounds: list[tuple[int, float]]) -> Series:
    """Rounds of one second: requests and CPU microseconds each."""
    return Series(
        "echo",
        {side: [Sample(Measured(n, 0, 1.0, 0.001, 0.002), cpu) for n, cpu in seen] for side, seen in rounds.items()},
    )


def test_h2load_is_understood() -> None:
    assert h2load._totals(_SAID) == (24691, 24690, 2962800)
    assert h2load._seconds(_SAID) == 2.0
    assert h2load._seconds(_SAID.replace("2.00s", "310.5ms")) == 0.3105


def test_requests_as_they_stand_on_the_wire() -> None:
    http = http_echo(16)
    head = int(dict(http.headers)["inference-header-content-length"])
    assert json.loads(http.framed_body[:head])["inputs"][0]["shape"] == [1, 16]
    assert len(http.framed_body) == head + 64
    grpc = grpc_echo(16)
    assert grpc.framed_body[:1] == b"\0"
    assert int.from_bytes(grpc.framed_body[1:5]) == len(grpc.bodies[0]) == len(grpc.framed_body) - 5


def test_ratios_are_taken_round_by_round() -> None:
    series = _series(gateway=[(100, 50.0), (300, 60.0)], envoy=[(50, 100.0), (300, 60.0)])
    assert series.ratio("gateway", "envoy", per_second) == [2.0, 1.0]
    assert series.median("gateway", cpu_us) == 55.0
    assert percentiles([3.0, 1.0, 2.0]) == (2.0, 3.0)
    assert percentiles([]) == (0.0, 0.0)


def test_met_is_computed_and_parts_are_put_together(tmp_path: Path) -> None:
    first, second = report.Outcome("first"), report.Outcome("second")
    first.add(_series(direct=[(100, 0.0)], gateway=[(80, 90.0)]))
    second.target("ratio", [0.8, 1.2, 1.0], "ratio", report.at_least(1.1))
    second.target("growth", [64.0], "MB", report.at_most(64.0))
    report.write([second], ["first", "second"], tmp_path)
    path = report.write([first], ["first", "second"], tmp_path)
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["ratio"] == {"name": "ratio", "value": 1.0, "unit": "ratio", "target": ">= 1.1", "met": False}
    assert rows["growth"]["met"] is True
    assert rows["echo: gateway failures"]["met"] is True
    assert rows["echo: gateway CPU us/request"]["target"] is None
    assert "| ratio | 1 (0.8-1.2) | ratio | >= 1.1 | no |" in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "bench.svg").read_text().startswith("<svg")
    assert first.all_answered


def test_only_what_a_kill_explains_is_explained() -> None:
    phase = Phase("kills", kills=[10.0, 20.0])
    under_way = [Failure(9.9, 10.1, ""), Failure(5.0, 20.4, "")]
    dying = [Failure(10.05, 10.06, "")]
    others = [Failure(8.0, 9.0, ""), Failure(10.5, 10.6, ""), Failure(9.0, 12.0, ""), Failure(15.0, 16.0, "")]
    phase.failures = [*under_way, *dying, *others]
    assert (phase.lost_at_a_kill(), phase.met_a_dying_listener(), phase.others) == (2, 1, 4)
