"""Curves as an SVG picture: panels side by side, each with axes of its own, one legend for all.

    Line      (x, low, middle, high) by x: the middle is drawn, low to high is a band around it
    Panel     a part of the plane: whatever of the lines lies in it
    as_svg    panels and lines to text; the same ones make the same bytes

Lengths are pixels. No line is told from others by its colour alone: dashes and names differ too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PANEL_WIDTH, _PANEL_HEIGHT = 470, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 34, 44
_LEGEND_ROW, _LEGEND_COLUMN, _SAMPLE = 20, 180, 28
_MOST_TICKS = 6
_STEPS_OF_TEN = (1.0, 2.0, 5.0, 10.0)
STYLES: tuple[tuple[str, str], ...] = (
    ("#000000", ""), ("#888888", "1 2"), ("#0072b2", ""), ("#d55e00", ""), ("#009e73", ""),
    ("#cc79a7", "6 3"), ("#56b4e9", "6 3"), ("#e69f00", "2 2"), ("#7f3c8d", "8 2 2 2"),
    ("#666666", "2 4"), ("#11a579", "8 2 2 2"), ("#a5aa99", "6 3"),
)  # fmt: skip
"""Colour and dashes of a line; the first colours are Okabe and Ito's, for eyes of all kinds."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: points in order of x, and an index into STYLES."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    style: int


@dataclass(frozen=True, slots=True)
class Panel:
    """A window on the lines. x, y: its ends, ascending."""

    title: str
    x_label: str
    y_label: str
    x: tuple[float, float]
    y: tuple[float, float]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at most six or so: steps are 1, 2 or 5 times a power of
    ten.
    """
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / _MOST_TICKS))
    step = next(one * power for one in _STEPS_OF_TEN if span / (one * power) <= _MOST_TICKS)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def as_svg(panels: Sequence[Panel], lines: Sequence[Line]) -> str:
    """The picture, on white whatever the page is."""
    width = _PANEL_WIDTH * len(panels)
    columns = max(1, width // _LEGEND_COLUMN)
    height = _PANEL_HEIGHT + _LEGEND_ROW * math.ceil(len(lines) / columns) + 8
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"height='{height}' font-family='sans-serif' font-size='12' fill='#222'>",
        f"<rect width='{width}' height='{height}' fill='#fff'/>",
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, lines, number)
    for number, line in enumerate(lines):
        row, column = divmod(number, columns)
        parts.append(_legend(line, 14 + column * _LEGEND_COLUMN, _PANEL_HEIGHT + 8, row))
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, lines: Sequence[Line], number: int) -> Iterator[str]:
    width, height = _PANEL_WIDTH - _LEFT - _RIGHT, _PANEL_HEIGHT - _TOP - _BOTTOM
    scale = _Scale(panel, width, height)
    yield f"<g transform='translate({number * _PANEL_WIDTH + _LEFT} {_TOP})'>"
    yield f"<clipPath id='window{number}'><rect width='{width}' height='{height}'/></clipPath>"
    yield f"<text x='0' y='-12' font-weight='bold'>{html.escape(panel.title)}</text>"
    for value in ticks(*panel.x):
        at = scale.x(value)
        yield f"<path d='M{at:.1f} 0V{height}' stroke='#e6e6e6'/>"
        yield f"<text x='{at:.1f}' y='{height + 16}' text-anchor='middle'>{value:.6g}</text>"
    for value in ticks(*panel.y):
        at = scale.y(value)
        yield f"<path d='M0 {at:.1f}H{width}' stroke='#e6e6e6'/>"
        yield f"<text x='-6' y='{at + 4:.1f}' text-anchor='end'>{value:.6g}</text>"
    yield f"<path d='M0 0V{height}H{width}' fill='none' stroke='#888'/>"
    yield (
        f"<text x='{width / 2}' y='{height + 34}' text-anchor='middle'>"
        f"{html.escape(panel.x_label)}</text>"
    )
    yield (
        f"<text transform='translate(-44 {height / 2}) rotate(-90)' text-anchor='middle'>"
        f"{html.escape(panel.y_label)}</text>"
    )
    yield f"<g clip-path='url(#window{number})'>"
    # The first line, which others are compared with, above them.
    for line in reversed(lines):
        yield from _curve(line, scale)
    yield "</g></g>"


@dataclass(frozen=True, slots=True)
class _Scale:
    panel: Panel
    width: float
    height: float

    def x(self, value: float) -> float:
        low, high = self.panel.x
        return (value - low) / (high - low) * self.width

    def y(self, value: float) -> float:
        low, high = self.panel.y
        return (high - value) / (high - low) * self.height


def _curve(line: Line, scale: _Scale) -> Iterator[str]:
    colour, dashes = STYLES[line.style]
    there = [f"{scale.x(x):.1f},{scale.y(low):.1f}" for x, low, _, _ in line.points]
    back = [f"{scale.x(x):.1f},{scale.y(high):.1f}" for x, _, _, high in reversed(line.points)]
    middle = " ".join(f"{scale.x(x):.1f},{scale.y(value):.1f}" for x, _, value, _ in line.points)
    yield f"<polygon points='{' '.join(there + back)}' fill='{colour}' opacity='0.13'/>"
    yield (
        f"<polyline points='{middle}' fill='none' stroke='{colour}' stroke-width='1.6' "
        f"stroke-dasharray='{dashes}'><title>{html.escape(line.name)}</title></polyline>"
    )


def _legend(line: Line, x: float, y: float, row: int) -> str:
    colour, dashes = STYLES[line.style]
    at = y + row * _LEGEND_ROW
    return (
        f"<path d='M{x} {at}h{_SAMPLE}' stroke='{colour}' stroke-width='2' "
        f"stroke-dasharray='{dashes}'/>"
        f"<text x='{x + _SAMPLE + 8}' y='{at + 4}'>{html.escape(line.name)}</text>"
    )
