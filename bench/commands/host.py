"""`sidestream bench host`: what a unit costs the host in one step, beside FSDP2, DDP and the plain
model, by number of units and of ranks.

Prints a table and verdicts on the project's limits; `bench.host_cost` says how it is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...training.paths import require_writable_file
from ..models import TENSORS_A_BLOCK
from ..progress import shown
from ..reports import document, write_json
from ..timing import Estimate, compare_with_limit
from ..trainer_names import FSDP2, MEGATRON_FSDP, PLAIN, TRAINER_NAMES
from .parsing import count, counts, names_of

if TYPE_CHECKING:
    from ..host_cost import Case, Samples, Summary

# Megatron-FSDP makes CUDA streams whatever it trains on.
CANDIDATES = tuple(name for name in TRAINER_NAMES if name != MEGATRON_FSDP)
LIMIT_OF_RATIO = 0.40  # ours over FSDP2, model compute included
LIMIT_OF_ADDED_SHARE = 0.25
LIMIT_OF_GROWTH = 1.05  # largest world over smallest, most units over fewest
PROFILED_STEPS = 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `host`."""
    parser = subparsers.add_parser(
        "host", help="Python cost of a unit and step, beside FSDP2 and DDP", description=__doc__
    )
    parser.add_argument("--units", type=counts, default=(10, 100, 400), metavar="N,N")
    parser.add_argument("--world", type=counts, default=(8, 1024), metavar="N,N")
    parser.add_argument(
        "--candidates",
        type=names_of(CANDIDATES),
        default=(PLAIN, "ddp", FSDP2, "zero3"),
        help=f"from {', '.join(CANDIDATES)}",
    )
    parser.add_argument("--visits", type=count, default=15, help="timed steps of every case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and samples here")
    parser.add_argument(
        "--profile", choices=CANDIDATES, help="show where the time of this candidate goes instead"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print; 0 unless it cannot be done as asked."""
    from ..host_cost import Case, cases_of, fake_ranks, measure, profile, summarise

    if options.json:
        require_writable_file(str(options.json), "--json")
    with fake_ranks(max(options.world)):
        if options.profile:
            case = Case(options.units[0], options.world[0], "").of(options.profile)
            print(f"{case.candidate}, {case.units} units, world {case.world}; us a unit and step")
            print(profile(case, PROFILED_STEPS).describe())
            return 0
        cases = cases_of(options.candidates, options.units, options.world)
        with shown(len(cases) * options.visits, "visits") as step:
            samples = measure(cases, options.visits, lambda case: step(case.candidate))
    summary = summarise(samples)
    print("\n".join(format_table(summary, options.visits)))
    print("\n".join(verdicts(samples, summary)))
    if options.json:
        write_json(options.json, content_of(options, samples, summary))
    return 0


def format_table(summary: Mapping[Case, Summary], visits: int) -> Iterator[str]:
    """A heading and one line a case."""
    yield (
        f"host cost, CPU us a unit and step, {TENSORS_A_BLOCK} tiny tensors a unit, torch "
        f"{torch.__version__}, {visits} visits; median [95 % interval]"
    )
    yield (
        f"{'units':>5} {'world':>5}  {'candidate':<12} {'us':<20} {'over FSDP2':<22} "
        "added, by what FSDP2 adds"
    )
    for case, row in summary.items():
        world = str(case.world) if case.world else "-"
        yield (
            f"{case.units:5} {world:>5}  {case.candidate:<12} {row.cpu_us.describe(digits=0):<20} "
            f"{_cell(row.ratio_to_fsdp2):<22} {_cell(row.added_share)}".rstrip()
        )


def verdicts(samples: Mapping[Case, Samples], summary: Mapping[Case, Summary]) -> Iterator[str]:
    """One line for every limit on each of ours, and how FSDP2 grows beside it."""
    from ..host_cost import growth

    for case, row in summary.items():
        if case.candidate.startswith("zero"):
            name = f"{case.candidate}, {case.units} units, world {case.world}"
            for what, found, limit in (
                ("over FSDP2", row.ratio_to_fsdp2, LIMIT_OF_RATIO),
                ("adds, of what FSDP2 adds", row.added_share, LIMIT_OF_ADDED_SHARE),
            ):
                if found is not None:
                    yield f"{name}: {what} at most {limit}: {compare_with_limit(found, limit)}"
    for small, large in _growths(tuple(summary)):
        ratio = growth(samples, small, large)
        what = (
            f"world {large.world} over {small.world}, {small.units} units"
            if small.world != large.world
            else f"{large.units} units over {small.units}, world {small.world}"
        )
        line = f"{small.candidate}: {what}: {ratio.describe()}"
        if small.candidate.startswith("zero"):
            line += f", at most {LIMIT_OF_GROWTH}: {compare_with_limit(ratio, LIMIT_OF_GROWTH)}"
        yield line


def _growths(cases: Sequence[Case]) -> Iterator[tuple[Case, Case]]:
    """For ours and FSDP2: the smallest and the largest world at each number of units, and the
    fewest and the most units at each world.
    """
    for name in sorted({case.candidate for case in cases}):
        if name != FSDP2 and not name.startswith("zero"):
            continue
        own = [case for case in cases if case.candidate == name]
        for fixed, moving in (("units", "world"), ("world", "units")):
            for value in sorted({getattr(case, fixed) for case in own}):
                line = [case for case in own if getattr(case, fixed) == value]
                line.sort(key=lambda case: getattr(case, moving))
                if len(line) > 1:
                    yield line[0], line[-1]


def content_of(
    options: argparse.Namespace, samples: Mapping[Case, Samples], summary: Mapping[Case, Summary]
) -> dict[str, Any]:
    """Of the file: machine, settings, and a row with its samples for every case."""
    rows = [
        {
            **asdict(case),
            **{
                name: None if estimate is None else estimate["median"]
                for name, estimate in asdict(summary[case]).items()
            },
            "estimates": asdict(summary[case]),
            "samples": asdict(samples[case]),
        }
        for case in samples
    ]
    return {
        **document("host", options.arguments, torch.device("cpu")),
        "settings": {
            name: getattr(options, name) for name in ("units", "world", "candidates", "visits")
        },
        "rows": rows,
    }


def _cell(estimate: Estimate | None) -> str:
    return "" if estimate is None else estimate.describe()
