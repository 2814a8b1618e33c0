"""Owns the measurement of host cost: microseconds of our Python for one unit in one step, beside
PyTorch FSDP2 and the plain model.

    python -m sidestream.bench.host_cost [--units 50 --world 8 --visits 12 --steps 4 --json FILE]
    python -m sidestream.bench.host_cost --profile zero3        where one candidate's time goes

A step is forward, backward, AdamW(foreach=True) and zero_grad of a decoder whose tensors are so
tiny that only overhead shows. Collectives go to torch's "fake" process group, which moves nothing,
so any world size is measured in one process. One thread computes. Candidates take turns (A B C C B
A ...); one visit is an untimed step and then `--steps` timed ones, of which the median counts.
Automatic garbage collection stays on, because a candidate's garbage is part of its cost; what lives
after the warm-up is frozen, so that nobody pays for walking the objects of the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from .models import TENSORS_A_BLOCK, build_batch, host_cost_config
from .profiling import Profile, profile_calls
from .rivals import TRAINER_NAMES, Trainer, build_trainer
from .timing import (
    Estimate,
    alternating_order,
    compare_with_limit,
    estimate_median,
    pair_differences,
    pair_ratios,
)

LIMIT_OF_RATIO = 0.4  # ours over FSDP2, model compute included
WARM_UP_STEPS = 4
# DDP's reducer asks the collective's future for its tensors, which the fake group does not give.
CANDIDATES = tuple(name for name in TRAINER_NAMES if name != "ddp")
# Wall-clock counts waits between threads and time taken by strangers; CPU counts every thread.
_CLOCKS = {"wall": "wall", "cpu": "CPU, all threads"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: `visits` turns of `steps` timed steps for each candidate."""

    units: int = 50
    world: int = 8
    visits: int = 12
    steps: int = 4
    candidates: tuple[str, ...] = ("plain", "fsdp2", "zero3")


@dataclass(frozen=True)
class Samples:
    """One value a visit and candidate, in microseconds a unit and step: wall-clock, and CPU of all
    threads.
    """

    wall_us: dict[str, list[float]]
    cpu_us: dict[str, list[float]]


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """torch.distributed as rank 0 of `world` ranks whose collectives do nothing; one compute thread
    inside.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Gathered buffers hold whatever memory held before: denormal numbers there would slow the
    # arithmetic of some candidates.
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep what lives now out of the garbage collector's walks."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(settings: Settings) -> Samples:
    """Build every candidate, warm it up, and let them take turns; must run inside `fake_ranks`."""
    config = host_cost_config(settings.units)
    batch = build_batch(config, seed=1)
    trainers = {name: build_trainer(name, config, foreach=True) for name in settings.candidates}
    for trainer in trainers.values():
        for _ in range(WARM_UP_STEPS):
            trainer.step(*batch)
    samples = Samples({name: [] for name in trainers}, {name: [] for name in trainers})
    with frozen_heap():
        for name in alternating_order(list(trainers), settings.visits):
            wall, cpu = _visit(trainers[name], batch, settings.steps)
            samples.wall_us[name].append(wall * 1e6 / settings.units)
            samples.cpu_us[name].append(cpu * 1e6 / settings.units)
    return samples


def _visit(
    trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], steps: int
) -> tuple[float, float]:
    trainer.step(*batch)
    wall, cpu = [], []
    for _ in range(steps):
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        trainer.step(*batch)
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    return statistics.median(wall), statistics.median(cpu)


def summarise(samples: Samples) -> dict[str, dict[str, Estimate]]:
    """Per candidate `wall_us` and `cpu_us`; where measured, `added_wall_us` and `added_cpu_us` over
    the plain model, and `wall_over_fsdp2` and `cpu_over_fsdp2`.
    """
    summary: dict[str, dict[str, Estimate]] = {name: {} for name in samples.wall_us}
    for clock, by_name in (("wall", samples.wall_us), ("cpu", samples.cpu_us)):
        plain, fsdp2 = by_name.get("plain"), by_name.get("fsdp2")
        for name, values in by_name.items():
            summary[name][f"{clock}_us"] = estimate_median(values)
            if plain is not None:
                added = pair_differences(values, plain)
                summary[name][f"added_{clock}_us"] = estimate_median(added)
            if fsdp2 is not None:
                ratios = pair_ratios(values, fsdp2)
                summary[name][f"{clock}_over_fsdp2"] = estimate_median(ratios)
    return summary


def format_table(settings: Settings, summary: dict[str, dict[str, Estimate]]) -> str:
    """The printed report: two rows a candidate, then verdicts for each of ours."""
    lines = [
        f"host cost, us a unit and step: {settings.units} units of {TENSORS_A_BLOCK} tensors, "
        f"world {settings.world}, torch {torch.__version__}, "
        f"{settings.visits} visits of {settings.steps} steps; median [95 % interval]",
        f"{'candidate':<12} {'clock':<17} {'us':<22} {'added over plain, us':<22} over FSDP2",
    ]
    for name, row in summary.items():
        for clock, label in _CLOCKS.items():
            cells = [
                row[key].describe(digits=digits) if key in row else "-"
                for key, digits in (
                    (f"{clock}_us", 0),
                    (f"added_{clock}_us", 0),
                    (f"{clock}_over_fsdp2", 3),
                )
            ]
            lines.append(f"{name:<12} {label:<17} {cells[0]:<22} {cells[1]:<22} {cells[2]}")
    for name, row in summary.items():
        for clock, label in _CLOCKS.items():
            if name.startswith("zero") and f"{clock}_over_fsdp2" in row:
                verdict = compare_with_limit(row[f"{clock}_over_fsdp2"], LIMIT_OF_RATIO)
                lines.append(f"{name} over FSDP2, {label}, at most {LIMIT_OF_RATIO}: {verdict}")
    return "\n".join(lines)


def profile(name: str, settings: Settings) -> Profile:
    """Profile one candidate's steps, per unit and step; must run inside `fake_ranks`."""
    config = host_cost_config(settings.units)
    batch = build_batch(config, seed=1)
    trainer = build_trainer(name, config, foreach=True)
    for _ in range(WARM_UP_STEPS):
        trainer.step(*batch)
    with frozen_heap():
        return profile_calls(
            lambda: trainer.step(*batch), settings.visits * settings.steps, units=settings.units
        )


def write_json(path: Path, settings: Settings, samples: Samples) -> None:
    """Settings, machine, samples and estimates, so that a figure can be recomputed."""
    summary = {
        name: {key: estimate.as_json() for key, estimate in row.items()}
        for name, row in summarise(samples).items()
    }
    content = {
        "settings": asdict(settings),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "limit_of_ratio": LIMIT_OF_RATIO,
        "summary": summary,
        "samples": asdict(samples),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(
        prog="sidestream.bench.host_cost", description=__doc__.splitlines()[0]
    )
    defaults = Settings()
    parser.add_argument("--units", type=int, default=defaults.units)
    parser.add_argument("--world", type=int, default=defaults.world)
    parser.add_argument("--visits", type=int, default=defaults.visits)
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="timed steps in one visit"
    )
    parser.add_argument(
        "--candidates",
        default=",".join(defaults.candidates),
        help=f"from {', '.join(CANDIDATES)}",
    )
    parser.add_argument("--json", type=Path, help="write settings, samples and estimates here")
    parser.add_argument("--profile", choices=CANDIDATES, help="profile this candidate instead")
    options = parser.parse_args(arguments)
    candidates = tuple(options.candidates.split(","))
    if unknown := set(candidates) - set(CANDIDATES):
        parser.error(f"--candidates takes {', '.join(CANDIDATES)}, got {sorted(unknown)}")
    settings = Settings(
        units=options.units,
        world=options.world,
        visits=options.visits,
        steps=options.steps,
        candidates=candidates,
    )
    with fake_ranks(settings.world):
        if options.profile:
            print(f"{options.profile}, us a unit and step")
            print(profile(options.profile, settings).describe())
            return 0
        samples = measure(settings)
    print(format_table(settings, summarise(samples)))
    if options.json:
        write_json(options.json, settings, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
