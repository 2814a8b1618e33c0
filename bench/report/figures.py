"""The figures: curves of one case, bars of an op's cases, and a family of kernels under roofs.

Each is of a fixed size in pixels and has no legend: the page says beside it whose the colours are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from ..kernel_cases.competitors import OURS
from .roofline import Point, Roofline, spread_out
from .series import Group, Style, labels_apart, rates, shares, size_text
from .svg import COLOURS, as_svg, new_axes, styled

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


def _number(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def _say(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **options: Any
) -> None:
    """Text at `offset` pixels from a place of the axes."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **options)


def curve(group: Group, styles: Mapping[str, Style], name: str) -> Markup:
    """GB/s of each candidate by size, with the 10-90 % spread as a band, and the copy's, dashed."""
    with styled():
        axes = new_axes(CURVE_WIDTH, CURVE_HEIGHT, (56, 12, 28, 42))
        copies = group.copies
        axes.plot(list(copies), list(copies.values()), "--", color=COLOURS["faint"], linewidth=1.4)
        # Ours last, above the others.
        for candidate, rows in reversed(list(group.candidates.items())):
            sizes, colour = [row.numel for row in rows], COLOURS[styles[candidate].colour]
            low, high = zip(*(rates(row) for row in rows), strict=True)
            axes.fill_between(sizes, low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(
                sizes,
                [row.gb_per_s for row in rows],
                marker=styles[candidate].marker,
                color=colour,
                markersize=4.5,
                linewidth=2.0 if candidate == OURS else 1.4,
            )
        _set_rates(axes, group)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(labels_apart(list(copies), _MAX_SIZE_LABELS)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(round(value))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="elements", ylabel="GB/s", title=group.case)
        said = "; ".join(
            f"{candidate} {', '.join(f'{row.gb_per_s:.3g}' for row in rows)}"
            for candidate, rows in group.candidates.items()
        )
        return as_svg(axes, name, f"{group.case}, GB/s by elements: {said}")


def _set_rates(axes: Axes, group: Group) -> None:
    """From 0, or by powers of ten where a line would lie on the axis."""
    found = [rate for row in group.rows for rate in (row.gb_per_s, row.copy_gb_per_s)]
    most = min(max(rates(row)[1] for row in group.rows), _MOST_BAND * max(found))
    most = max(most, *found)
    at_last = [rows[-1].gb_per_s for rows in group.candidates.values()]
    if min(at_last) < _FLAT * max(*at_last, *group.copies.values()):
        axes.set(yscale="log", ylim=(min(found) / 1.4, 1.4 * most))
        axes.yaxis.set_major_locator(LogLocator())
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.06 * most)
    axes.yaxis.set_major_formatter(FuncFormatter(_number))


def bars(groups: Sequence[Group], styles: Mapping[str, Style], name: str) -> Markup:
    """Each candidate's percentage of the copy, by case; a black line where ours is to be."""
    with styled():
        rows = [row for group in groups for row in group.rows]
        height = len(rows) * _BAR + len(groups) * (_HEAD + _GAP) + 44
        margin = max(_BAR_LABEL, 14 + _CHARACTER_PX * max(len(row.candidate) for row in rows))
        axes = new_axes(WIDE, height, (margin, _PERCENT_PX + 4, 4, 40))
        longest = max(row.percent_of_copy for row in rows)
        most = min(max(shares(row)[1] for row in rows), _MOST_BAR * longest)
        axes.set(xlim=(0, 1.02 * max(100.0, most)), ylim=(height - 44, 0))
        at = 0.0
        for group in groups:
            title = f"{group.case}, {size_text(group.rows[0].numel)}"
            _say(axes, title, (0, at + _HEAD - 5), (6 - margin, 0), fontweight="bold")
            at += _HEAD
            for candidate in group.candidates:
                _draw_bar(axes, group, candidate, styles[candidate], at + _BAR / 2)
                at += _BAR
            at += _GAP
        axes.yaxis.set_major_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_number))
        axes.axvline(100.0, color=COLOURS["faint"], linestyle="--", linewidth=1.2, zorder=0.9)
        axes.set_xlabel("% of the rate of a copy of as many bytes")
        axes.spines["left"].set_visible(False)
        said = "; ".join(f"{row.case} {row.candidate} {row.percent_of_copy:.0f}" for row in rows)
        return as_svg(axes, name, f"% of a copy's rate: {said}")


def _draw_bar(axes: Axes, group: Group, candidate: str, style: Style, at: float) -> None:
    (row,) = group.candidates[candidate]
    share = row.percent_of_copy
    axes.barh(at, share, _BAR - 5, color=COLOURS[style.colour])
    lines = [(shares(row), (at, at), 1.3)]
    if row.target is not None:
        lines.append(((row.target, row.target), (at - _BAR / 2 + 1, at + _BAR / 2 - 1), 2.4))
    for x, y, width in lines:
        # Seen on a bar and beside it.
        around = withStroke(linewidth=width + 1.6, foreground=COLOURS["paper"])
        axes.plot(
            x,
            y,
            color=COLOURS["ink"],
            linewidth=width,
            solid_capstyle="butt",
            path_effects=[around],
        )
    side = {"ha": "right", "va": "center"}
    colour = COLOURS["ink" if candidate == OURS else "faint"]
    _say(axes, candidate, (0, at), (-6, 0), color=colour, **side)
    # All in one column: beside the bars they would lie on the copy's line.
    text = f"{share:.{0 if share >= _FEW else 1}f} %"
    _say(axes, text, (axes.get_xlim()[1], at), (_PERCENT_PX, 0), **side)


def roofs(
    roofline: Roofline, points: Sequence[Point], styles: Mapping[str, Style], name: str
) -> Markup:
    """A family of kernels, ascending by instructions a byte: hollow where the lower roof is, filled
    what was measured; the names above.
    """
    with styled():
        strip = _LEADER_PX + _CHARACTER_PX * max(len(point.case.name) for point in points)
        axes = new_axes(WIDE, math.ceil(strip) + _ROOF_HEIGHT, (60, 14, strip, 42))
        axes.set(xscale="log", yscale="log", xlabel="instructions a byte", ylabel="GB/s")
        _draw_roofs(axes, roofline)
        for point in points:
            _draw_point(axes, point, styles[point.case.op])
        _draw_labels(axes, points, styles)
        axes.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4, 8, 16, 32, 64]))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(_number))
        text = f"level roof: a copy, {roofline.copy_gb_s:,.0f} GB/s"
        _say(axes, text, (0, 0), (8, 7), xycoords="axes fraction", color=COLOURS["faint"])
        said = "; ".join(f"{point.case.full_name} {point.per_byte:.1f}" for point in points)
        return as_svg(axes, name, f"Roofline, instructions a byte: {said}")


def _draw_roofs(axes: Axes, roofline: Roofline) -> None:
    """The lower one, and dashed what is above it; the axes are the same for every family."""
    copy_gb_s, ridge = roofline.copy_gb_s, roofline.ridge
    there = [*(point.per_byte for point in roofline.points), ridge]
    low, high = min(there) / 1.3, max(there) * 1.3
    found = [point.measured.gb_per_s for point in roofline.points if point.measured]
    found += [point.roof_gb_s for point in roofline.points]  # of integers, below both roofs
    found += [roofline.issue_gb_s(high), copy_gb_s / 2, copy_gb_s]
    axes.set(xlim=(low, high), ylim=(min(found) / 1.25, max(found) * 1.25))
    first = max(low, ridge / 20)
    line = {"color": COLOURS["ink"], "linewidth": 1.3}
    axes.plot([low, ridge, high], [copy_gb_s, copy_gb_s, roofline.issue_gb_s(high)], **line)
    axes.plot([first, ridge, high], [roofline.issue_gb_s(first), *[copy_gb_s] * 2], "--", **line)


def _draw_point(axes: Axes, point: Point, style: Style) -> None:
    colour, row, there = COLOURS[style.colour], point.measured, point.per_byte
    if row is not None:
        axes.plot([there] * 2, [row.gb_per_s, point.roof_gb_s], color=colour, linewidth=1.0)
        axes.plot(there, row.gb_per_s, style.marker, color=colour, markersize=6)
    paper = COLOURS["paper"]
    axes.plot(
        there, point.roof_gb_s, style.marker, color=colour, markerfacecolor=paper, markersize=5
    )


def _draw_labels(axes: Axes, points: Sequence[Point], styles: Mapping[str, Style]) -> None:
    """The cases' names upright above the axes, each with a line to its points."""
    (low, high), top = axes.get_xlim(), axes.get_ylim()[1]
    width = axes.get_position().width * WIDE
    starts = [width * math.log(point.per_byte / low) / math.log(high / low) for point in points]
    ends = spread_out(starts, _LABEL_PX, width)
    for point, start, end in zip(points, starts, ends, strict=True):
        colour = COLOURS[styles[point.case.op].colour]
        axes.plot([point.per_byte] * 2, [point.roof_gb_s, top], color=colour, linewidth=0.5)
        _say(
            axes,
            point.case.name,
            (start / width, 1.0),
            (end - start, _LEADER_PX - 4),
            xycoords="axes fraction",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=10,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1.5,
                        "shrinkB": 0, "relpos": (0.5, 0.0)},
        )  # fmt: skip
