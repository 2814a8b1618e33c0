"""The host's cost: microseconds of Python for one unit in one step, beside the rivals and the plain
model.

A step is forward, backward, AdamW(foreach=True) and zero_grad of a decoder whose tensors are so
tiny that only overhead shows. One process is rank 0 of many, in torch's "fake" group, whose
collectives copy within the rank, some of them once for every rank; those copies are left out here,
since with 1024 ranks they would be most of every candidate's time. One thread computes.

All cases live in one process and take turns (A B C C B A ...); one visit is an untimed step and a
timed one. Many short visits beat few long ones: a shared machine's clock drifts within seconds, and
a pair must fall into one state of it. CPU time counts, of all threads, since a stranger on the
machine adds to the wall clock alone. Automatic garbage collection stays on, because a candidate's
garbage is part of its cost; what lives after the warm-up is frozen, so that nobody pays for walking
the objects of the others.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .collective_stand_ins import ALL_GATHERS, EXCHANGES, ended_work, fake_group, stand_in_for
from .models import build_batch, host_cost_config
from .profiling import Profile, profile_calls
from .rivals import Setup, Trainer, build_trainer
from .timing import (
    Estimate,
    alternating_order,
    estimate_median,
    frozen_heap,
    pair_differences,
    pair_ratios,
)
from .trainer_names import FSDP2, PLAIN

WARM_UP_STEPS = 4


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One candidate with `units` blocks, as one of `world` ranks (0: plain, which has none)."""

    units: int
    world: int
    candidate: str

    def of(self, candidate: str) -> "Case":
        """The case of another candidate to compare with."""
        return Case(self.units, 0 if candidate == PLAIN else self.world, candidate)


@dataclass(frozen=True, slots=True)
class Samples:
    """One value a visit: microseconds a unit and step."""

    cpu_us: list[float]
    wall_us: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one case's samples say, all but `wall_us` in CPU time.

    ratio_to_fsdp2: paired, same units and world. added_share: what it adds over the plain model, by
    what FSDP2 adds. None where the other was not measured.
    """

    cpu_us: Estimate
    wall_us: Estimate
    ratio_to_fsdp2: Estimate | None
    added_share: Estimate | None


def cases_of(
    candidates: Sequence[str], units: Sequence[int], worlds: Sequence[int]
) -> tuple[Case, ...]:
    """Every candidate at every size and world; the plain model once a size."""
    return tuple(
        sorted({Case(u, w, "").of(name) for u in units for w in worlds for name in candidates})
    )


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
    done = ended_work()
    try:
        with (
            fake_group(world),
            stand_in_for((*ALL_GATHERS, *EXCHANGES), lambda *_arguments: done),
        ):
            yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def measure(
    cases: Sequence[Case], visits: int, progress: Callable[[Case], None]
) -> dict[Case, Samples]:
    """Build all cases, warm them up, and let them take turns; must run inside `fake_ranks` of at
    least the largest world. `progress` is told each case that was visited.
    """
    meshes = {case.world: _mesh(case.world) for case in cases if case.world}
    runs = {case: _warm_step(case, meshes) for case in cases}
    samples = {case: Samples([], []) for case in cases}
    with frozen_heap():
        for case in alternating_order(cases, visits):
            run = runs[case]
            run()
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            run()
            wall, cpu = time.perf_counter() - wall_start, time.process_time() - cpu_start
            samples[case].wall_us.append(wall * 1e6 / case.units)
            samples[case].cpu_us.append(cpu * 1e6 / case.units)
            progress(case)
    return samples


def _mesh(world: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(world)), mesh_dim_names=("dp",))


def _warm_step(case: Case, meshes: Mapping[int, DeviceMesh]) -> Callable[[], object]:
    config = host_cost_config(case.units)
    batch = build_batch(config, seed=1)
    mesh = meshes.get(case.world)
    trainer = build_trainer(case.candidate, config, Setup(foreach=True, mesh=mesh))
    _leave_out_all_reduce(trainer)
    for _ in range(WARM_UP_STEPS):
        trainer.step(*batch)
    return lambda: trainer.step(*batch)


def _leave_out_all_reduce(trainer: Trainer) -> None:
    """DDP asks an all-reduce for its tensors, which the fake group's does not have."""
    if isinstance(trainer.module, DistributedDataParallel):
        trainer.module.register_comm_hook(None, _reduced)


# DDP reads these annotations, so they must not be postponed; and it names the arguments.
def _reduced(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def summarise(samples: Mapping[Case, Samples]) -> dict[Case, Summary]:
    """One summary a case."""
    return {case: _summarise(case, samples) for case in samples}


def _summarise(case: Case, samples: Mapping[Case, Samples]) -> Summary:
    own = samples[case]
    plain, fsdp2 = samples.get(case.of(PLAIN)), samples.get(case.of(FSDP2))
    ratio = share = None
    if fsdp2 is not None and case.world:
        ratio = estimate_median(pair_ratios(own.cpu_us, fsdp2.cpu_us))
        if plain is not None:
            added = [pair_differences(each.cpu_us, plain.cpu_us) for each in (own, fsdp2)]
            share = estimate_median(pair_ratios(*added))
    return Summary(
        cpu_us=estimate_median(own.cpu_us),
        wall_us=estimate_median(own.wall_us),
        ratio_to_fsdp2=ratio,
        added_share=share,
    )


def growth(samples: Mapping[Case, Samples], small: Case, large: Case) -> Estimate:
    """A unit's cost in `large` by that in `small`, paired."""
    return estimate_median(pair_ratios(samples[large].cpu_us, samples[small].cpu_us))


def profile(case: Case, steps: int) -> Profile:
    """Profile one case's steps, per unit and step; must run inside `fake_ranks`."""
    run = _warm_step(case, {case.world: _mesh(case.world)} if case.world else {})
    with frozen_heap():
        return profile_calls(run, steps, units=case.units)
