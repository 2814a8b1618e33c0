"""`sidestream schedule`: shows learning rate, weight decay and batch size over a run, as a table
and as curves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .errors import OptionsError
from .option_fields import add_arguments, values_from
from .paths import require_writable_file
from .schedule_options import ScheduleOptions, batch_schedule_of, schedule_of
from .schedules.picture import SUFFIXES, write_picture
from .schedules.table import ScheduleRow, even_steps, rows_at, telling_steps
from .schedules.text_plot import glyphs_for, plotted

IN_TERMINAL = ""
HEIGHT = 10
MAX_WIDTH = 100
LABEL_WIDTH = 10
PICTURE_POINTS = 1000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `schedule` and its options, which are those of `train`."""
    parser = subparsers.add_parser(
        "schedule", help="show learning rate, weight decay and batch size over a run"
    )
    add_arguments(parser, ScheduleOptions)
    parser.add_argument(
        "--plot",
        nargs="?",
        const=IN_TERMINAL,
        metavar="FILE",
        help="draw in the terminal, or a picture into FILE (.png, .svg, .pdf; needs matplotlib)",
    )
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Print the table, and draw what was asked for."""
    options, plot = ScheduleOptions(**values_from(namespace, ScheduleOptions)), namespace.plot
    if plot:
        _require_picture(plot, "--plot")
    schedule, batches = schedule_of(options), batch_schedule_of(options)
    rows = rows_at(schedule, batches, telling_steps(schedule, batches, options.steps))
    Console().print(table_of(rows, shows_batches=options.batch_ramp is not None))
    if plot is None:
        return 0
    if plot == IN_TERMINAL:
        glyphs = glyphs_for(sys.stdout.encoding)
        characters = min(Console().width, MAX_WIDTH) - LABEL_WIDTH - 1
        points = max(characters, 1) * glyphs.dots_across
        rows = rows_at(schedule, batches, even_steps(options.steps, points))
        for name, curve in curves_of(rows).items():
            print(f"\n{name}")
            print("\n".join(_labelled(curve, plotted(curve, height=HEIGHT, glyphs=glyphs))))
            print(f"{'step 1':>{LABEL_WIDTH + 7}}{options.steps:>{max(characters - 6, 1)},}")
        return 0
    rows = rows_at(schedule, batches, even_steps(options.steps, PICTURE_POINTS))
    write_picture(plot, [row.step for row in rows], curves_of(rows))
    print(f"wrote {plot}")
    return 0


def _require_picture(path: str, option: str) -> None:
    """Refuse what would keep a picture from being written.

    Raises:
        OptionsError: a name that says no format, a file that cannot be written, no matplotlib.
    """
    if Path(path).suffix not in SUFFIXES:
        raise OptionsError(
            f"expected {option} to end in one of {', '.join(SUFFIXES)}, got {path}; name the "
            "format, or leave the file out to draw in the terminal"
        )
    require_writable_file(path, option)
    if find_spec("matplotlib") is None:
        raise OptionsError(
            f"expected matplotlib for {option} {path}, got none; pip install 'sidestream[report]', "
            "or leave the file out to draw in the terminal"
        )


def table_of(rows: Sequence[ScheduleRow], *, shows_batches: bool) -> Table:
    """Return the rows as a table, with batch sizes and consumed samples if they are to be seen."""
    table = Table(title="sidestream schedule", title_justify="left")
    for name in ("step", "lr", "weight decay", *(("batch", "samples before") * shows_batches)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row.step:,}", f"{row.lr:.6g}", f"{row.weight_decay:.6g}"]
        if shows_batches:
            cells += [f"{row.batch_size:,}", f"{row.consumed_samples:,}"]
        table.add_row(*cells)
    return table


def curves_of(rows: Sequence[ScheduleRow]) -> Mapping[str, list[float]]:
    """Return what is worth a curve: the learning rate, and of the others what changes."""
    others = {
        "weight decay": [row.weight_decay for row in rows],
        "batch size": [float(row.batch_size) for row in rows],
    }
    changing = {name: values for name, values in others.items() if len(set(values)) > 1}
    return {"learning rate": [row.lr for row in rows]} | changing


def _labelled(values: Sequence[float], lines: Sequence[str]) -> list[str]:
    labels = [""] * len(lines)
    labels[0], labels[-1] = f"{max(values):.4g}", f"{min(values):.4g}"
    return [f"{label:>{LABEL_WIDTH}} {line}" for label, line in zip(labels, lines, strict=True)]
