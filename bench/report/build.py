"""The way from a report to the page's file: what is checked before any work, what is compiled.

The roofline needs the cases of the report's ops compiled, which takes about a second each where it
has not been done before; how far that is is told on the error output.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from ...training.errors import UsageError
from ...training.paths import require_writable_file
from ..reports import Report, write_text
from .roofline import Roofline, cases_of, roofline_of, subject_of


def require_page(path: str) -> None:
    """Refuse what would keep the page from being written; for `--html`.

    Raises:
        UsageError: the file cannot be written, or matplotlib is not installed.
    """
    require_writable_file(path, "--html")
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--html: expected matplotlib, got none; pip install 'sidestream[report]', or write "
            "--json and make the page elsewhere with `sidestream bench report`"
        )


def write_page(report: Report, path: Path) -> None:
    """Compile, draw, write."""
    from .page import as_html  # matplotlib is an extra

    write_text(path, as_html(report, roofline(report)))


def roofline(report: Report) -> Roofline | str:
    """Of the report's GPU, or of the predicted one; or the words that say why there is none."""
    if not report.rows:
        return "Nothing was timed, so nothing is drawn."
    gpu = subject_of(report)
    if gpu is None:
        return (
            "Not drawn: nothing is known here of the clock and the multiprocessors of "
            f"{report.machine['device']}."
        )
    if find_spec("triton") is None:
        return "Not drawn: Triton, which compiles the kernels, is not installed here."
    from ...kernels.ahead import measure
    from ..progress import shown

    cases = cases_of(report)
    tasks = [(case.op, case.name, gpu.target) for case in cases]
    with shown(len(tasks), "compiled") as step:
        measured = measure.measure_all(
            tasks, len(os.sched_getaffinity(0)), lambda task, _: step(" ".join(task))
        )
    found = (
        (case, one.instructions, one.integers) for case, one in zip(cases, measured, strict=True)
    )
    return roofline_of(report, gpu, found)
