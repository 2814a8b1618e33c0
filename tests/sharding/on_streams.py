"""A sharded training on fake streams: lanes of a GPU, and groups in which all ranks hold alike.

stream     0          1              2
carries    compute    gather lane    reduce lane, or its even works (pipelined: the odd ones on 3)
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding import build, runtime
from sidestream.sharding.collectives import Collectives
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.lanes import Lane, SerialLane, StreamLane
from sidestream.sharding.process_groups import Axis, DataParallelGroups
from sidestream.sharding.runtime import Runtime
from sidestream.sharding.wire import GradientPacker, Gradients
from sidestream.tests.sharding import trainer
from sidestream.tests.sharding.axes import groups_over
from sidestream.tests.sharding.fake_streams import LoopbackGroup, Machine
from sidestream.tests.sharding.trainer import Job

T = TypeVar("T")
Along = list[tuple[LoopbackGroup, ...]]
# That of gathers and that of reductions.
Lanes = Callable[[torch.device], tuple[Lane, Lane]]
LANES: dict[str, Lanes] = {
    "in order": lambda device: (StreamLane(device), StreamLane(device)),
    "pipelined": lambda device: (StreamLane(device), StreamLane(device, pipelined=True)),
}
SERIAL: Lanes = lambda _: (SerialLane(), SerialLane())  # noqa: E731


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Never asks for a value, so that a step's end is still enqueued when the next one begins."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)


def hold_until_advance(machine: Machine) -> Any:
    """Gradients that only the compute stream lets go of, as on a GPU, and not the pack itself."""
    take = GradientPacker.take

    class Held(list[Tensor | None]):
        def clear(self) -> None:
            if machine.current is machine.streams[0]:
                super().clear()

    def held(*arguments: Any) -> Gradients:
        grads = take(*arguments)
        grads.tensors = Held(grads.tensors)
        return grads

    return mock.patch.object(GradientPacker, "take", held)


@contextlib.contextmanager
def _making(lanes: Lanes) -> Iterator[None]:
    made = iter(lanes(torch.device("cpu")))
    with mock.patch.object(build, "make_lane", lambda *_: next(made)):
        yield


def _groups(machine: Machine, sizes: Sequence[int]) -> tuple[DataParallelGroups, Along]:
    along = [tuple(LoopbackGroup(machine, size) for _ in range(2)) for size in sizes]
    # As everywhere, an axis of one rank has no communicators.
    axes = tuple(
        Axis(f"axis {place}", range(size), 0, *(pair if size > 1 else (None, None)))  # type: ignore[arg-type]
        for place, (size, pair) in enumerate(zip(sizes, along, strict=True))
    )
    group = LoopbackGroup(machine, math.prod(sizes))
    return groups_over(axes, group, torch.device("cpu")), along


@contextlib.contextmanager
def sharding(
    machine: Machine,
    lanes: Lanes,
    sizes: Sequence[int] = (2,),
    *,
    holds: bool = True,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> Iterator[Along]:
    """A model made inside has `lanes`, and axes of `sizes` along which all ranks are alike; their
    groups for gathers and for reductions come back.

    `holds`: whether gradients live until their event has advanced. Delete the model inside.
    """
    groups, along = _groups(machine, sizes)

    def do_nothing(*_: object) -> None:
        """No mock: it would keep the tensors that it was called with."""

    entry = sys.modules[ss.fully_shard.__module__]
    with (
        machine.installed(),
        _making(lanes),
        mock.patch.multiple(
            entry, data_parallel_groups=lambda *_, **__: groups, require_mesh=lambda *_: None
        ),
        mock.patch.object(runtime, "make_watch", lambda *_, **__: None),
        mock.patch.multiple(Collectives, broadcast=do_nothing, all_reduce=do_nothing),
        mock.patch.multiple(dist, get_backend=lambda _: "nccl", get_rank=lambda _: 0),
        mock.patch.object(trainer, "make_optimizer", optimizer),
        hold_until_advance(machine) if holds else contextlib.nullcontext(),
    ):
        yield along


def mains_of(runtime: Runtime) -> list[Tensor]:
    """This rank's main parameters, unit by unit."""
    return [unit.main.detach().clone() for unit in runtime.units]


def run(
    machine: Machine,
    job: Job,
    lanes: Lanes = LANES["in order"],
    *,
    sizes: Sequence[int] = (2,),
    holds: bool = True,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    prepare: Callable[[Runtime], object] = lambda _: None,
    find: Callable[[Runtime], T] = mains_of,  # type: ignore[assignment]
) -> T:
    """What `find` finds after two steps of `job` on `machine`, with an evaluation before each.

    `prepare` is called before the first step.
    """
    with sharding(machine, lanes, sizes, holds=holds, optimizer=optimizer):
        model, stepper = trainer.build(job)
        prepare(runtime_of(model))
        with machine:
            for step in range(2):
                with torch.no_grad():
                    model(trainer.batch(step, rank=0, world_size=2))
                trainer.run_step(model, stepper, job, step, 0, 2)
                if job.clip is not None:
                    ss.clip_grad_norm_(model, job.clip)
                stepper.step()
                stepper.zero_grad()
        machine.synchronize()
        found = find(runtime_of(model))
        del model, stepper  # while there are streams
        return found
