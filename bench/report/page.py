"""Owns the page: what stands on it, in which order, and in which words.

It is one file that loads nothing: figures are inlined, there is no script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..reports import Report, remarks
from . import figures, tables
from .look import style_sheet
from .roofline import Roofline, is_of_gpu
from .series import by_op, groups_of, is_below_target, largest, size_text, styles_of
from .tables import escaped, legend_entry

_DATE_CHARACTERS = len("2026-01-02")
_WIDTHS = ("one", "two", "three")


def as_html(report: Report, roofline: Roofline | str) -> str:
    """The page of `report`; `roofline` may be the words that say why there is none."""
    device = report.machine["device"]
    title = f"sidestream kernels on {device}"
    body = "\n".join(
        (
            f"<h1>Kernels on {escaped(device)}</h1>",
            f"<p class='faint'>sidestream, {escaped(report.date[:_DATE_CHARACTERS])}</p>",
            f"<p class='summary'>{_summary(report)}</p>",
            tables.definitions(_facts(report)),
            *_bandwidth(report),
            *_roofline(roofline),
            *_rivals(report),
            *_closing(report),
        )
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escaped(title)}</title>\n<style>\n{style_sheet()}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _summary(report: Report) -> str:
    cases = {(row.op, row.case) for row in report.rows}
    sizes = sorted({row.numel for row in report.rows})
    parts = [f"{_counted(len(cases), 'case')} timed"]
    if sizes:
        ends = dict.fromkeys((size_text(sizes[0]), size_text(sizes[-1])))
        parts[0] += f" at {' to '.join(ends)} elements"
    aimed = [row for row in largest(report.rows) if row.target is not None]
    below = sum(map(is_below_target, aimed))
    if aimed:
        text = f"{below} of {len(aimed)} below target at the largest size"
        parts.append(f"<b class='{'bad' if below else 'good'}'>{text}</b>")
    wrong = len(report.wrong)
    parts.append(f"<b class='bad'>{wrong} wrong</b>" if wrong else "none wrong")
    return "; ".join(parts) + "."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _facts(report: Report) -> Iterator[tuple[str, object]]:
    yield "date", report.date
    for name, value in report.machine.items():
        if value is not None:
            yield name, value
    yield "command", report.command
    yield "settings", ", ".join(f"{name} {value}" for name, value in report.settings.items())


def _bandwidth(report: Report) -> Iterator[str]:
    yield "<h2>Bandwidth</h2>"
    if not report.rows:
        yield "<p>Nothing was timed.</p>"
        return
    ours = "the kernel" if is_of_gpu(report) else "on this CPU the kernel's definition in PyTorch"
    yield (
        f"<p class='faint'>Bytes that any implementation must move, by time: sidestream is {ours}, "
        "the copy moves as many bytes. Bands and thin lines: 10 % to 90 % of the samples. Several "
        "sizes are a curve, one size is a bar.</p><div class='blocks'>"
    )
    for number, (op, groups) in enumerate(by_op(groups_of(report.rows)).items()):
        styles = styles_of(groups)
        copy = legend_entry("\u254c", figures.COPY)
        drawn = [
            figures.curve(group, styles, f"curve-{number}-{index}")
            for index, group in enumerate(groups)
            if group.has_sizes
        ]
        if drawn:
            width = _WIDTHS[min(len(drawn), len(_WIDTHS)) - 1]
            yield _block(op, tables.legend(styles, copy), width, drawn)
        single = [group for group in groups if not group.has_sizes]
        if single:
            aimed = any(row.target is not None for group in single for row in group.rows)
            target = [legend_entry("\u2503", "target")] if aimed else []
            # The bars say whose they are.
            legend = tables.legend({}, copy, *target)
            yield _block(op, legend, "wide", [figures.bars(single, styles, f"bars-{number}")])
    yield "</div>"


def _block(title: str, legend: str, width: str, drawn: Sequence[str]) -> str:
    """Figures below their title and legend; `width` is how many columns they take."""
    inside = "".join(f"<figure>{svg}</figure>" for svg in drawn)
    return (
        f"<section class='{width}'><h3>{escaped(title)}</h3>{legend}"
        f"<div class='figures'>{inside}</div></section>"
    )


def _roofline(roofline: Roofline | str) -> Iterator[str]:
    if isinstance(roofline, str):
        yield f"<h2>Roofline</h2><p>{escaped(roofline)}</p>"
        return
    gpu = roofline.gpu
    if roofline.is_prediction:
        yield f"<h2>Roofline, predicted for one {escaped(gpu.name)}</h2>"
        yield (
            "<p>No kernel ran on a GPU here. "
            f"The copy's roof is what an {escaped(gpu.name)} is taken to reach.</p>"
        )
    else:
        yield f"<h2>Roofline of this {escaped(gpu.name)}</h2>"
        yield "<p>The copy's roof is the highest rate of this run's copies.</p>"
    yield (
        "<p class='faint'>The level roof is a copy, the slanting one the rate at which warps can "
        f"issue instructions, counted in code compiled for {escaped(gpu.target)}. Hollow: the most "
        "that the lower roof leaves a kernel; many instructions issue at half that rate or less."
        "</p>"
    )
    if not roofline.points:
        yield "<p>None of these kernels' instructions can be counted.</p>"
    yield from _families(roofline)
    if roofline.points:
        yield f"<details><summary>The same in numbers</summary>{tables.points(roofline)}</details>"
    if roofline.uncounted:
        yield _named("Not drawn, as their instructions cannot be counted", roofline.uncounted)
    if roofline.unmatched:
        yield _named(
            "Measured, but not one kernel of those that are compiled for this", roofline.unmatched
        )


def _families(roofline: Roofline) -> Iterator[str]:
    more: list[str] = []
    if not roofline.is_prediction:
        more = [legend_entry("\u25cf", "filled: measured"), legend_entry("\u25cb", "the most")]
    yield "<div class='blocks'>"
    for number, (title, points) in enumerate(roofline.families().items()):
        styles = _numbered([point.op for point in points])
        legend = tables.legend(styles, *more)
        svg = figures.roofs(roofline, points, styles, f"roofs-{number}")
        yield _block(title, legend, "wide", [svg])
    yield "</div>"


def _numbered(names: Sequence[str]) -> Mapping[str, int]:
    return {name: number for number, name in enumerate(sorted(set(names)))}


def _named(what: str, names: Sequence[str]) -> str:
    return f"<p class='faint'>{escaped(what)}: {escaped('; '.join(names))}.</p>"


def _rivals(report: Report) -> Iterator[str]:
    if not report.rows:
        return
    yield "<h2>Rivals</h2>"
    yield (
        "<p class='faint'>us a call: median and [10 %, 90 %] of the samples; % copy: of the rate "
        "of a copy of as many bytes, taken in turn; \u25bc: below the target, which is for large "
        "sizes.</p>"
    )
    yield tables.rivals(report)


def _closing(report: Report) -> Iterator[str]:
    notes = [*report.notes, *remarks(report.rows)]
    if notes:
        yield f"<h2>Notes</h2>{tables.items(notes)}"
    if report.wrong:
        yield (
            "<h2 class='bad'>Wrong, so not timed</h2>"
            f"<div class='bad'>{tables.items(report.wrong)}</div>"
        )
