"""Owns the page's tables and legends: what is measured in numbers, as the printed table has it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..kernel_cases.case import OURS
from ..reports import Report, Row
from .look import series_name, sign
from .roofline import Point, Roofline
from .series import is_below_target

_HEADS = ("case", "elements", "candidate", "us", "spread", "GB/s", "copy", "% copy", "target")
_TEXT_COLUMNS = ("case", "candidate", "op", "bound by")
_POINT_HEADS = (
    "op", "case", "instructions an element", "bytes an element", "instructions a byte",
    "bound by", "at most, GB/s",
)  # fmt: skip
_MEASURED_HEADS = ("measured, GB/s", "% of that")


def escaped(value: object) -> str:
    """As text of the page."""
    return html.escape(str(value))


def legend(styles: Mapping[str, int], *more: str) -> str:
    """Whose each colour and marker is; `more` are entries of their own, made."""
    entries = [
        f"<li><i style='color:var(--{series_name(number)})' aria-hidden='true'>{sign(number)}</i>"
        f"{escaped(name)}</li>"
        for name, number in styles.items()
    ]
    return f"<ul class='legend'>{''.join(entries)}{''.join(more)}</ul>"


def legend_entry(symbol: str, text: str) -> str:
    """One of another kind than a candidate."""
    return f"<li><i aria-hidden='true'>{escaped(symbol)}</i>{escaped(text)}</li>"


def rivals(report: Report) -> str:
    """All rows, by op."""
    parts = [_head(_HEADS)]
    last: tuple[str, int] | None = None
    for op in dict.fromkeys(row.op for row in report.rows):
        parts.append(f"<tbody><tr><th class='text' colspan='{len(_HEADS)}'>{escaped(op)}</th></tr>")
        for row in (row for row in report.rows if row.op == op):
            parts.append(_row(row, is_first=(row.case, row.numel) != last))
            last = row.case, row.numel
        parts.append("</tbody>")
    return _scrolling(parts)


def _row(row: Row, *, is_first: bool) -> str:
    kinds = ["first"] * is_first + ["ours"] * (row.candidate == OURS)
    target = "" if row.target is None else f"{row.target:.0f}"
    cells = (
        _cell(row.case if is_first else "", "text"),
        _cell(row.numel if is_first else ""),
        _cell(row.candidate, "text"),
        _cell(f"{row.median_us:.1f}"),
        _cell(f"[{row.low_us:.1f}, {row.high_us:.1f}]"),
        _cell(f"{row.gb_per_s:.2f}"),
        _cell(f"{row.copy_gb_per_s:.2f}"),
        _share(row),
        _cell(target),
    )
    return f"<tr class='{' '.join(kinds)}'>{''.join(cells)}</tr>"


def _share(row: Row) -> str:
    text = f"{row.percent_of_copy:.1f}"
    if row.target is None:
        return _cell(text)
    return _cell(f"{text} \u25bc", "bad") if is_below_target(row) else _cell(text, "good")


def points(roofline: Roofline) -> str:
    """Every compiled case, what it takes, and how much of the lower roof was measured."""
    measured = not roofline.is_prediction
    parts = [_head((*_POINT_HEADS, *(_MEASURED_HEADS if measured else ()))), "<tbody>"]
    parts += [_point(point, measured=measured) for point in roofline.points]
    return _scrolling([*parts, "</tbody>"])


def _point(point: Point, *, measured: bool) -> str:
    cells = [
        _cell(point.op, "text"),
        _cell(point.case, "text"),
        _cell(f"{point.instructions:.2f}"),
        _cell(f"{point.moved_bytes:.2f}"),
        _cell(f"{point.per_byte:.2f}"),
        _cell(point.bound, "text"),
        _cell(f"{point.roof_gb_s:,.0f}"),
    ]
    if measured:
        row = point.measured
        cells.append(_cell("" if row is None else f"{row.gb_per_s:.2f}"))
        cells.append(_cell("" if row is None else f"{100 * row.gb_per_s / point.roof_gb_s:.0f}"))
    return f"<tr>{''.join(cells)}</tr>"


def definitions(entries: Iterable[tuple[str, object]]) -> str:
    """Names and what they are."""
    return f"<dl>{''.join(_definitions(entries))}</dl>"


def _definitions(entries: Iterable[tuple[str, object]]) -> Iterator[str]:
    for name, value in entries:
        text = f"<code>{escaped(value)}</code>" if name == "command" else escaped(value)
        yield f"<dt>{escaped(name)}</dt><dd>{text}</dd>"


def items(texts: Sequence[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{escaped(text)}</li>' for text in texts)}</ul>"


def _head(names: Sequence[str]) -> str:
    cells = "".join(
        f"<th scope='col'{_class('text' if name in _TEXT_COLUMNS else '')}>{escaped(name)}</th>"
        for name in names
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _cell(value: object, kind: str = "") -> str:
    return f"<td{_class(kind)}>{escaped(value)}</td>"


def _class(kind: str) -> str:
    return f" class='{kind}'" if kind else ""


def _scrolling(parts: Sequence[str]) -> str:
    return f"<div class='scroll' tabindex='0'><table>{''.join(parts)}</table></div>"
