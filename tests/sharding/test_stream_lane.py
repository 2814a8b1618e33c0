"""Training over CUDA streams, on fake ones: every conflict is ordered, and no wait can be left out.

stream     0          1             2              3              4
carries    compute    all-gathers   all-to-alls    gather lane    reduce lane
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sidestream as ss
from sidestream.buffers import BufferPool
from sidestream.sharding import build, collectives
from sidestream.sharding.collectives import Collectives
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.grad_packing import GradientPacker, Gradients
from sidestream.sharding.lanes import Lane, SerialLane, StreamLane
from sidestream.sharding.runtime import Runtime
from sidestream.tests.sharding import trainer
from sidestream.tests.sharding.axes import one_axis
from sidestream.tests.sharding.fake_streams import Late, LoopbackGroup, Machine, Stream
from sidestream.tests.sharding.race_detector import Racing
from sidestream.tests.sharding.trainer import Job

JOBS = {
    "zero3": Job(zero=3),
    "zero2": Job(zero=2),
    "zero1": Job(zero=1, accumulate=2),
    "zero0": Job(zero=0, clip=0.1),
    "zero3, fine units, prefetch 2": Job(zero=3, units="fine", options={"prefetch": 2}),
    "zero3, no_sync, clip": Job(zero=3, accumulate=2, clip=0.1),
    "zero3, bf16": Job(zero=3, policy={"param_dtype": torch.bfloat16}),
    "zero2, bf16 gradients": Job(zero=2, accumulate=2, policy={"main_grads_dtype": torch.bfloat16}),
}
LATE_JOBS = ["zero3", "zero2", "zero0", "zero3, no_sync, clip"]
WORLDS = {"world 1": 1, "world 2": 2}
SIDES = {"side streams first": True, "side streams last": False}


@dataclass(frozen=True)
class Wait:
    """One wait of `StreamLane` or of the operations inside: `stream`'s `method` makes or ends it.

    `side_first`: in which order its lack gives other numbers.
    """

    stream: int
    method: str
    zero: int
    side_first: bool = False


WAITS = {
    "gather lane for compute, zero3": Wait(3, "wait_stream", 3, side_first=True),
    "gather lane for compute, zero2": Wait(3, "wait_stream", 2, side_first=True),
    "gather lane for its all-gather": Wait(1, "record_event", 3),
    "compute for gather lane, zero3": Wait(3, "record_event", 3),
    "compute for gather lane, zero2": Wait(3, "record_event", 2),
    "reduce lane for compute": Wait(4, "wait_stream", 3, side_first=True),
    "reduce lane for its all-to-all": Wait(2, "record_event", 2),
    "compute for reduce lane, zero3": Wait(4, "record_event", 3),
    "compute for reduce lane, zero0": Wait(4, "record_event", 0),
}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
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
    machine: Machine, make_lane: Callable[[torch.device], Lane], world_size: int, holds: bool
) -> Iterator[None]:
    """Models made inside have lanes of `make_lane` and groups in which all ranks are alike."""
    gather: Any
    reduce: Any
    gather, reduce = (LoopbackGroup(machine, world_size) for _ in range(2))
    along = (gather, reduce) if world_size > 1 else ()
    groups = one_axis(0, world_size, torch.device("cpu"), *along)

    def do_nothing(*_: object) -> None:
        """No mock: it would keep the tensors that it was called with."""

    entry = sys.modules[ss.fully_shard.__module__]
    with (
        machine.installed(),
        mock.patch.object(entry, "data_parallel_groups", lambda *_, **__: groups),
        mock.patch.object(build, "make_lane", lambda device, _overlap: make_lane(device)),
        mock.patch.object(collectives, "start_all_gather", LoopbackGroup.all_gather),
        mock.patch.multiple(Collectives, broadcast=do_nothing, all_reduce=do_nothing),
        mock.patch.multiple(dist, get_backend=lambda _: "nccl", get_rank=lambda _: 0),
        mock.patch.object(trainer, "make_optimizer", make_optimizer),
        hold_until_advance(machine) if holds else contextlib.nullcontext(),
    ):
        yield


def run(
    machine: Machine,
    job: Job,
    make_lane: Callable[[torch.device], Lane] = StreamLane,
    *,
    world_size: int = 2,
    without: Wait | None = None,
    holds: bool = True,
) -> list[Tensor]:
    """Two steps of `job` on `machine`; returns this rank's main parameters, unit by unit."""
    with sharding(machine, make_lane, world_size, holds):
        model, optimizer = trainer.build(job)
        if without is not None:
            setattr(machine.streams[without.stream], without.method, lambda *_: {})
        with machine:
            for step in range(2):
                with torch.no_grad():
                    model(trainer.batch(step, rank=0, world_size=2))
                trainer.run_step(model, optimizer, job, step, 0, 2)
                if job.clip is not None:
                    ss.clip_grad_norm_(model, job.clip)
                optimizer.step()
                optimizer.zero_grad()
        machine.synchronize()
        return [unit.main.detach().clone() for unit in runtime_of(model).units]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    assert all(tensor.isfinite().all() for tensor in first)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("world_size", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_conflict_is_ordered(job: Job, world_size: int) -> None:
    machine = Racing()
    run(machine, job, world_size=world_size)
    assert set(machine.hazards) == set()


@pytest.mark.parametrize("side_first", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("job", [JOBS[name] for name in LATE_JOBS], ids=LATE_JOBS)
def test_bits_do_not_depend_on_when_streams_run(job: Job, side_first: bool) -> None:
    expected = run(Machine(), job, lambda _: SerialLane())
    assert same(expected, run(Late(side_first=side_first), job))


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_no_wait_can_be_left_out(wait: Wait) -> None:
    job = Job(zero=wait.zero)
    machine = Racing()
    run(machine, job, without=wait)
    assert machine.hazards
    expected = run(Machine(), job, lambda _: SerialLane())
    assert not same(expected, run(Late(side_first=wait.side_first), job, without=wait))


def test_gradients_must_be_held_until_the_pack_has_ended() -> None:
    machine = Racing()
    run(machine, Job(zero=2), holds=False)
    assert machine.hazards
    assert all(
        "on stream 0 reuses memory of a read by" in hazard and "on stream 4" in hazard
        for hazard in machine.hazards
    )


def allocating_on(stream: Stream, machine: Machine) -> Any:
    """A pool whose memory belongs to `stream`, whichever is current."""

    def on_stream(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with machine.on(stream):
                return method(*arguments)

        return call

    methods = {"grow": on_stream(BufferPool.grow), "lease": on_stream(BufferPool.lease)}
    return mock.patch.multiple(BufferPool, **methods)


def abandon(zero: int, *, on_compute_stream: bool = False) -> list[str]:
    """Fail in the middle of a backward, drop the model, compute on; which writes come too late."""
    machine = Racing()
    pool = (
        allocating_on(machine.streams[0], machine)
        if on_compute_stream
        else contextlib.nullcontext()
    )

    def fail(*_: object) -> None:
        raise ArithmeticError

    with sharding(machine, StreamLane, 2, holds=True), pool, machine:
        with contextlib.suppress(ArithmeticError):
            model, _ = trainer.build(Job(zero=zero))
            model.get_submodule("blocks.0").register_full_backward_pre_hook(fail)
            trainer.loss_of(model, trainer.batch(0, rank=0, world_size=2)).backward()
        del model, _
        gc.collect()
        torch.arange(8).mul(2)
    return [hazard for hazard in machine.hazards if "reuses memory of a write" in hazard]


def test_what_lanes_write_when_a_model_is_dropped_is_their_own_memory() -> None:
    assert abandon(3) == []
    assert abandon(3, on_compute_stream=True)


def step_after_failed_forward() -> list[str]:
    """Step the optimizer while gathers of a forward that failed are still under way."""
    machine, job = Racing(), Job(zero=2)

    def fail(*_: object) -> None:
        raise ArithmeticError

    with sharding(machine, StreamLane, 2, holds=True), machine:
        model, optimizer = trainer.build(job)
        trainer.run_step(model, optimizer, job, 0, 0, 2)
        optimizer.step()
        model.get_submodule("blocks.0").register_forward_pre_hook(fail)
        with contextlib.suppress(ArithmeticError):
            model(trainer.batch(1, rank=0, world_size=2))
        optimizer.step()
    return machine.hazards


def test_the_optimizer_waits_for_gathers_under_way() -> None:
    assert step_after_failed_forward() == []
    with mock.patch.object(Runtime, "before_optimizer_step", lambda _: None):
        assert step_after_failed_forward()


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_new_memory_may_be_filled_at_once(job: Job) -> None:
    machine = Racing(fills=True)
    run(machine, job)
    assert set(machine.hazards) == set()
