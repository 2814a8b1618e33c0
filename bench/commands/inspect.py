"""`sidestream inspect`: what the compiler makes of each op's kernels, for GPUs that are not here.

    registers, spills  of a thread; spills in bytes     shared     bytes of a block
    occupancy          resident warps by the most       loads ...  widths in bits
    instr, integer     instructions of an element, and those that the pipe of integers takes
    bytes              of an element
    H100, ...          what bounds it there, the share of a copy's rate that this leaves, and the
                       time of the fullest pipe by that of the bytes

After a slash stands the case's limit: its gate's on sm_90, elsewhere what was last counted and a
little more. Widths and instructions are those of the path of full tiles; where there is none,
widths are those of all accesses, and `-` is what cannot be said. Times are at the rate at which
warps can issue, and at half of it for integers; others may have half of it too, so a share is the
most there is. What was once compiled is kept in ~/.cache/sidestream, or $XDG_CACHE_HOME.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...training.errors import UsageError
from ...training.paths import require_writable_file
from .parsing import add_compiling_options

if TYPE_CHECKING:
    from ..ahead.measuring import Row


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inspect` and its options."""
    parser = subparsers.add_parser(
        "inspect",
        help="compile any op's kernels for any GPU, without one, and show what they cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_compiling_options(parser, written="the rows")
    parser.add_argument("--case", metavar="TEXT", help="only the cases with this in their names")
    parser.add_argument(
        "--arch", metavar="ARCH,...", default="sm_90", help="targets, or all (default: sm_90)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ptx", action="store_true", help="print the PTX of one case")
    what.add_argument("--sass", action="store_true", help="print the machine code of one case")
    what.add_argument("--compare", metavar="GIT_REF", help="print what differs from this commit")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile, print, and return 0.

    Raises:
        UsageError: the selection is empty or unknown, the file cannot be written, or the commit
        cannot be looked at; nothing of what is here was compiled.
    """
    from ..ahead import checkout, selection, table

    if options.json is not None:
        require_writable_file(str(options.json), "--json")
    if options.ptx or options.sass:
        print(_code(options), end="")
        return 0
    cases = selection.cases_of(options.op, options.case)
    targets = selection.targets_of(options.arch)
    tasks = [(case.op, case.name, target) for target in targets for case in cases]
    before: tuple[Row, ...] = ()
    commit = None
    if options.compare is not None:
        commit = checkout.commit_of(options.compare)
        before = checkout.rows_at(commit, _selecting(options), options.case)
    rows = _measured(tasks, options.jobs)
    if options.json is not None:
        _write(options, rows)
    if commit is None:
        print("\n".join(table.lines(rows)))
        return 0
    print(f"{len(rows)} cases, from {options.compare} ({commit[:10]}) to what is here:")
    print("\n".join(table.change_lines(before, rows)))
    return 0


def _measured(tasks: Sequence[tuple[str, str, str]], num_processes: int) -> tuple[Row, ...]:
    from ..ahead import measuring
    from ..progress import shown

    with shown(len(tasks), "compiled") as step:
        return measuring.measure_all(tasks, num_processes, lambda row: step(" ".join(row.key)))


def _code(options: argparse.Namespace) -> str:
    """The text that `--ptx` or `--sass` asks for."""
    from ..ahead import measuring, selection

    option = "--ptx" if options.ptx else "--sass"
    if options.json is not None:
        raise UsageError(f"expected {option} without --json, got both; leave one out")
    cases = selection.cases_of(options.op, options.case)
    case = selection.only_case(cases, options.case, option)
    target = selection.only_target(selection.targets_of(options.arch), option)
    if options.ptx and not target.startswith("sm_"):
        raise UsageError(f"--ptx: expected a target of NVIDIA, got {target}; use --sass")
    compiled = measuring.compile_case(case, target)
    return compiled.assembly if options.sass else str(compiled.ptx)


def _selecting(options: argparse.Namespace) -> list[str]:
    """The arguments that select the same ops and targets at another commit, whose cases may have
    other names.
    """
    ops = [] if options.op is None else ["--op", ",".join(options.op)]
    return [*ops, "--arch", options.arch, "--jobs", str(options.jobs)]


def _write(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    import torch

    from ...kernels.ahead.machines import GPUS
    from ..ahead.measuring import KIND, SCHEMA_VERSION
    from ..reports import document, write_json

    content = {
        **document(KIND, options.arguments, torch.device("cpu"), schema_version=SCHEMA_VERSION),
        "gpus": [dataclasses.asdict(gpu) for gpu in GPUS],
        "rows": [row.as_json() for row in rows],
    }
    write_json(options.json, content)
