"""`sidestream bench report FILE.json --html FILE`: the page of a report measured elsewhere.

    sidestream bench kernels --json now.json        on a machine with a GPU, without matplotlib
    sidestream bench report now.json --html now.html

`sidestream bench kernels --html` writes the same page at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` with its options."""
    parser = subparsers.add_parser(
        "report",
        help="make one page of curves, roofline and rivals from a --json of `bench kernels`",
        description="Make one self-contained page from what `sidestream bench kernels --json` or "
        "`make gpu-check` wrote, here or elsewhere. Needs the extra sidestream[report].",
    )
    parser.add_argument("json", type=Path, metavar="FILE.json", help="the measured report")
    parser.add_argument("--html", metavar="FILE", required=True, help="write the page here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read, compile, draw, write; 0.

    Raises:
        UsageError: there is no such report, or no page can be written; nothing was done.
    """
    from ..report.build import require_page, write_page
    from ..reports import read_report

    report = read_report(options.json)
    require_page(options.html)
    write_page(report, Path(options.html))
    return 0
