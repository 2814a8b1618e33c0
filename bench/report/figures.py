"""Owns the figures: curves of one case, bars of an op's cases, and a family of kernels under roofs.

Each is of a fixed size in pixels and has no legend: the page says beside it whose the colours are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from .look import light, marker, series_name
from .roofline import Point, Roofline, spread_out
from .series import Group, labels_apart, rates, shares, size_text
from .svg import as_svg, new_axes, styled

COPY = "copy"
CURVE_WIDTH, CURVE_HEIGHT = 360, 236
WIDE = 596
_BAR, _HEAD, _GAP = 17, 21, 7
_BAR_LABEL = 96
_PERCENT_PX = 46
# Above these bands and bars are cut: they are of times that something disturbed.
_MOST_BAND, _MOST_BAR = 1.6, 1.25
# A candidate whose rate is below this part of the highest has a logarithmic axis.
_FLAT = 0.1
_FEW = 9.95  # percent have a digit after the point
_MAX_SIZE_LABELS = 7
_LABEL_PX = 12.0
_LEADER_PX = 26
_CHARACTER_PX = 6.6
_ROOF_HEIGHT = 210


def curve(group: Group, styles: Mapping[str, int], name: str) -> str:
    """GB/s of each candidate by size, with the 10-90 % spread as a band, and the copy's, dashed."""
    with styled():
        axes = new_axes(CURVE_WIDTH, CURVE_HEIGHT, (56, 12, 28, 42))
        copies = group.copies
        axes.plot(list(copies), list(copies.values()), "--", color=light("faint"), linewidth=1.4)
        # Ours last, above the others.
        for candidate in reversed(list(group.candidates)):
            _draw_curve(axes, group, candidate, styles[candidate])
        _set_rates(axes, group)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(labels_apart(list(copies), _MAX_SIZE_LABELS)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(round(value))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("elements")
        axes.set_ylabel("GB/s")
        axes.set_title(group.case, loc="left")
        rows = "; ".join(
            f"{candidate} {', '.join(f'{row.gb_per_s:.3g}' for row in rows)}"
            for candidate, rows in group.candidates.items()
        )
        return as_svg(axes, name, f"{group.case}, GB/s by elements: {rows}")


def _set_rates(axes: Axes, group: Group) -> None:
    """From 0, or by powers of ten where a line would lie on the axis."""
    lowest, highest = (
        chosen(rate for row in group.rows for rate in (row.gb_per_s, row.copy_gb_per_s))
        for chosen in (min, max)
    )
    at_last = [rows[-1].gb_per_s for rows in group.candidates.values()]
    most = min(max(rates(row)[1] for row in group.rows), _MOST_BAND * highest)
    if min(at_last) < _FLAT * max(*at_last, *group.copies.values()):
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.4, 1.4 * max(most, highest))
        axes.yaxis.set_major_locator(LogLocator())
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.06 * max(most, highest))
    axes.yaxis.set_major_formatter(FuncFormatter(_number))


def _draw_curve(axes: Axes, group: Group, candidate: str, number: int) -> None:
    rows = group.candidates[candidate]
    sizes = [row.numel for row in rows]
    colour = light(series_name(number))
    low, high = zip(*(rates(row) for row in rows), strict=True)
    axes.fill_between(sizes, low, high, color=colour, alpha=0.16, linewidth=0)
    axes.plot(
        sizes,
        [row.gb_per_s for row in rows],
        marker=marker(number),
        color=colour,
        markersize=4.5,
        linewidth=2.0 if number == 0 else 1.4,
    )


def _number(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def bars(groups: Sequence[Group], styles: Mapping[str, int], name: str) -> str:
    """Each candidate's percentage of the copy, by case; a black line where ours is to be."""
    with styled():
        count = sum(len(group.candidates) for group in groups)
        height = count * _BAR + len(groups) * (_HEAD + _GAP) + 44
        longest_name = max(len(name) for group in groups for name in group.candidates)
        margin = max(_BAR_LABEL, 14 + _CHARACTER_PX * longest_name)
        axes = new_axes(WIDE, height, (margin, _PERCENT_PX + 4, 4, 40))
        rows = [row for group in groups for row in group.rows]
        longest = max(row.percent_of_copy for row in rows)
        most = min(max(shares(row)[1] for row in rows), _MOST_BAR * longest)
        axes.set_xlim(0, 1.02 * max(100.0, most))
        at = 0.0
        for group in groups:
            axes.annotate(
                f"{group.case}, {size_text(group.rows[0].numel)}",
                (0, at + _HEAD - 5),
                xytext=(6 - margin, 0),
                textcoords="offset points",
                fontweight="bold",
            )
            at += _HEAD
            for candidate in group.candidates:
                _draw_bar(axes, group, candidate, styles[candidate], at + _BAR / 2)
                at += _BAR
            at += _GAP
        axes.set_ylim(at, 0)
        axes.yaxis.set_major_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_number))
        axes.axvline(100.0, color=light("faint"), linestyle="--", linewidth=1.2, zorder=0.9)
        axes.set_xlabel("% of the rate of a copy of as many bytes")
        axes.spines["left"].set_visible(False)
        said = "; ".join(f"{row.case} {row.candidate} {row.percent_of_copy:.0f}" for row in rows)
        return as_svg(axes, name, f"% of a copy's rate: {said}")


def _draw_bar(axes: Axes, group: Group, candidate: str, number: int, at: float) -> None:
    (row,) = group.candidates[candidate]
    colour = light(series_name(number))
    axes.barh(at, row.percent_of_copy, _BAR - 5, color=colour)
    ends, edges = shares(row), (at - _BAR / 2 + 1, at + _BAR / 2 - 1)
    _draw_line(axes, ends, (at, at), 1.3)
    if row.target is not None:
        _draw_line(axes, (row.target, row.target), edges, 2.4)
    axes.annotate(
        candidate,
        (0, at),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color=light("ink" if number == 0 else "faint"),
    )
    # All in one column: beside the bars they would lie on the copy's line.
    axes.annotate(
        f"{row.percent_of_copy:.{0 if row.percent_of_copy >= _FEW else 1}f} %",
        (axes.get_xlim()[1], at),
        xytext=(_PERCENT_PX, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color=light("ink"),
    )


def _draw_line(
    axes: Axes, x: tuple[float, float], y: tuple[float, float], linewidth: float
) -> None:
    """Seen on a bar and beside it."""
    for colour, more in (("paper", 1.6), ("ink", 0.0)):
        axes.plot(x, y, color=light(colour), linewidth=linewidth + more, solid_capstyle="butt")


def roofs(roofline: Roofline, points: Sequence[Point], styles: Mapping[str, int], name: str) -> str:
    """A family of kernels, ascending by instructions a byte: hollow where the lower roof is, filled
    what was measured; the names above.
    """
    with styled():
        strip = _LEADER_PX + _CHARACTER_PX * max(len(point.case) for point in points)
        height = math.ceil(strip) + _ROOF_HEIGHT
        axes = new_axes(WIDE, height, (60, 14, strip, 42))
        low, high = _range_of(roofline)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(*_rates_of(roofline, high))
        ridge = roofline.ridge
        for ends, style in (((low, ridge), "-"), ((ridge, high), "--")):
            axes.plot(ends, [roofline.copy_gb_s] * 2, style, color=light("ink"), linewidth=1.3)
        issued = [max(low, ridge / 20), ridge, high]
        for pair, style in ((issued[:2], "--"), (issued[1:], "-")):
            issue = [roofline.issue_gb_s(end) for end in pair]
            axes.plot(pair, issue, style, color=light("ink"), linewidth=1.3)
        for point in points:
            _draw_point(axes, point, styles[point.op])
        _draw_labels(axes, points, styles)
        axes.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4, 8, 16, 32, 64]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(_number))
        axes.annotate(
            f"level roof: a copy, {roofline.copy_gb_s:,.0f} GB/s",
            (0.0, 0.0),
            xycoords="axes fraction",
            xytext=(8, 7),
            textcoords="offset points",
            color=light("faint"),
        )
        axes.set_xlabel("instructions a byte")
        axes.set_ylabel("GB/s")
        said = "; ".join(f"{point.op} {point.case} {point.per_byte:.1f}" for point in points)
        return as_svg(axes, name, f"Roofline, instructions a byte: {said}")


def _range_of(roofline: Roofline) -> tuple[float, float]:
    """Instructions a byte, the same for every family."""
    found = [*(point.per_byte for point in roofline.points), roofline.ridge]
    return min(found) / 1.3, max(found) * 1.3


def _rates_of(roofline: Roofline, high: float) -> tuple[float, float]:
    """GB/s, the same for every family."""
    found = [point.measured.gb_per_s for point in roofline.points if point.measured]
    least = min([*found, roofline.issue_gb_s(high), roofline.copy_gb_s / 2])
    return least / 1.25, max([*found, roofline.copy_gb_s]) * 1.25


def _draw_point(axes: Axes, point: Point, number: int) -> None:
    colour, sign = light(series_name(number)), marker(number)
    row, there = point.measured, point.per_byte
    if row is not None:
        axes.plot([there] * 2, [row.gb_per_s, point.roof_gb_s], color=colour, linewidth=1.0)
        axes.plot(there, row.gb_per_s, sign, color=colour, markersize=6)
    axes.plot(
        there, point.roof_gb_s, sign, color=colour, markerfacecolor=light("paper"), markersize=5
    )


def _draw_labels(axes: Axes, points: Sequence[Point], styles: Mapping[str, int]) -> None:
    """The cases' names upright above the axes, each with a line to its points."""
    figure, (low, high), top = axes.figure, axes.get_xlim(), axes.get_ylim()[1]
    assert figure is not None
    box = axes.get_position()
    width = box.width * WIDE
    scale = width / math.log(high / low)
    wanted = [scale * math.log(point.per_byte / low) for point in points]
    placed = spread_out(wanted, _LABEL_PX, 0.0, width)
    for point, start, end in zip(points, wanted, placed, strict=True):
        colour = light(series_name(styles[point.op]))
        axes.plot([point.per_byte] * 2, [point.roof_gb_s, top], color=colour, linewidth=0.5)
        axes.annotate(
            point.case,
            (start / width, 1.0),
            xycoords="axes fraction",
            xytext=(end - start, _LEADER_PX - 4),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=10,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1.5,
                        "shrinkB": 0, "relpos": (0.5, 0.0)},
        )  # fmt: skip
