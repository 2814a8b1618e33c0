"""Steps of sharded models as CUDA graphs, on machines with fake streams: recorded, replayed, refused."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.bench.virtual_streams import Machine
from sidestream.sharding.capture import StepRecorder
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.sharding import on_streams, trainer
from sidestream.tests.sharding.fake_graphs import Recording
from sidestream.tests.sharding.trainer import Job
from sidestream.training.graphs import FullStepGraph, full_step_graph

STEPS = 4
MICROBATCHES = 2
Step = Callable[[list[Tensor]], Tensor]


def step_of(model: nn.Module) -> Step:
    def step(batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for place, tokens in enumerate(batches):
            last = place + 1 == len(batches)
            loss = trainer.loss_of(model, tokens) / len(batches)
            with contextlib.nullcontext() if last else ss.no_sync(model):
                loss.backward()
            total += loss.detach()
        return total

    return step


@contextlib.contextmanager
def recording(machine: Recording) -> Iterator[None]:
    """Steps on a CPU are recorded as on a GPU."""
    with (
        mock.patch.object(full_step_graph, "can_capture", lambda _: True),
        mock.patch.object(StepRecorder, "least", lambda _, value: value),
    ):
        yield


def batches_of(step: int, count: int = MICROBATCHES) -> list[Tensor]:
    return [trainer.batch(step, place, count, 0, 2) for place in range(count)]


def train(
    machine: Machine,
    job: Job,
    *,
    lanes: str = "in order",
    wrap: Callable[[Step, nn.Module], Step] = lambda step, _: step,
    counts: tuple[int, ...] = (MICROBATCHES,) * STEPS,
    sizes: tuple[int, ...] = (2,),
) -> tuple[list[Tensor], list[float]]:
    """The main parameters after a step for each of `counts` of microbatches, and the losses."""
    losses = []
    with on_streams.sharding(machine, on_streams.LANES[lanes], sizes):
        model, optimizer = trainer.build(job)
        step = wrap(step_of(model), model)
        with machine:
            for number, count in enumerate(counts):
                losses.append(step(batches_of(number, count)).clone())
                if number % 3 == 1:
                    with torch.no_grad():  # takes and frees memory of its own
                        model(trainer.batch(number, rank=0, world_size=2))
                optimizer.step()
                optimizer.zero_grad()
        machine.synchronize()
        mains = on_streams.mains_of(runtime_of(model))
        del model, optimizer, step
    return mains, [loss.item() for loss in losses]


def assert_same(found: Any, expected: Any) -> None:
    assert found[1] == expected[1]
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one, other)


CASES: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    "zero0": ({"zero": 0}, "in order", (2,)),
    "zero1": ({"zero": 1}, "in order", (2,)),
    "zero2, bf16 gradients": (
        {"zero": 2, "policy": {"main_grads_dtype": torch.bfloat16}},
        "pipelined",
        (2,),
    ),
    "zero3": ({"zero": 3}, "in order", (2,)),
    "zero3, mxfp8": ({"zero": 3, "policy": {"grad_wire": "mxfp8"}}, "pipelined", (2,)),
}


@pytest.mark.parametrize(("job", "lanes", "sizes"), CASES.values(), ids=CASES)
def test_replays_have_the_bits_of_steps(
    job: dict[str, Any], lanes: str, sizes: tuple[int, ...]
) -> None:
    expected = train(Machine(), Job(**job), lanes=lanes, sizes=sizes)
    machine = Recording()
    with recording(machine):
        found = train(
            machine,
            Job(**job),
            lanes=lanes,
            sizes=sizes,
            wrap=lambda step, model: FullStepGraph(step, [model], warmup_steps=1),
        )
    assert_same(found, expected)
    assert [graph.num_replays for graph in machine.graphs] == [STEPS - 1]
