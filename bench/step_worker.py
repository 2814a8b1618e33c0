"""What a rank does in `sidestream bench step`: two trainers in one process, steps in turn,
then proof that they trained alike; or one trainer alone, for its memory and its profile.

    barrier | step | barrier      the timed span: a step counts as done when every rank has done it

Both trainers see the same batches in the same order, so after the same number of steps they must
hold the same losses and weights. On a GPU every barrier waits for the device first.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from ..training.result import peak_memory_mib
from .models import TINY_CONFIG, DecoderConfig, build_batch
from .profiling import cpu_seconds, profile_calls
from .ranks import device_of, read_loopback_bytes
from .resident import return_freed_memory
from .rivals import Setup, Trainer, build_trainer
from .timing import alternating_order, frozen_heap

# DDP rebuilds its buckets and sidestream records the order of its units before a step is steady.
WARM_UP_STEPS = 3
WIRE_STEPS = 3
# Norm of the difference over norm of the weights. Equal bits are usual with 2 ranks; with more,
# another order of summing moves an Adam step by up to its own size where a gradient is next to
# zero.
PARAMETER_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Logits in bfloat16 have eight bits: 5.5 is known to 0.02.
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on what, and in which dtype."""

    config: DecoderConfig
    device_type: str = "cpu"
    dtype: torch.dtype = torch.float32

    def setup(self) -> Setup:
        """For the trainers of this rank: all ranks in one mesh."""
        mesh = init_device_mesh(self.device_type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        device = device_of(dist.get_rank(), self.device_type)
        return Setup(mesh=mesh, device=device, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class PairCase:
    """Two trainers by name and how long to time them."""

    names: tuple[str, str]
    pairs: int
    task: Task


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
    `operators`. exact_memory: see `resident`; it makes steps slow.
    """

    name: str
    steps: int
    task: Task
    profile: str | None = None
    exact_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class SoloOutcome:
    """What one rank saw of a trainer that has the process to itself.

    start_mib, peak_mib: resident memory, or allocated on the GPU, before it is built and at most.
    """

    seconds: list[float]
    wire_bytes: int | None
    start_mib: float
    peak_mib: float
    profile: str | None


class BatchedTrainer:
    """A trainer that walks through its own copy of the common sequence of batches and keeps its
    losses.
    """

    def __init__(self, name: str, config: DecoderConfig, setup: Setup) -> None:
        self.trainer: Trainer = build_trainer(name, config, setup)
        self.losses: list[Tensor] = []
        self._config = config
        self._device = setup.device

    def timed_step(self) -> float:
        """Train on the next batch; seconds from when every rank was ready to when every rank was
        done.
        """
        seed = len(self.losses) * dist.get_world_size() + dist.get_rank()
        batch = [each.to(self._device) for each in build_batch(self._config, seed=seed)]
        self._meet()
        start = time.perf_counter()
        self.losses.append(self.trainer.step(*batch))
        self._meet()
        return time.perf_counter() - start

    def _meet(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier()

    def wire_bytes_of_a_step(self) -> int | None:
        """Least traffic on the loopback interface over some steps: strangers there can only add.
        None where the ranks do not talk over it.
        """
        counts = []
        for _ in range(WIRE_STEPS):
            dist.barrier()
            before = read_loopback_bytes()
            self.timed_step()
            after = read_loopback_bytes()
            if self._device.type == "cpu" and before is not None and after is not None:
                counts.append(after - before)
        return min(counts, default=None)


def work_on_pair(rank: int, case: PairCase) -> PairOutcome:
    """Time the two trainers of `case` in turn. Raises RuntimeError if they did not train alike."""
    setup = case.task.setup()
    runs = {name: BatchedTrainer(name, case.task.config, setup) for name in case.names}
    for run in runs.values():
        for _ in range(WARM_UP_STEPS):
            run.timed_step()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with frozen_heap():
        for name in alternating_order(case.names, case.pairs):
            seconds[name].append(runs[name].timed_step())
    wire_bytes = {name: run.wire_bytes_of_a_step() for name, run in runs.items()}
    losses = {name: torch.stack(run.losses).tolist() for name, run in runs.items()}
    first, second = (run.trainer.full_parameters() for run in runs.values())
    relative, unequal = compare_parameters(first, second)
    check_agreement(losses, relative, case.task.dtype)
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


def check_agreement(
    losses: dict[str, list[float]],
    relative_difference: float,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raises RuntimeError when the trainers' losses or weights differ by more than rounding
    explains; NaN counts as different.
    """
    (first_name, first), (second_name, second) = losses.items()
    gaps = [abs(left - right) for left, right in zip(first, second, strict=True)]
    worst = max(math.inf if math.isnan(gap) else gap for gap in gaps)
    of_loss, of_weights = LOSS_TOLERANCE[dtype], PARAMETER_TOLERANCE[dtype]
    if not (worst <= of_loss and relative_difference <= of_weights):
        raise RuntimeError(
            f"{first_name} and {second_name} did not train alike: losses differ by up to "
            f"{worst:.3g} (expected at most {of_loss:g}), weights by {relative_difference:.3g} of "
            f"their norm (expected at most {of_weights:g}); a time is worth nothing until they "
            "agree."
        )


def work_alone(rank: int, case: SoloCase) -> SoloOutcome:
    """Time one trainer; rank 0 profiles as many steps again if `case` asks for it, while the others
    just take part.
    """
    setup = case.task.setup()
    if case.exact_memory:
        return_freed_memory()
    # What is loaded and kept by the first step of a process is not the trainer's.
    BatchedTrainer(case.name, TINY_CONFIG, setup).timed_step()
    gc.collect()
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.device)
    start_mib = peak_memory_mib(setup.device)
    run = BatchedTrainer(case.name, case.task.config, setup)
    for _ in range(WARM_UP_STEPS):
        run.timed_step()
    seconds = [run.timed_step() for _ in range(case.steps)]
    wire_bytes = run.wire_bytes_of_a_step()
    peak_mib = peak_memory_mib(setup.device)
    report = None
    if case.profile and rank == 0:
        report = _PROFILERS[case.profile](run.timed_step, case.steps)
    elif case.profile:
        for _ in range(case.steps):
            run.timed_step()
    return SoloOutcome(
        seconds=seconds,
        wire_bytes=wire_bytes,
        start_mib=start_mib,
        peak_mib=peak_mib,
        profile=report,
    )


def _profile_python(call: Callable[[], object], steps: int) -> str:
    return profile_calls(call, steps).describe()


def _profile_operators(call: Callable[[], object], steps: int) -> str:
    activities, own_time = [ProfilerActivity.CPU], "self_cpu_time_total"
    if dist.get_backend() == "nccl":
        activities, own_time = [*activities, ProfilerActivity.CUDA], "self_device_time_total"

    def run() -> None:
        for _ in range(steps):
            call()

    with torch_profile(activities=activities) as recorded:
        own, others = cpu_seconds(run)
    heading = (
        f"totals over {steps} steps: {own:.3f} s CPU in this thread, {others:.3f} s in others "
        "(the backend's)"
    )
    table = recorded.key_averages().table(sort_by=own_time, row_limit=30, max_name_column_width=60)
    return f"{heading}\n{table}"


_PROFILERS: dict[str, Callable[[Callable[[], object], int], str]] = {
    "python": _profile_python,
    "operators": _profile_operators,
}
