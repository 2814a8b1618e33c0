"""Owns the comparison of step times: sidestream against DDP, FSDP2 and tuned FSDP2 on gloo ranks of
this machine.

    python -m sidestream.bench.step_time [--pairs 25 --launches 3 --zero 3 --json FILE]
                                         [--against ddp,fsdp2,fsdp2_tuned]
    python -m sidestream.bench.step_time --trainer-only zero3 [--steps 10]
                                         [--profile python|operators]

Every launch starts fresh ranks that hold both trainers, one compute thread each, fp32, AdamW, a 26
M parameter decoder. Steps alternate A B B A and a pair's ratio is (ours / rival); losses and
weights must agree. Printed: the median ratio of each launch and of all, each with its 95 %
bootstrap interval, bytes a step on the loopback interface, and how far the final weights are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .models import STEP_TIME_CONFIG, DecoderConfig
from .ranks import run_ranks
from .rivals import TRAINER_NAMES
from .step_worker import PairCase, PairOutcome, SoloCase, work_alone, work_on_pair
from .timing import (
    RESOLUTION,
    Estimate,
    compare_with_limit,
    estimate_median,
    estimate_median_of_launches,
    pair_ratios,
)

LIMITS = {("zero3", "fsdp2"): 0.90, ("zero3", "fsdp2_tuned"): 1.0, ("zero0", "ddp"): 1.05}
CANDIDATE_AGAINST = {rival: candidate for candidate, rival in LIMITS}
TINY_CONFIG = DecoderConfig(
    layers=2, width=16, heads=2, hidden=32, vocabulary=32, sequence=8, batch=2
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of one comparison: per pair the slowest rank's seconds of each trainer, and what
    else was seen.
    """

    candidate_seconds: list[float]
    rival_seconds: list[float]
    candidate_wire_bytes: int | None
    rival_wire_bytes: int | None
    relative_difference: float
    share_of_unequal_elements: float
    losses_equal: bool

    @property
    def ratios(self) -> list[float]:
        """Candidate over rival, pair by pair."""
        return pair_ratios(self.candidate_seconds, self.rival_seconds)


def launch_pair(case: PairCase, world: int) -> Launch:
    """Start ranks, time one comparison, and join what the ranks saw."""
    outcomes: list[PairOutcome] = run_ranks(work_on_pair, world, case)
    candidate, rival = case.names
    seconds = {
        name: [max(times) for times in zip(*(each.seconds[name] for each in outcomes), strict=True)]
        for name in case.names
    }
    return Launch(
        candidate_seconds=seconds[candidate],
        rival_seconds=seconds[rival],
        candidate_wire_bytes=outcomes[0].wire_bytes[candidate],
        rival_wire_bytes=outcomes[0].wire_bytes[rival],
        relative_difference=max(each.relative_difference for each in outcomes),
        share_of_unequal_elements=max(each.share_of_unequal_elements for each in outcomes),
        losses_equal=all(each.losses[candidate] == each.losses[rival] for each in outcomes),
    )


def describe_launch(index: int, launch: Launch) -> str:
    """One line: medians, ratio with interval, traffic, agreement."""
    wire = (
        "not counted"
        if launch.candidate_wire_bytes is None or launch.rival_wire_bytes is None
        else f"{launch.candidate_wire_bytes / 1e6:.1f} / {launch.rival_wire_bytes / 1e6:.1f} MB"
    )
    weights = (
        "equal bits"
        if launch.share_of_unequal_elements == 0.0
        else f"{launch.share_of_unequal_elements:.1%} unequal, "
        f"{launch.relative_difference:.1e} of norm"
    )
    return (
        f"  launch {index}: {statistics.median(launch.candidate_seconds) * 1e3:.0f} / "
        f"{statistics.median(launch.rival_seconds) * 1e3:.0f} ms, "
        f"ratio {estimate_median(launch.ratios).describe()}, wire {wire}, weights {weights}, "
        f"losses {'equal' if launch.losses_equal else 'within rounding'}"
    )


def describe_all(names: tuple[str, str], launches: Sequence[Launch]) -> str:
    """The pooled ratio and, where the project has set a limit for this comparison, whether it
    holds.
    """
    pooled = pool(launches)
    line = f"  all {pooled.num_samples} pairs: {names[0]} / {names[1]} = {pooled.describe()}"
    if names in LIMITS:
        line += f"; at most {LIMITS[names]}: {compare_with_limit(pooled, LIMITS[names])}"
    if abs(pooled.median - 1.0) < RESOLUTION:
        line += f"; closer to 1 than {RESOLUTION:.0%}, which this method does not tell apart"
    return line


def pool(launches: Sequence[Launch]) -> Estimate:
    """Median ratio over all launches."""
    return estimate_median_of_launches([launch.ratios for launch in launches])


def compare(options: argparse.Namespace, config: DecoderConfig) -> None:
    """Run every comparison asked for, print as results come, write the result file if asked."""
    print(
        f"step time: {options.world} gloo ranks, {config.numel / 1e6:.2f} M parameters, fp32, "
        f"torch {torch.__version__}; candidate / rival, median [95 % interval]"
    )
    results = []
    for rival in options.against:
        names = (options.candidate or CANDIDATE_AGAINST[rival], rival)
        print(
            f"{names[0]} against {names[1]}: {options.launches} launches of {options.pairs} pairs"
        )
        case = PairCase(names=names, pairs=options.pairs, config=config)
        launches = []
        for index in range(1, options.launches + 1):
            launches.append(launch_pair(case, options.world))
            print(describe_launch(index, launches[-1]), flush=True)
        print(describe_all(names, launches), flush=True)
        results.append(
            {
                "candidate": names[0],
                "rival": names[1],
                "limit": LIMITS.get(names),
                "ratio": pool(launches).as_json(),
                "launches": [asdict(launch) for launch in launches],
            }
        )
    if options.json:
        content = {
            "world": options.world,
            "config": asdict(config),
            "parameters": config.numel,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "comparisons": results,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def run_alone(options: argparse.Namespace, config: DecoderConfig) -> None:
    """Print one trainer's time for each step, its traffic, its memory and, if asked, where rank 0's
    time goes.
    """
    case = SoloCase(
        name=options.trainer_only, steps=options.steps, config=config, profile=options.profile
    )
    outcome = run_ranks(work_alone, options.world, case)[0]
    times = " ".join(f"{seconds * 1e3:.0f}" for seconds in outcome.seconds)
    print(
        f"{case.name}: median {statistics.median(outcome.seconds) * 1e3:.1f} ms a step of: {times}"
    )
    if outcome.wire_bytes is not None:
        print(f"wire: {outcome.wire_bytes / 1e6:.1f} MB a step, all ranks together")
    print(
        f"resident memory of rank 0: {outcome.start_mib:.0f} MiB at start, "
        f"{outcome.peak_mib:.0f} at peak"
    )
    if outcome.profile:
        print(outcome.profile)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line; ends the program with a message for a trainer that does not
    exist.
    """
    parser = argparse.ArgumentParser(
        prog="sidestream.bench.step_time", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--world", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument(
        "--against", default=",".join(CANDIDATE_AGAINST), type=lambda text: text.split(",")
    )
    candidate = parser.add_mutually_exclusive_group()
    candidate.add_argument(
        "--zero", type=int, choices=range(4), help="level of ours; default: 0 against DDP, else 3"
    )
    candidate.add_argument(
        "--candidate", choices=TRAINER_NAMES, help="any trainer in the place of ours"
    )
    parser.add_argument("--json", type=Path, help="write settings, samples and estimates here")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few thousand parameters, to try the bench"
    )
    parser.add_argument("--trainer-only", choices=TRAINER_NAMES, help="time this trainer alone")
    parser.add_argument("--steps", type=int, default=10, help="with --trainer-only: steps to time")
    parser.add_argument("--profile", choices=("python", "operators"), help="with --trainer-only")
    options = parser.parse_args(arguments)
    for rival in options.against:
        if rival not in TRAINER_NAMES:
            parser.error(f"--against takes {', '.join(TRAINER_NAMES)}, got {rival!r}")
    if options.zero is not None:
        options.candidate = f"zero{options.zero}"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the head of this file."""
    options = parse(arguments)
    config = TINY_CONFIG if options.tiny else STEP_TIME_CONFIG
    if options.trainer_only:
        run_alone(options, config)
    else:
        compare(options, config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
