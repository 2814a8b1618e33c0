"""`sidestream bench step`: how long a training step takes, beside DDP, FSDP2 and Megatron-FSDP.

    sidestream bench step --against ddp,fsdp2 --json now.json
    sidestream bench step --trainer-only zero3 --profile python

Same model, same data, steps in turn: gloo ranks on a CPU, or a rank for every GPU over NCCL. Prints
a table and verdicts on the project's limits; `bench.step_time` says how it is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...training.errors import UsageError
from ...training.paths import require_writable_file
from ..models import STEP_TIME_CONFIG, TINY_CONFIG
from ..ranks import GLOO_RANKS, RanksFailed, choose_ranks
from ..reports import document, write_json
from ..trainer_names import FSDP2, MEGATRON_FSDP, TRAINER_NAMES
from .parsing import DEVICES, count, names_of

if TYPE_CHECKING:
    from ..step_time import Figures, Plan, Row
    from ..step_worker import Task

CANDIDATE_AGAINST = {
    "ddp": "zero0",
    "ddp_zero1": "zero1",
    FSDP2: "zero3",
    "fsdp2_tuned": "zero3",
    MEGATRON_FSDP: "zero3",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `step`."""
    parser = subparsers.add_parser(
        "step", help="time of a training step, beside FSDP2 and DDP", description=__doc__
    )
    parser.add_argument(
        "--against",
        type=names_of(TRAINER_NAMES),
        help=f"default: those of {', '.join(CANDIDATE_AGAINST)} that can run here",
    )
    candidate = parser.add_mutually_exclusive_group()
    candidate.add_argument(
        "--zero", type=int, choices=range(4), help="level of ours; default: the rival's, or 3"
    )
    candidate.add_argument(
        "--candidate", choices=TRAINER_NAMES, help="any trainer in the place of ours"
    )
    parser.add_argument("--pairs", type=count, default=25, help="timed steps of both, a launch")
    parser.add_argument("--launches", type=count, default=3, help="fresh ranks, one after another")
    parser.add_argument(
        "--world", type=count, help=f"ranks; default {GLOO_RANKS}, or one for every GPU"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="fp32",
        help="of forward, backward and wire; the optimizer keeps fp32",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and samples here")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few thousand parameters, to try the bench"
    )
    parser.add_argument(
        "--trainer-only", choices=TRAINER_NAMES, help="time this trainer alone, instead"
    )
    parser.add_argument(
        "--steps", type=count, default=10, help="with --trainer-only: steps to time"
    )
    parser.add_argument(
        "--profile",
        choices=("python", "operators"),
        help="with --trainer-only: where the time of rank 0 goes",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 when trainers did not train alike or a rank failed."""
    from ..rivals import require_trainer
    from ..step_time import Plan
    from ..step_worker import Task

    _refuse_idle_options(options)
    if options.json:
        require_writable_file(str(options.json), "--json")
    device_type, world = choose_ranks(options.device, options.world)
    config = TINY_CONFIG if options.tiny else STEP_TIME_CONFIG
    task = Task(config=config, device_type=device_type, dtype=DTYPES[options.dtype])
    plan = Plan(task=task, world=world, pairs=options.pairs, launches=options.launches)
    if options.trainer_only:
        require_trainer(options.trainer_only, device_type, task.dtype)
        work = _run_alone
    else:
        options.comparisons = choose_comparisons(options, task)
        work = _run_comparisons
    print(_heading(options, plan), flush=True)
    try:
        work(options, plan)
    except RanksFailed as error:
        print(f"sidestream bench step: {error}", file=sys.stderr)
        return 1
    return 0


def _refuse_idle_options(options: argparse.Namespace) -> None:
    if options.profile and not options.trainer_only:
        raise UsageError(
            "--profile: expected --trainer-only beside it, got none; name the trainer to profile"
        )
    if options.json and options.trainer_only:
        raise UsageError(
            "--json: expected a comparison, got --trainer-only; leave one of the two out"
        )


def choose_comparisons(options: argparse.Namespace, task: Task) -> list[tuple[str, str]]:
    """(candidate, rival) for each rival asked for, or for each known one that can run here.

    Raises:
        UsageError: one of them cannot run here, or would be compared with itself.
    """
    from ..rivals import require_trainer

    comparisons = []
    for rival in options.against or CANDIDATE_AGAINST:
        if options.zero is not None:
            candidate = f"zero{options.zero}"
        else:
            candidate = options.candidate or CANDIDATE_AGAINST.get(rival, "zero3")
        if options.against and candidate == rival:
            raise UsageError(
                f"--against: expected another trainer than the candidate, got {rival} for both; "
                "pass --candidate or --zero"
            )
        require_trainer(candidate, task.device_type, task.dtype)
        try:
            require_trainer(rival, task.device_type, task.dtype)
        except UsageError:
            if options.against:
                raise
            continue
        if candidate != rival:
            comparisons.append((candidate, rival))
    if not comparisons:
        raise UsageError(
            f"--against: expected a trainer to compare {options.candidate} with, got none and none "
            "of the usual ones can run here; name one that can"
        )
    return comparisons


def _heading(options: argparse.Namespace, plan: Plan) -> str:
    backend = "NCCL" if plan.task.device_type == "cuda" else "gloo"
    return (
        f"step time: {plan.world} {backend} ranks, {plan.task.config.numel / 1e6:.2f} M "
        f"parameters, {options.dtype}, torch {torch.__version__}"
    )


def _run_comparisons(options: argparse.Namespace, plan: Plan) -> None:
    from ..step_time import compare

    rows = compare(options.comparisons, plan, lambda text: print(text, flush=True))
    print("\n".join(["", *format_table(rows), "", *(line for r in rows for line in r.verdicts())]))
    if options.json:
        write_json(options.json, content_of(options, plan, rows))


def format_table(rows: Sequence[Row]) -> Iterator[str]:
    """A heading and one line a comparison; cells are candidate / rival."""
    yield "candidate / rival; ratio: median [95 % interval]; MiB: peak of a rank above its start"
    head = ("candidate", "rival", "ms", "tokens/s", "ratio", "MiB", "wire MB")
    yield _line((*head, f"loss after {rows[0].steps}", "weights"))
    for row in rows:
        both = (row.candidate_figures, row.rival_figures)
        yield _line(
            (
                row.candidate,
                row.rival,
                _cell(both, lambda one: f"{one.ms:.1f}"),
                _cell(both, lambda one: f"{one.tokens_per_s:.0f}"),
                row.ratio.describe(),
                _cell(both, lambda one: f"{one.peak_mib:.1f}"),
                _cell(both, lambda one: _megabytes(one.wire_bytes)),
                _cell(both, lambda one: f"{one.loss:.4f}"),
                _agreement(row),
            )
        )


def _line(cells: Sequence[str]) -> str:
    widths = (11, 14, 17, 17, 23, 13, 15, 17)
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)]
    return " ".join([*padded, cells[-1]])


def _cell(both: Sequence[Figures], show: Callable[[Figures], str]) -> str:
    return " / ".join(show(one) for one in both)


def _megabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.1f}"


def _agreement(row: Row) -> str:
    if row.share_of_unequal_elements == 0.0:
        return "equal bits"
    return f"{row.share_of_unequal_elements:.1%} unequal, {row.relative_difference:.1e} of norm"


def content_of(options: argparse.Namespace, plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """Of the file: machine, settings, and a row with its samples for every comparison."""
    task = plan.task
    return {
        **document("step", options.arguments, torch.device(task.device_type)),
        "settings": {
            "device_type": task.device_type,
            "dtype": str(task.dtype).removeprefix("torch."),
            "parameters": task.config.numel,
            "config": asdict(task.config),
            "world": plan.world,
            "pairs": plan.pairs,
            "launches": plan.launches,
        },
        "rows": [{**asdict(row), "verdicts": row.verdicts()} for row in rows],
    }


def _run_alone(options: argparse.Namespace, plan: Plan) -> None:
    """Print one trainer's time for each step, its traffic, its memory and, if asked, where rank 0's
    time goes.
    """
    from ..step_time import launch_alone
    from ..step_worker import SoloCase

    case = SoloCase(
        name=options.trainer_only, steps=options.steps, task=plan.task, profile=options.profile
    )
    outcome = launch_alone(case, plan.world)[0]
    times = " ".join(f"{seconds * 1e3:.1f}" for seconds in outcome.seconds)
    median_ms = statistics.median(outcome.seconds) * 1e3
    print(f"{case.name}: median {median_ms:.1f} ms a step of: {times}")
    print(f"wire: {_megabytes(outcome.wire_bytes)} MB a step, all ranks together")
    print(f"memory of rank 0: {outcome.start_mib:.0f} MiB at start, {outcome.peak_mib:.0f} at peak")
    if outcome.profile:
        print(outcome.profile)
