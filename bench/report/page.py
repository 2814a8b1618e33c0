"""The page: what stands on it and in which order; the words are those of page.html.

It is one file that loads nothing: figures are inlined, there is no script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..kernel_cases.competitors import OURS
from ..reports import Report, remarks
from . import figures
from .roofline import Roofline, is_of_gpu
from .series import Group, Style, groups_of, size_text, styles_of

_WIDTHS = ("one", "two", "three")
_COPY = ("\u254c", "copy")
_TARGET = ("\u2503", "target")
_MEASURED = (("\u25cf", "filled: measured"), ("\u25cb", "the most"))


@dataclass(frozen=True, slots=True)
class Block:
    """Figures below their title and legend. width: the columns that they take, as page.css has
    them; styles and signs: of the legend.
    """

    title: str
    width: str
    styles: Mapping[str, Style]
    signs: Sequence[tuple[str, str]]
    figures: Sequence[Markup]


def as_html(report: Report, roofline: Roofline | str) -> str:
    """The page of `report`; `roofline` may be the words that say why there is none."""
    groups = groups_of(report.rows)
    cases = [group for inside in groups.values() for group in inside]
    sizes = sorted({row.numel for row in report.rows})
    ends = dict.fromkeys(map(size_text, (sizes[0], sizes[-1]) if sizes else ()))
    aimed = [group.largest for group in cases if group.largest and group.largest.target is not None]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html").render(
        report=report,
        num_cases=len(cases),
        sizes=" to ".join(ends),
        aimed=aimed,
        below=[row for row in aimed if row.is_below_target],
        is_of_gpu=is_of_gpu(report),
        bandwidth=list(_bandwidth(groups)),
        roofline=roofline,
        families=[] if isinstance(roofline, str) else list(_families(roofline)),
        rows={op: [row for row in report.rows if row.op == op] for op in groups},
        ours=OURS,
        notes=[*report.notes, *remarks(report.rows)],
    )


def _bandwidth(groups: Mapping[str, Sequence[Group]]) -> Iterator[Block]:
    """Of each op the curves of cases of several sizes, then the bars of those of one."""
    for number, (op, cases) in enumerate(groups.items()):
        styles = styles_of([OURS, *(name for group in cases for name in group.candidates)])
        drawn = [
            figures.curve(group, styles, f"curve-{number}-{index}")
            for index, group in enumerate(cases)
            if group.has_sizes
        ]
        if drawn:
            width = _WIDTHS[min(len(drawn), len(_WIDTHS)) - 1]
            yield Block(op, width, styles, [_COPY], drawn)
        single = [group for group in cases if not group.has_sizes]
        if single:
            aimed = any(row.target is not None for group in single for row in group.rows)
            # The bars say whose they are.
            signs = [_COPY, _TARGET] if aimed else [_COPY]
            yield Block(op, "wide", {}, signs, [figures.bars(single, styles, f"bars-{number}")])


def _families(roofline: Roofline) -> Iterator[Block]:
    signs = () if roofline.is_prediction else _MEASURED
    for number, (title, points) in enumerate(roofline.families().items()):
        styles = styles_of(sorted(point.case.op for point in points))
        drawn = figures.roofs(roofline, points, styles, f"roofs-{number}")
        yield Block(title, "wide", styles, signs, [drawn])
