"""`sidestream bench convergence`: what each wire does to the loss, on real text.

    sidestream bench convergence                          all usual wires, 3 seeds, 2,000 steps
    sidestream bench convergence --wires mxfp8 --seeds 1  beside fp32, which is always there
    sidestream bench convergence --report                 the page alone, of what is there

The same small GPT, seed and order of data with each wire, on the CPU over gloo. A run's result is
written as soon as it is done and not done again, so the same command after an interruption goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...training.launch.interruption import raising_signals
from ...training.paths import require_writable_folder
from ..convergence_wires import DEFAULT_WIRES, WIRES
from ..convergence_worker import SIZES, Settings, load_text, unigram_loss
from ..progress import shown
from ..ranks import GLOO_RANKS, RanksFailed
from ..reports import ReportError, document, write_text
from .parsing import count, names_of

if TYPE_CHECKING:
    from ..convergence import Result
    from ..convergence_worker import Outcome, Run

DEFAULT_FOLDER = Path("bench", "results", "convergence")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `convergence`."""
    parser = subparsers.add_parser(
        "convergence", help="loss of a small GPT with each wire", description=__doc__
    )
    parser.add_argument(
        "--wires",
        type=names_of(tuple(WIRES)),
        default=DEFAULT_WIRES,
        metavar="WIRE,...",
        help=f"from {', '.join(WIRES)} (default: {','.join(DEFAULT_WIRES)})",
    )
    parser.add_argument("--steps", type=count, default=2000, help="of a run (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=count, default=3, help="how many, numbered from 0 (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=count, default=GLOO_RANKS, help="of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--size", choices=SIZES, default="small", help="of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--data", metavar="PATH", help="text: a file or a folder; default: Python's own sources"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_FOLDER,
        metavar="FOLDER",
        help="results and page go here (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs", type=count, default=1, help="runs at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--report", action="store_true", help="only draw the page of what was measured last"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train what is missing, then write the page; 1 when a rank failed or fp32 did not repeat.

    Raises:
        UsageError: it cannot be done as asked; nothing was.
    """
    from ..convergence import digest_of, read_results

    digest = None
    if not options.report:
        settings, unigram = _settings(options)
        digest = digest_of(settings)
        try:
            with raising_signals():
                _measure(options, settings, unigram)
        except RanksFailed as error:
            print(f"sidestream bench convergence: {error}", file=sys.stderr)
            return 1
    return _write_page(options.out, read_results(options.out), digest)


def _settings(options: argparse.Namespace) -> tuple[Settings, float]:
    """What all runs have in common; and the loss of the text's byte frequencies alone."""
    corpus = load_text(options.data, options.size)
    settings = Settings(
        size=options.size,
        steps=options.steps,
        ranks=options.ranks,
        data=options.data,
        data_sha256=corpus.sha256,
    )
    return settings, unigram_loss(corpus)


def _measure(options: argparse.Namespace, settings: Settings, unigram: float) -> None:
    from ..convergence import (
        Circumstances,
        add_result,
        measure,
        missing,
        read_results,
        result_of,
        runs_of,
    )

    require_writable_folder(str(options.out), "--out")
    runs = runs_of(options.wires, options.seeds)
    todo = missing(runs, read_results(options.out), settings)
    found = document("convergence", options.arguments, torch.device("cpu"))
    machine = {**found["machine"], "threads": 1, "cores": os.cpu_count()}
    beside = Circumstances(unigram, found["date"], found["command"], machine)
    print(f"{len(todo)} of {len(runs)} runs to do, {settings.steps} steps each", flush=True)
    with shown(len(todo), "runs") as step:

        def note(run: Run, outcome: Outcome) -> None:
            add_result(options.out, result_of(run, settings, outcome, beside))
            step(f"{run}: {outcome.seconds:.0f} s")

        measure(todo, settings, options.jobs, note)


def _write_page(folder: Path, results: Sequence[Result], digest: str | None) -> int:
    """Of the settings with that digest; None: of those that were measured last."""
    from ..convergence import comparable
    from ..convergence_page import (
        CURVES_NAME,
        PAGE_NAME,
        curves_of,
        is_repeated,
        page_of,
        rows_of,
        table_of,
    )

    if not results:
        raise ReportError(
            f"--out: expected results in {folder}, got none; leave --report out to measure some"
        )
    alike = comparable(results, digest or results[-1].settings_digest)
    require_writable_folder(str(folder), "--out")
    write_text(folder / CURVES_NAME, curves_of(alike))
    write_text(folder / PAGE_NAME, page_of(alike, left_out=len(results) - len(alike)))
    print("\n".join([*table_of(rows_of(alike)), f"page: {folder / PAGE_NAME}"]))
    if is_repeated(alike) is False:
        print("sidestream bench convergence: fp32 trained twice gave other bits", file=sys.stderr)
        return 1
    return 0
