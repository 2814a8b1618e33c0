"""Steps of sharded models as CUDA graphs on fake streams: recorded, replayed, refused."""

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.bench.virtual_streams import Machine
from sidestream.sharding import capture
from sidestream.sharding.capture import StepRecorder
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.lanes import StreamLane, recorded
from sidestream.tests.sharding import on_streams, trainer
from sidestream.tests.sharding.fake_graphs import CaptureRefused, Recording
from sidestream.tests.sharding.trainer import Job
from sidestream.training.graphs import CaptureError, FullStepGraph, full_step_graph

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
) -> tuple[list[Tensor], list[float]]:
    """The main parameters after a step for each of `counts` of microbatches, and the losses."""
    with on_streams.sharding(machine, on_streams.LANES[lanes]):
        try:
            return _train(machine, job, wrap, counts)
        except CaptureError as error:
            told = str(error)
        gc.collect()  # the model, which needs the streams and which the error's frames have held
    raise CaptureError(told)


def _train(
    machine: Machine, job: Job, wrap: Callable[[Step, nn.Module], Step], counts: tuple[int, ...]
) -> tuple[list[Tensor], list[float]]:
    model, optimizer = trainer.build(job)
    step, losses = wrap(step_of(model), model), []
    with machine:
        for number, count in enumerate(counts):
            losses.append(step(batches_of(number, count)).clone())
            if number % 2 == 0:
                with torch.no_grad():  # takes and frees memory of its own
                    model(trainer.batch(number, rank=0, world_size=2))
            optimizer.step()
            optimizer.zero_grad()
    machine.synchronize()
    runtime = runtime_of(model)
    if isinstance(machine, Recording):  # whoever looks asks no event of a recording
        assert not any(lane.log.in_flight() for lane in runtime.lanes)
    return on_streams.mains_of(runtime), [loss.item() for loss in losses]


def assert_same(found: Any, expected: Any) -> None:
    assert found[1] == expected[1]
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one, other)


def graphed(
    machine: Recording,
    job: Job,
    *,
    counts: tuple[int, ...] = (MICROBATCHES,) * STEPS,
    **options: Any,
) -> tuple[list[Tensor], list[float]]:
    """As `train`, by a `FullStepGraph` with `options`."""
    lanes = options.pop("lanes", "in order")
    change = options.pop("change", lambda step, _: step)

    def wrap(step: Step, model: nn.Module) -> Step:
        return FullStepGraph(change(step, model), [model], **{"warmup_steps": 1, **options})

    with recording(machine):
        return train(machine, job, lanes=lanes, wrap=wrap, counts=counts)


CASES: dict[str, tuple[Job, str]] = {
    "zero0": (Job(zero=0), "in order"),
    "zero1": (Job(zero=1), "in order"),
    "zero2, bf16 gradients": (
        Job(zero=2, policy={"main_grads_dtype": torch.bfloat16}),
        "pipelined",
    ),
    "zero3": (Job(zero=3, units="fine"), "pipelined"),
    "zero3, mxfp8": (
        Job(zero=3, units="whole", policy={"grad_wire": "mxfp8", "param_wire": "mxfp8"}),
        "in order",
    ),
}
QUICK = ("zero0", "zero3, mxfp8")


@pytest.mark.parametrize(
    ("job", "lanes"),
    [
        pytest.param(*case, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_replays_have_the_bits_of_steps(job: Job, lanes: str) -> None:
    machine = Recording()
    found = graphed(machine, job, lanes=lanes)
    assert_same(found, train(Machine(), job, lanes=lanes))
    assert [graph.num_replays for graph in machine.graphs] == [STEPS - 1]


@pytest.mark.slow
def test_every_number_of_microbatches_has_a_graph_and_the_oldest_goes() -> None:
    job, counts = Job(zero=3, units="whole"), (1, 1, 2, 2, 1, 2, 3, 3, 1, 1)
    machine = Recording()
    found = graphed(machine, job, counts=counts, max_graphs=2)
    assert_same(found, train(Machine(), job, counts=counts))
    # Of 1, 2, 3 and again 1 microbatches: each new one displaces the least recently used.
    assert [graph.num_replays for graph in machine.graphs] == [2, 2, 1, 1]
    assert [bool(graph.operations) for graph in machine.graphs] == [False, False, True, True]


def asks(place: str) -> Callable[[Step, nn.Module], Step]:
    """A change of a step that has the host wait for a value at `place`."""

    def change(step: Step, model: nn.Module) -> Step:
        def wait(*_: object) -> None:
            torch.ones(()).item()

        if place == "forward":
            model.blocks[1].register_forward_pre_hook(wait)  # type: ignore[index, operator]
        elif place == "backward":
            model.blocks[1].mlp.register_full_backward_hook(wait)  # type: ignore[index, union-attr]

        def asking(batches: list[Tensor]) -> Tensor:
            loss = step(batches)
            if place == "end":
                wait()
            return loss

        return asking

    return change


# torch tells of our hook, which wants to free memory on a stream that is not a part of anything.
@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call")
@pytest.mark.parametrize(
    "place",
    [
        pytest.param("forward", marks=pytest.mark.slow),
        "backward",
        pytest.param("end", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_waits_goes_on_without_a_graph(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(zero=3)
    machine = Recording()
    found = graphed(machine, job, change=asks(place), on_failure="eager")
    assert_same(found, train(Machine(), job, wrap=asks(place)))
    assert [graph.num_replays for graph in machine.graphs] == [0]
    told = [record.message for record in caplog.records if "without a graph" in record.message]
    assert len(told) == 1
    assert "makes the host wait" in told[0]


def leaves(what: str) -> Callable[[Step, nn.Module], Step]:
    """A step that leaves behind what a replay could not."""

    def change(step: Step, model: nn.Module) -> Step:
        def left(batches: list[Tensor]) -> Tensor:
            if what == "sums":
                with ss.no_sync(model):
                    return step(batches)
            loss = step(batches) if what == "changes" else trainer.loss_of(model, batches[0])
            if what == "changes":
                runtime_of(model).units[0].main.mul_(0.5)
            return loss

        return left

    return change


def evaluation_of(model: nn.Module) -> Callable[[Tensor], dict[str, Any]]:
    return lambda tokens: {"loss": trainer.loss_of(model, tokens), "step": 3}


def test_frozen_parameters_are_noticed_and_another_graph_may_follow() -> None:
    machine = Recording()
    with recording(machine), on_streams.sharding(machine, on_streams.LANES["in order"]):
        model, optimizer = trainer.build(Job(zero=2, units="whole"))
        gradients = [unit.gradients for unit in runtime_of(model).units]
        step = FullStepGraph(step_of(model), [model], warmup_steps=1)
        with machine:
            for number in range(3):
                step(batches_of(number, 1))
                optimizer.zero_grad()
            assert [one.graphs for one in gradients] == [1]
            for param in model.parameters():
                param.requires_grad_(False)
            with pytest.raises(RuntimeError, match="got some frozen or unfrozen since; call reset"):
                step(batches_of(3, 1))
            step.reset()
            assert step.num_graphs == 0 and [one.graphs for one in gradients] == [0]
            with torch.no_grad():
                step = FullStepGraph(
                    evaluation_of(model), [model], warmup_steps=1, clone_outputs=False
                )
                found = [step(trainer.batch(n, rank=0, world_size=2)) for n in range(3)]
                expected = trainer.loss_of(model, trainer.batch(2, rank=0, world_size=2))
        assert torch.equal(found[2]["loss"], expected) and found[2]["step"] == 3
        assert found[1]["loss"] is found[2]["loss"]
        assert [graph.num_replays for graph in machine.graphs] == [2, 2]
        del model, optimizer, step, gradients
        gc.collect()


def test_pools_of_memory_are_left_where_torch_takes_them_no_more() -> None:
    machine = Recording()
    with recording(machine), machine.installed(), machine:
        model = nn.Linear(2, 1)

        def step(rows: Tensor, fails: bool = False) -> Tensor:
            loss = model(rows).sum()
            loss.backward()
            if fails:
                loss.item()
            return loss

        graphed = FullStepGraph(step, [model], warmup_steps=1, max_graphs=1)

        def two_steps(rows: int, **options: bool) -> None:
            for _ in range(2):
                model.zero_grad()
                found = graphed(torch.ones(rows, 2), **options)
            torch.testing.assert_close(found, model(torch.ones(rows, 2)).sum().detach())

        two_steps(1)
        two_steps(2)  # the other one goes
        graphed.reset()
        two_steps(2)
        with pytest.raises(CaptureError, match="makes the host wait"):
            two_steps(3, fails=True)
        two_steps(1)
        assert [graph.num_replays for graph in machine.graphs] == [1, 1, 1, 0, 1]


def test_steps_that_never_come_back_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Recording()
    with recording(machine), machine.installed(), machine:
        graphed = FullStepGraph(lambda number: number, [], max_graphs=1)
        for number in range(40):
            assert graphed(number) == number
    assert [record.message.partition(":")[0] for record in caplog.records] == ["FullStepGraph"]
    assert "16 kinds of steps went before they came often enough" in caplog.text


LEFT = {
    "sums": "got some of unit '.*' that were only accumulated under no_sync",
    "changes": "those of unit '.*' were changed in it; call optimizer.step",
    "forward": "got a forward that waits for one; run it under torch.no_grad",
}


def test_what_a_replay_could_not_leave_behind_is_refused() -> None:
    machine, told = Recording(), {}
    with recording(machine), on_streams.sharding(machine, on_streams.LANES["in order"]):
        model, optimizer = trainer.build(Job(zero=3, units="whole"))
        with machine:
            for what in LEFT:
                step = FullStepGraph(leaves(what)(step_of(model), model), [model], warmup_steps=1)
                step(batches_of(0, 1))
                optimizer.zero_grad()
                try:
                    step(batches_of(1, 1))
                except CaptureError as error:
                    told[what] = str(error)
                # The model is as before, and gradients that nobody has cleared are told of.
                step_of(model)(batches_of(2, 1))
                with pytest.raises(RuntimeError, match="expected cleared gradients before a step"):
                    step(batches_of(1, 1))
                optimizer.zero_grad()
        del model, optimizer, step
        gc.collect()
    for what, message in LEFT.items():
        assert re.search(message, told[what]), told[what]


@contextlib.contextmanager
def unforked(lanes: Any, device: torch.device) -> Iterator[None]:
    current = torch.cuda.current_stream(device)
    yield
    for lane in lanes:
        for stream in lane.streams:
            current.wait_stream(stream)


@contextlib.contextmanager
def unjoined(lanes: Any, device: torch.device) -> Iterator[None]:
    for lane in lanes:
        for stream in lane.streams:
            stream.wait_stream(torch.cuda.current_stream(device))
    yield


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_lane_that_does_not_come_back_is_found(zero: int) -> None:
    job = Job(zero=zero, units="whole")
    with (
        mock.patch.object(capture, "recorded", unjoined),
        pytest.raises(CaptureError, match="unjoined work: streams"),
    ):
        graphed(Recording(), job)


BLOCKS = {
    "whole": (recorded, None),
    "no stream joins": (unjoined, "unjoined work: streams"),
    "no stream forks": (unforked, "isolation: a recorded stream waits"),
}


@pytest.mark.parametrize(("block", "message"), BLOCKS.values(), ids=BLOCKS)
def test_lanes_with_nothing_to_do_are_a_part_of_the_graph_too(block: Any, message: str) -> None:
    machine = Recording()
    with machine.installed():
        graph, device = machine.new_graph(), torch.device("cpu")
        lanes = [StreamLane(device), StreamLane(device, pipelined=True)]
        refused = pytest.raises(CaptureRefused, match=message) if message else None
        with refused or contextlib.nullcontext(), machine.on(machine.new_stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            with block(lanes, device):
                pass
            graph.capture_end()
