"""Owns what a rank does in the step-time bench: two trainers in one process, steps in turn, then
proof that they trained alike.

    barrier | step | barrier      the timed span: a step counts as done when every rank has done it

Both trainers see the same batches in the same order, so after the same number of steps they must
hold the same losses and weights.
"""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from .models import DecoderConfig, build_batch
from .profiling import profile_calls
from .ranks import read_loopback_bytes
from .rivals import Trainer, build_trainer
from .timing import alternating_order

# DDP rebuilds its buckets and sidestream records the order of its units before a step is steady.
WARM_UP_STEPS = 3
WIRE_STEPS = 3
# Norm of the difference over norm of the weights. Equal bits are usual with 2 ranks; with more,
# another order of summing moves an Adam step by up to its own size where a gradient is next to
# zero.
PARAMETER_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class PairCase:
    """Two trainers by name and how long to time them."""

    names: tuple[str, str]
    pairs: int
    config: DecoderConfig


@dataclass(frozen=True, kw_only=True)
class PairOutcome:
    """What one rank saw. Lists are per trainer in order of steps; `wire_bytes` is one step's
    traffic of all ranks together.
    """

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]
    wire_bytes: dict[str, int | None]
    relative_difference: float
    share_of_unequal_elements: float


@dataclass(frozen=True, kw_only=True)
class SoloCase:
    """One trainer by name, and what to print about where its time goes: nothing, `python` or
    `operators`.
    """

    name: str
    steps: int
    config: DecoderConfig
    profile: str | None = None


@dataclass(frozen=True, kw_only=True)
class SoloOutcome:
    """What one rank saw of a trainer that has the process to itself."""

    seconds: list[float]
    losses: list[float]
    wire_bytes: int | None
    start_mib: float
    peak_mib: float
    profile: str | None


class BatchedTrainer:
    """A trainer that walks through its own copy of the common sequence of batches and keeps its
    losses.
    """

    def __init__(self, trainer: Trainer, config: DecoderConfig) -> None:
        self.trainer = trainer
        self.losses: list[Tensor] = []
        self._config = config

    def timed_step(self) -> float:
        """Train on the next batch; seconds from when every rank was ready to when every rank was
        done.
        """
        seed = len(self.losses) * dist.get_world_size() + dist.get_rank()
        batch = build_batch(self._config, seed=seed)
        dist.barrier()
        start = time.perf_counter()
        self.losses.append(self.trainer.step(*batch))
        dist.barrier()
        return time.perf_counter() - start

    def wire_bytes_of_a_step(self) -> int | None:
        """Least traffic on the loopback interface over some steps: strangers there can only add."""
        if read_loopback_bytes() is None:
            for _ in range(WIRE_STEPS):
                self.timed_step()
            return None
        counts = []
        for _ in range(WIRE_STEPS):
            dist.barrier()
            before = read_loopback_bytes()
            self.timed_step()
            after = read_loopback_bytes()
            assert before is not None and after is not None
            counts.append(after - before)
        return min(counts)


def work_on_pair(rank: int, case: PairCase) -> PairOutcome:
    """Time the two trainers of `case` in turn. Raises RuntimeError if they did not train alike."""
    runs = {
        name: BatchedTrainer(build_trainer(name, case.config), case.config) for name in case.names
    }
    for run in runs.values():
        for _ in range(WARM_UP_STEPS):
            run.timed_step()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.freeze()
    for name in alternating_order(case.names, case.pairs):
        seconds[name].append(runs[name].timed_step())
    gc.unfreeze()
    wire_bytes = {name: run.wire_bytes_of_a_step() for name, run in runs.items()}
    losses = {name: torch.stack(run.losses).tolist() for name, run in runs.items()}
    first, second = (run.trainer.full_parameters() for run in runs.values())
    relative, unequal = compare_parameters(first, second)
    check_agreement(losses, relative)
    return PairOutcome(
        seconds=seconds,
        losses=losses,
        wire_bytes=wire_bytes,
        relative_difference=relative,
        share_of_unequal_elements=unequal,
    )


def compare_parameters(first: dict[str, Tensor], second: dict[str, Tensor]) -> tuple[float, float]:
    """Norm of the difference over norm of `first`, and share of elements that are not equal, over
    all parameters.

    Raises ValueError when names or shapes differ.
    """
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in each.items()} for each in (first, second)
    ]
    if shapes[0] != shapes[1]:
        odd = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))
        raise ValueError(
            f"both trainers must hold the same parameters, but these differ: {odd[:6]}."
        )
    difference = scale = 0.0
    unequal = total = 0
    for name, tensor in first.items():
        delta = tensor.double() - second[name].double()
        difference += float(delta.square().sum())
        scale += float(tensor.double().square().sum())
        unequal += int((tensor != second[name]).sum())
        total += tensor.numel()
    return (difference / scale) ** 0.5, unequal / total


def check_agreement(losses: dict[str, list[float]], relative_difference: float) -> None:
    """Raises RuntimeError when the trainers' losses or weights differ by more than rounding
    explains; NaN counts as different.
    """
    (first_name, first), (second_name, second) = losses.items()
    gaps = [abs(left - right) for left, right in zip(first, second, strict=True)]
    worst = max(math.inf if math.isnan(gap) else gap for gap in gaps)
    if not (worst <= LOSS_TOLERANCE and relative_difference <= PARAMETER_TOLERANCE):
        raise RuntimeError(
            f"{first_name} and {second_name} did not train alike: losses differ by up to "
            f"{worst:.3g} (expected at most {LOSS_TOLERANCE:g}), weights by "
            f"{relative_difference:.3g} of their norm (expected at most {PARAMETER_TOLERANCE:g}); "
            "a time is worth nothing until they agree."
        )


def work_alone(rank: int, case: SoloCase) -> SoloOutcome:
    """Time one trainer; rank 0 profiles as many steps again if `case` asks for it, while the others
    just take part.
    """
    start_mib = _peak_resident_mib()
    run = BatchedTrainer(build_trainer(case.name, case.config), case.config)
    for _ in range(WARM_UP_STEPS):
        run.timed_step()
    seconds = [run.timed_step() for _ in range(case.steps)]
    wire_bytes = run.wire_bytes_of_a_step()
    report = None
    if case.profile:
        profile = _PROFILERS[case.profile] if rank == 0 else _no_profile
        report = profile(run.timed_step, case.steps)
    return SoloOutcome(
        seconds=seconds,
        losses=torch.stack(run.losses).tolist(),
        wire_bytes=wire_bytes,
        start_mib=start_mib,
        peak_mib=_peak_resident_mib(),
        profile=report,
    )


def _no_profile(call: Callable[[], object], steps: int) -> None:
    for _ in range(steps):
        call()


def _profile_python(call: Callable[[], object], steps: int) -> str:
    return profile_calls(call, steps).describe()


def _profile_operators(call: Callable[[], object], steps: int) -> str:
    with torch_profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            call()
    averages = recorded.key_averages()
    return f"totals over {steps} steps\n" + averages.table(
        sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60
    )


_PROFILERS: dict[str, Callable[[Callable[[], object], int], str | None]] = {
    "python": _profile_python,
    "operators": _profile_operators,
}


def _peak_resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
