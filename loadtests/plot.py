"""The plot of a benchmark: one SVG file, written by hand, so that no plotting library is needed."""

from html import escape
from typing import Any

_COLOURS = {"direct": "#9aa5b1", "gateway": "#1f77b4", "envoy": "#d6604d", "ray serve": "#b8a13a"}
_BAR, _GAP, _LEFT, _WIDTH, _VALUE = 16, 10, 90, 300, 70
#: What is drawn, by its place among a table's medians.
_PANELS = ((0, "requests/s, more is better"), (3, "CPU microseconds a request, less is better"))


def bars(tables: list[dict[str, Any]]) -> str:
    """Two panels of horizontal bars for each table: requests per second, and CPU time a request. Each group is scaled
    to its own longest bar."""
    parts: list[str] = []
    y = 30
    panel_width = _LEFT + _WIDTH + _VALUE
    for place, title in _PANELS:
        parts.append(_text(_PANELS.index((place, title)) * panel_width + _LEFT, 18, title, "bold"))
    for table in tables:
        parts.append(_text(4, y + 12, table["name"], "bold"))
        y += _BAR + 4
        for number, (place, _) in enumerate(_PANELS):
            parts += _group(table["medians"], place, number * panel_width, y)
        y += len(table["medians"]) * _BAR + _GAP
    size = f'width="{panel_width * len(_PANELS)}" height="{y}"'
    style = "<style>text{font:12px sans-serif}.bold{font-weight:bold}</style>"
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{background}{"".join(parts)}</svg>\n'


def _group(medians: dict[str, list[float]], place: int, left: int, top: int) -> list[str]:
    longest = max(figures[place] for figures in medians.values()) or 1.0
    parts = []
    for line, (side, figures) in enumerate(medians.items()):
        value, y = figures[place], top + line * _BAR
        if not value:
            continue
        width = max(1.0, value / longest * _WIDTH)
        colour = _COLOURS.get(side, "#777777")
        parts.append(_text(left + 4, y + 11, side))
        parts.append(f'<rect x="{left + _LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 3}" fill="{colour}"/>')
        parts.append(_text(left + _LEFT + width + 4, y + 11, f"{value:,.0f}" if value >= 100 else f"{value:.3g}"))
    return parts


def _text(x: float, y: float, words: str, css: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{css}">{escape(words)}</text>'
