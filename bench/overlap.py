"""Recording one step with its communication: torch's profiler around a few steps of a trainer,
on gloo ranks of this machine, on all its GPUs, or on one GPU with stand-ins for the collectives.

On one GPU nothing has to be sent, so there the process is rank 0 of `STAND_IN_WORLD` ranks of
torch's "fake" group, and every collective keeps its stream busy as long as its bytes would take at
`STAND_IN_GB_PER_S`; results are meaningless, times are not.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from .collective_stand_ins import ALL_GATHERS, EXCHANGES, ended_work, fake_group, stand_in_for
from .models import build_batch
from .ranks import run_ranks
from .rivals import build_trainer
from .step_worker import Task
from .timeline import STAND_IN_RANGE, STEP_RANGE, WAIT_RANGE

WARM_UP_STEPS = 4
STAND_IN_WORLD = 8
STAND_IN_GB_PER_S = 50.0  # one 400 Gbit/s link


@dataclass(frozen=True, kw_only=True)
class OverlapCase:
    """One trainer to record. `world`: its ranks; 0 is one GPU with stand-ins."""

    name: str
    task: Task
    steps: int
    world: int


def record(case: OverlapCase) -> list[dict[str, Any]]:
    """The events of rank 0's Chrome trace of `case.steps` steps."""
    if case.world:
        return run_ranks(_record_on_rank, case.world, case, device_type=case.task.device_type)[0]
    with (
        fake_group(STAND_IN_WORLD),
        stand_in_for(ALL_GATHERS, _spin("gather")),
        stand_in_for(EXCHANGES, _spin("exchange")),
    ):
        return _record(case)


def _record_on_rank(rank: int, case: OverlapCase) -> list[dict[str, Any]]:
    events = _record(case)
    return events if rank == 0 else []


def _record(case: OverlapCase) -> list[dict[str, Any]]:
    setup = case.task.setup()
    trainer = build_trainer(case.name, case.task.config, setup)
    device = setup.device
    batch = [part.to(device) for part in build_batch(case.task.config, seed=dist.get_rank())]
    for _ in range(WARM_UP_STEPS):
        trainer.step(*batch)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=activities) as recorded, _named_waits():
        for _ in range(case.steps):
            with record_function(STEP_RANGE):
                trainer.step(*batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


@contextmanager
def _named_waits() -> Iterator[None]:
    """Every wait of the host for a collective becomes a range, whoever waits."""

    def wait(work: dist.Work, *arguments: Any) -> Any:
        with record_function(WAIT_RANGE):
            return original(work, *arguments)

    original = dist.Work.wait
    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]


def _spin(lane: str) -> Callable[..., dist.Work]:
    """A collective that keeps the current stream busy for the time that its bytes would take."""
    cycles_per_byte = _cycles_per_second() / (STAND_IN_GB_PER_S * 1e9)
    done = ended_work()

    def spin(
        _group: dist.ProcessGroup, output: Tensor, source: Tensor, *_arguments: Any
    ) -> dist.Work:
        # A gather's output is all ranks' parts, a reduce-scatter's input.
        num_bytes = max(output.nbytes, source.nbytes)
        with record_function(f"{STAND_IN_RANGE}{lane}"):
            torch.cuda._sleep(int(num_bytes * cycles_per_byte))
        return done

    return spin


def _cycles_per_second() -> float:
    cycles = 10_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)
