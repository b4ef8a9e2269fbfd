"""A benchmark's result: tables for people, ``reports/bench.json`` for programs.

Each part writes a file of its own; the whole is put together from those that are there, so that a part can be run again
alone.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtests.plot import bars
from loadtests.rounds import Series, cpu_us, p50_ms, p99_ms, per_second

_COLUMNS = {"requests/s": per_second, "p50 ms": p50_ms, "p99 ms": p99_ms, "CPU us/request": cpu_us}


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure is held against."""

    limit: float
    at_most: bool

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"

    def met_by(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


def at_most(limit: float) -> Target:
    return Target(limit, at_most=True)


def at_least(limit: float) -> Target:
    return Target(limit, at_most=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``target`` is what it is held against, None for a plain figure; ``met`` is computed from both."""

    name: str
    value: float
    unit: str
    target: str | None = None
    met: bool | None = None


@dataclass
class Outcome:
    """What one part of the benchmark found."""

    part: str
    rows: list[Row] = field(default_factory=list)
    spreads: dict[str, str] = field(default_factory=dict)
    """Of rows that come from several rounds: median (minimum-maximum)."""
    series: list[Series] = field(default_factory=list)

    def add(self, series: Series) -> None:
        """All figures of a series; requests that fail are held against none, on Triton and the gateway."""
        self.series.append(series)
        for side in series.samples:
            for column, figure in _COLUMNS.items():
                if not (figure is cpu_us and side == "direct"):
                    self.figure(f"{series.name}: {side} {column}", series.each(side, figure), column.split(" ")[-1])
        for side in ("direct", "gateway"):
            if side not in series.samples:
                continue
            self.target(f"{series.name}: {side} failures", [series.failures(side)], "requests", at_most(0))

    def figure(self, name: str, values: Sequence[float], unit: str) -> None:
        """A figure without a target: the median of ``values``."""
        self._row(name, values, unit, None)

    def target(self, name: str, values: Sequence[float], unit: str, target: Target) -> None:
        """A figure and what it is held against."""
        self._row(name, values, unit, target)

    def _row(self, name: str, values: Sequence[float], unit: str, target: Target | None) -> None:
        value = round(median(values), 4)
        goal, met = (None, None) if target is None else (str(target), target.met_by(value))
        self.rows.append(Row(name, value, unit, goal, met))
        if len(values) > 1:
            self.spreads[name] = spread(values)

    @property
    def all_answered(self) -> bool:
        """False when a request failed that may not."""
        return all(row.met is not False for row in self.rows if row.name.endswith("failures"))


def spread(values: Sequence[float]) -> str:
    """Median with minimum and maximum, as tables show it."""
    return f"{median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def show(outcome: Outcome, console: Console) -> None:
    """What a part found, as tables."""
    for series in outcome.series:
        console.print(_rich(series.name, *_table(series)))
    console.print(_rich(f"{outcome.part}: targets", *_targets(_as_json(outcome))))


def write(outcomes: Sequence[Outcome], order: Sequence[str], folder: Path) -> Path:
    """Write ``outcomes``, and put ``bench.json``, ``bench.md`` and ``bench.svg`` together from all parts there are."""
    parts = folder / "bench"
    parts.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        (parts / f"{outcome.part}.json").write_text(json.dumps(_as_json(outcome), indent=1) + "\n")
    found = [json.loads(path.read_text()) for part in order if (path := parts / f"{part}.json").exists()]
    rows = [row for part in found for row in part["rows"]]
    path = folder / "bench.json"
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    (folder / "bench.md").write_text("\n".join(line for part in found for line in _markdown(part)))
    (folder / "bench.svg").write_text(bars([table for part in found for table in part["tables"]]))
    return path


def write_alone(outcome: Outcome, folder: Path) -> Path:
    """Write the rows of ``outcome`` to a file named after it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.part}.json"
    path.write_text(json.dumps({"rows": [asdict(row) for row in outcome.rows]}, indent=1) + "\n")
    return path


def _as_json(outcome: Outcome) -> dict[str, Any]:
    tables = []
    for series in outcome.series:
        header, lines = _table(series)
        medians = {side: [series.median(side, figure) for figure in _COLUMNS.values()] for side in series.samples}
        tables.append({"name": series.name, "header": header, "lines": lines, "medians": medians})
    rows = [asdict(row) for row in outcome.rows]
    return {"part": outcome.part, "rows": rows, "spreads": outcome.spreads, "tables": tables}


def _table(series: Series) -> tuple[list[str], list[list[str]]]:
    lines = [[side, *(spread(series.each(side, figure)) for figure in _COLUMNS.values())] for side in series.samples]
    for line in lines:
        if line[0] == "direct":
            line[-1] = ""  # there is no proxy
    return [series.name, *_COLUMNS], lines


def _targets(part: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for row in part["rows"]:
        if row["target"] is not None and not (row["name"].endswith("failures") and row["met"]):
            value = part["spreads"].get(row["name"], f"{row['value']:g}")
            lines.append([row["name"], value, row["unit"], row["target"], "yes" if row["met"] else "no"])
    return ["figure", "value", "unit", "target", "met"], lines


def _rich(title: str, header: list[str], lines: list[list[str]]) -> Table:
    table = Table(*header, title=title)
    for line in lines:
        table.add_row(*line)
    return table


def _markdown(part: dict[str, Any]) -> list[str]:
    tables = [(table["header"], table["lines"]) for table in part["tables"]]
    text = [f"## {part['part']}", ""]
    for header, lines in (*tables, _targets(part)):
        for line in (header, ["---"] * len(header), *lines):
            text.append(f"| {' | '.join(line)} |")
        text.append("")
    plain = [row for row in part["rows"] if row["target"] is None and not part["tables"]]
    text += [f"* {row['name']}: {part['spreads'].get(row['name'], row['value'])} {row['unit']}" for row in plain]
    return [*text, ""]
