"""A benchmark's result: a table for people, ``reports/<target>.json`` for programs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``target`` is what it is held against, None for a plain figure; ``met`` is computed from both."""

    name: str
    value: float
    unit: str
    target: str | None = None
    met: bool | None = None


def at_most(name: str, value: float, unit: str, limit: float) -> Row:
    """A figure that is good when it is small."""
    return Row(name, round(value, 4), unit, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Row:
    """A figure that is good when it is large."""
    return Row(name, round(value, 4), unit, f">= {limit:g}", value >= limit)


def plain(name: str, value: float, unit: str) -> Row:
    """A figure without a target."""
    return Row(name, round(value, 4), unit)


def spread(values: list[float]) -> str:
    """Median with minimum and maximum, as tables show it."""
    return f"{median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def write(target: str, rows: list[Row], folder: Path) -> Path:
    """Write ``rows`` to ``<folder>/<target>.json`` and print those with a target."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target}.json"
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    table = Table("figure", "value", "unit", "target", "met")
    for row in rows:
        if row.target is not None:
            table.add_row(row.name, f"{row.value:g}", row.unit, row.target, "yes" if row.met else "no")
    Console().print(table)
    return path
