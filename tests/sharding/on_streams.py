"""A sharded training on fake streams: lanes of a GPU, and groups in which all ranks hold alike, as
`bench/virtual_ranks.py` numbers and makes them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.bench.virtual_ranks import Along, Lanes, lanes_in_order, virtual_ranks
from sidestream.bench.virtual_streams import Machine
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.lanes import SerialLane, StreamLane
from sidestream.sharding.runtime import Runtime
from sidestream.sharding.wire import GradientPacker, Gradients
from sidestream.tests.sharding import trainer
from sidestream.tests.sharding.trainer import Job

T = TypeVar("T")
LANES: dict[str, Lanes] = {
    "in order": lanes_in_order,
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
    with (
        virtual_ranks(machine, lanes, sizes) as along,
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
