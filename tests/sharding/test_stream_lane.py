"""Training over CUDA streams, on fake ones: every conflict is ordered, and no wait can be left out.
`on_streams.py` numbers the streams.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.bench.virtual_streams import Machine, Stream
from sidestream.buffers import BufferPool
from sidestream.sharding.lanes import _StreamEvent, make_lane
from sidestream.sharding.runtime import Runtime
from sidestream.tests.sharding import trainer
from sidestream.tests.sharding.fake_streams import Late
from sidestream.tests.sharding.on_streams import LANES, SERIAL, Lanes, run, sharding
from sidestream.tests.sharding.race_detector import Racing
from sidestream.tests.sharding.trainer import Job

JOBS = {
    "zero3": Job(zero=3),
    "zero2": Job(zero=2),
    "zero1": Job(zero=1, accumulate=2),
    "zero1, odd units": Job(zero=1, accumulate=2, units="fine"),
    "zero0": Job(zero=0, clip=0.1),
    "zero3, fine units, prefetch 2": Job(zero=3, units="fine", options={"prefetch": 2}),
    "zero3, no_sync, clip": Job(zero=3, accumulate=2, clip=0.1),
    "zero3, bf16": Job(zero=3, policy={"param_dtype": torch.bfloat16}),
    "zero2, bf16 gradients": Job(zero=2, accumulate=2, policy={"main_grads_dtype": torch.bfloat16}),
}
LATE_JOBS = ["zero3", "zero2", "zero0", "zero3, no_sync, clip"]
WORLDS: dict[str, tuple[tuple[int, ...], Lanes]] = {
    "world 1": ((1,), LANES["in order"]),
    "world 2": ((2,), LANES["in order"]),
    "world 2, pipelined": ((2,), LANES["pipelined"]),
    "2 nodes of 2": ((2, 2), LANES["in order"]),
}
HSDP: dict[str, Any] = {"dp_outer_dim": "outer"}
ON_TWO_AXES = {
    "HSDP": Job(zero=3, options=HSDP),
    "HSDP, zero2": Job(zero=2, accumulate=2, options=HSDP),
    "HSDP, zero0": Job(zero=0, options=HSDP),
    "HFSDP": Job(zero=3, options={**HSDP, "outer_dp_sharding_strategy": "optim"}),
    "HFSDP, bf16": Job(
        zero=3,
        options={**HSDP, "outer_dp_sharding_strategy": "optim"},
        policy={"param_dtype": torch.bfloat16},
    ),
}
SIDES: dict[str, tuple[bool, Lanes]] = {
    "side streams first": (True, LANES["in order"]),
    "side streams last": (False, LANES["in order"]),
    "side streams last, pipelined": (False, LANES["pipelined"]),
}


@dataclass(frozen=True)
class Wait:
    """One wait of `StreamLane`: `stream`'s `method` makes or ends it.

    `side_first`: in which order its lack gives other numbers.
    """

    stream: int
    method: str
    zero: int
    side_first: bool = False

    def run_without(self, machine: Machine) -> list[Tensor]:
        def leave_out(runtime: Runtime) -> None:
            # In these jobs something is freed before each submit: its owner waits for compute too.
            free_at_once(runtime)
            setattr(machine.streams[self.stream], self.method, lambda *_: {})

        return run(machine, Job(zero=self.zero), prepare=leave_out)


WAITS = {
    "gather lane for compute, zero3": Wait(1, "wait_stream", 3, side_first=True),
    "gather lane for compute, zero2": Wait(1, "wait_stream", 2, side_first=True),
    "compute for gather lane, zero3": Wait(1, "record_event", 3),
    "compute for gather lane, zero2": Wait(1, "record_event", 2),
    "reduce lane for compute": Wait(2, "wait_stream", 3, side_first=True),
    "compute for reduce lane, zero3": Wait(2, "record_event", 3),
    "compute for reduce lane, zero0": Wait(2, "record_event", 0),
}


def free_at_once(runtime: Runtime) -> None:
    """No owner of memory waits for the compute before it is freed."""
    runtime.pool.streams.catch_up = lambda: None  # type: ignore[method-assign]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    assert all(tensor.isfinite().all() for tensor in first)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_ordered(job: Job, sizes: Sequence[int], lanes: Lanes) -> None:
    machine = Racing()
    run(machine, job, lanes, sizes=sizes)
    assert set(machine.hazards) == set()
    assert set(machine.early_frees) == set()


@pytest.mark.parametrize(("sizes", "lanes"), WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_conflict_is_ordered(job: Job, sizes: tuple[int, ...], lanes: Lanes) -> None:
    assert_ordered(job, sizes, lanes)


@pytest.mark.parametrize("lanes", LANES.values(), ids=LANES)
@pytest.mark.parametrize("job", ON_TWO_AXES.values(), ids=ON_TWO_AXES)
def test_every_conflict_on_two_axes_is_ordered(job: Job, lanes: Lanes) -> None:
    assert_ordered(job, (2, 2), lanes)


@pytest.mark.parametrize(("side_first", "lanes"), SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("job", [JOBS[name] for name in LATE_JOBS], ids=LATE_JOBS)
def test_bits_do_not_depend_on_when_streams_run(job: Job, side_first: bool, lanes: Lanes) -> None:
    expected = run(Machine(), job, SERIAL)
    assert same(expected, run(Late(side_first=side_first), job, lanes))


@pytest.mark.parametrize("name", ["HSDP", "HSDP, zero2", "HSDP, zero0", "HFSDP"])
def test_bits_on_two_axes_do_not_depend_on_when_streams_run(name: str) -> None:
    expected = run(Machine(), ON_TWO_AXES[name], SERIAL, sizes=(2, 2))
    assert same(expected, run(Late(side_first=False), ON_TWO_AXES[name], sizes=(2, 2)))


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_no_wait_can_be_left_out(wait: Wait) -> None:
    machine = Racing()
    wait.run_without(machine)
    assert machine.hazards
    expected = run(Machine(), Job(zero=wait.zero), SERIAL)
    assert not same(expected, wait.run_without(Late(side_first=wait.side_first)))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_memory_is_freed_once_its_owner_knows_of_the_compute(zero: int) -> None:
    machine = Racing()
    run(machine, Job(zero=zero), prepare=free_at_once)
    lanes = ("memory of stream 1 is", "memory of stream 2 is")
    assert machine.early_frees
    assert all(found.startswith(lanes) and "on stream 0" in found for found in machine.early_frees)


@pytest.mark.parametrize("zero", [0, 1])
def test_what_a_step_of_our_adamw_casts_is_ordered(zero: int) -> None:
    job = Job(zero=zero, policy={"param_dtype": torch.bfloat16})

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return ss.AdamW(model.parameters(), lr=0.5)

    def leave_out_the_wait_for_compute(runtime: Runtime) -> None:
        free_at_once(runtime)
        machine.streams[1].wait_stream = lambda *_: {}

    machine = Racing()
    run(machine, job, optimizer=adamw)
    assert set(machine.hazards) == set()
    machine = Racing()
    run(machine, job, optimizer=adamw, prepare=leave_out_the_wait_for_compute)
    # At ZeRO-0 nothing is left for the lane to do after a step.
    assert bool(machine.hazards) == (zero > 0)


def test_a_stage_that_frees_waits_for_the_other_stream_of_its_lane() -> None:
    def free_at_once_inside(runtime: Runtime) -> None:
        catch_up = runtime.pool.streams.catch_up
        runtime.pool.streams.catch_up = lambda: catch_up() if machine.current is compute else None  # type: ignore[method-assign]

    machine = Racing()
    compute = machine.current
    run(machine, JOBS["zero1, odd units"], LANES["pipelined"], prepare=free_at_once_inside)
    assert machine.early_frees


def test_gradients_are_freed_once_the_compute_has_waited_for_their_pack() -> None:
    machine = Racing()
    with mock.patch.object(_StreamEvent, "advance", lambda _: None):
        run(machine, Job(zero=2))
    assert machine.hazards
    assert all("on stream 0 reuses memory of a read by" in hazard for hazard in machine.hazards)


def test_one_pair_of_exchange_buffers_is_enough() -> None:
    def peak_and_pair(runtime: Runtime) -> tuple[int, int]:
        largest = max(unit.spec.layout.numel for unit in runtime.units)
        return runtime.pool.peak_bytes, 2 * largest * torch.float32.itemsize

    peak, pair = run(Machine(), JOBS["zero3"], find=peak_and_pair)
    pipelined, _ = run(Machine(), JOBS["zero3"], LANES["pipelined"], find=peak_and_pair)
    assert pipelined - peak == pair > 0


@pytest.mark.parametrize(("overlap", "streams"), [(False, 0), (True, 1), ("pipelined", 2)])
def test_an_option_says_how_many_streams_reduce(overlap: bool | str, streams: int) -> None:
    with Machine().installed():
        assert len(make_lane(torch.device("cuda"), overlap).streams) == streams


def test_collectives_run_in_the_stream_that_starts_them() -> None:
    with sharding(Machine(), LANES["in order"]) as along:
        model, _ = trainer.build(Job(zero=3))
        trainer.loss_of(model, trainer.batch(0)).backward()
        del model, _
    for group in along[0]:
        assert group.options
        assert not any(options.asyncOp for options in group.options)


def test_gradients_must_be_held_until_the_pack_has_ended() -> None:
    machine = Racing()
    run(machine, Job(zero=2), holds=False)
    assert machine.hazards
    assert all(
        "on stream 0 reuses memory of a read by" in hazard and "on stream 2" in hazard
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


def abandon(zero: int, *, on_compute_stream: bool = False, waits: bool = True) -> Racing:
    """Fail in the middle of a backward, drop the model, compute on.

    `waits`: whether the compute stream waits for what the lanes were given.
    """
    machine = Racing()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sharding(machine, LANES["in order"]))
        if on_compute_stream:
            stack.enter_context(allocating_on(machine.streams[0], machine))
        if not waits:
            stack.enter_context(mock.patch.object(_StreamEvent, "abandon", lambda *_: None))
        stack.enter_context(machine)
        _fail_in_backward(zero)
        gc.collect()
        torch.arange(8).mul(2)
    return machine


def _fail_in_backward(zero: int) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError

    model, _ = trainer.build(Job(zero=zero))
    model.get_submodule("blocks.0").register_full_backward_pre_hook(fail)
    with contextlib.suppress(ArithmeticError):
        trainer.loss_of(model, trainer.batch(0, rank=0, world_size=2)).backward()


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_lanes_have_passed_when_the_memory_of_a_dropped_model_goes(zero: int) -> None:
    machine = abandon(zero)
    assert (machine.hazards, set(machine.early_frees)) == ([], set())
    assert abandon(zero, waits=False).early_frees


def test_what_lanes_write_is_their_own_memory() -> None:
    assert _late_writes(abandon(3, waits=False)) == []
    assert _late_writes(abandon(3, waits=False, on_compute_stream=True))


def _late_writes(machine: Racing) -> list[str]:
    return [hazard for hazard in machine.hazards if "reuses memory of a write" in hazard]


def step_after_failed_forward() -> list[str]:
    """Step the optimizer while gathers of a forward that failed are still under way."""
    machine, job = Racing(), Job(zero=2)

    def fail(*_: object) -> None:
        raise ArithmeticError

    with sharding(machine, LANES["in order"]), machine:
        model, optimizer = trainer.build(job)
        trainer.run_step(model, optimizer, job, 0, 0, 2)
        optimizer.step()
        model.get_submodule("blocks.0").register_forward_pre_hook(fail)
        with contextlib.suppress(ArithmeticError):
            model(trainer.batch(1, rank=0, world_size=2))
        optimizer.step()
        del model, optimizer
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
