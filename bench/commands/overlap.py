"""`sidestream bench overlap`: a timeline of steps, and how much communication nothing hides.

On a CPU the ranks talk over gloo. On several GPUs there is a rank for each; on a single one the
collectives are stood in for by a timed spin on their stream, which the picture says.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from ...training.paths import require_writable_file
from ..models import STEP_TIME_CONFIG
from ..ranks import GLOO_RANKS, RanksFailed, choose_ranks
from ..reports import write_text
from ..timeline import Timeline, as_html, read_timeline
from ..trainer_names import FSDP2, PLAIN, TRAINER_NAMES
from .parsing import DEVICES, count, names_of

# DDP waits in C++, where nobody sees it; the plain model has nothing to wait for.
CANDIDATES = tuple(name for name in TRAINER_NAMES if "ddp" not in name and name != PLAIN)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `overlap`."""
    parser = subparsers.add_parser(
        "overlap", help="timeline of a step and exposed communication", description=__doc__
    )
    parser.add_argument(
        "--candidates",
        type=names_of(CANDIDATES),
        default=("zero3", FSDP2),
        help=f"from {', '.join(CANDIDATES)}",
    )
    parser.add_argument(
        "--world", type=count, help=f"ranks; default {GLOO_RANKS}, or one for every GPU"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--steps", type=count, default=3, help="steps to record")
    parser.add_argument("--layers", type=count, default=STEP_TIME_CONFIG.layers)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the first candidate's trace here, for ui.perfetto.dev or chrome://tracing",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the picture here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Record, print and write; 0 unless it cannot be done as asked."""
    from ..overlap import STAND_IN_GB_PER_S, STAND_IN_WORLD, OverlapCase, record
    from ..rivals import require_trainer
    from ..step_worker import Task

    for option in ("trace", "html"):
        if path := getattr(options, option):
            require_writable_file(str(path), f"--{option}")
    device_type, world = choose_ranks(options.device, options.world)
    if device_type == "cuda" and world == 1:
        world = 0  # nothing to send: stand-ins
    for name in options.candidates:
        require_trainer(name, device_type)
    config = replace(STEP_TIME_CONFIG, layers=options.layers)
    task = Task(config=config, device_type=device_type)
    where = (
        f"{world} {'NCCL' if device_type == 'cuda' else 'gloo'} ranks"
        if world
        else f"one GPU as rank 0 of {STAND_IN_WORLD}; collectives stood in for by a spin of "
        f"{STAND_IN_GB_PER_S:.0f} GB/s"
    )
    heading = f"{options.steps} steps, {config.numel / 1e6:.2f} M parameters, fp32, {where}"
    print(heading)
    timelines: dict[str, Timeline] = {}
    for name in options.candidates:
        case = OverlapCase(name=name, task=task, steps=options.steps, world=world)
        try:
            events = record(case)
        except RanksFailed as error:
            print(error, file=sys.stderr)
            return 1
        timelines[name] = read_timeline(events)
        print(describe(name, timelines[name]), flush=True)
        if options.trace and name == options.candidates[0]:
            write_text(options.trace, json.dumps({"traceEvents": events}))
    if options.html:
        write_text(options.html, as_html(timelines, heading))
    return 0


def describe(name: str, timeline: Timeline) -> str:
    """One candidate's lanes, and its exposed communication."""
    step_ms = timeline.length_ms / timeline.steps
    lanes = [
        f"  {lane:<10} {timeline.busy_ms(lane):8.2f} ms {timeline.busy_ms(lane) / step_ms:7.1%}"
        for lane in timeline.lanes
    ]
    heading = f"{name}: {step_ms:.2f} ms a step, exposed communication {timeline.exposed_share:.1%}"
    return "\n".join([heading, *lanes])
