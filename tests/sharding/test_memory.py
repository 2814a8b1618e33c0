"""Bytes: at rest what `summary` says to the byte, at peak within its formula, nothing after
deletion.
"""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.sharding.collectives import Channel
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import (
    Block,
    Job,
    Transformer,
    batch,
    build,
    loss_of,
    run_step,
)

POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 wire": {"grad_comm_dtype": torch.bfloat16},
    "bf16 compute": {"param_dtype": torch.bfloat16},
    "all bf16": {
        "param_dtype": torch.bfloat16,
        "main_params_dtype": torch.bfloat16,
        "main_grads_dtype": torch.bfloat16,
    },
}


def storage_bytes(model: nn.Module) -> int:
    """Bytes of every distinct storage that the model's units keep, counted from the tensors
    themselves.
    """
    storages: dict[int, int] = {}
    for unit in runtime_of(model).units:
        kept = [
            unit.main,
            *unit.faces.full,
            unit.gradients.main_grad,
            unit.gradients.waiting,
        ]
        for tensor in kept:
            if tensor is not None:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def at_rest_and_peak(rank: int, world_size: int) -> None:
    for zero in range(4):
        for name, policy in POLICIES.items():
            job = Job(zero=zero, policy=policy)
            model, optimizer = build(job)
            pool = runtime_of(model).pool
            run_step(model, optimizer, job, 0, rank, world_size)
            optimizer.step()
            pool.reset_peak()
            run_step(model, optimizer, job, 1, rank, world_size)
            optimizer.step()
            optimizer.zero_grad()
            planned = ss.summary(model)
            assert pool.live_bytes == planned.bytes_at_rest, (zero, name)
            assert storage_bytes(model) == planned.bytes_at_rest, (zero, name)
            largest = max(
                unit.spec.layout.numel
                * (unit.spec.dtypes.compute.itemsize + 2 * unit.spec.wires[0].dtype.itemsize)
                for unit in runtime_of(model).units
            )
            assert planned.peak_bytes - largest <= pool.peak_bytes <= planned.peak_bytes, (
                zero,
                name,
            )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_at_rest_exactly_and_at_peak_within_the_formula(world_size: int) -> None:
    run_on_ranks(at_rest_and_peak, world_size)


def gradients_are_freed_once_cleared(rank: int, world_size: int) -> None:
    for zero in range(4):
        job = Job(zero=zero)
        model, optimizer = build(job)
        pool = runtime_of(model).pool
        run_step(model, optimizer, job, 0, rank, world_size)
        optimizer.step()
        resident, grad_bytes = pool.live_bytes, sum(u.grad_bytes for u in ss.summary(model).units)
        with torch.no_grad():
            loss_of(model, batch(0, rank=rank, world_size=world_size))
        assert pool.live_bytes == resident, "gradients that nobody cleared stay"
        held = [param.grad for param in model.parameters()]
        values = [grad.full_tensor().clone() for grad in held]
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, batch(0, rank=rank, world_size=world_size))
        assert pool.live_bytes == resident - grad_bytes > 0, zero
        run_step(model, optimizer, job, 1, rank, world_size)
        assert pool.live_bytes == resident
        for grad, value, param in zip(held, values, model.parameters(), strict=True):
            assert torch.equal(grad.full_tensor(), value), "what somebody holds stays as it was"
            assert not torch.equal(param.grad.full_tensor(), value)


@pytest.mark.parametrize("world_size", [1, 3])
def test_cleared_gradients_take_no_memory_from_the_next_forward_on(world_size: int) -> None:
    run_on_ranks(gradients_are_freed_once_cleared, world_size)


def a_gather_raises(rank: int, world_size: int, error: type[BaseException]) -> None:
    job = Job()
    model, _ = build(job)
    runtime, tokens = runtime_of(model), batch(0, rank=rank, world_size=world_size)
    expected = loss_of(model, tokens).item()
    runtime.rest()
    resident = runtime.pool.live_bytes
    gather, attempts = Channel.gather, []

    def fails_once(self: Channel, *args: Any) -> Any:
        attempts.append(args)
        if len(attempts) == 3:
            raise error("in a gather")
        return gather(self, *args)

    for _ in range(2):
        attempts.clear()
        with mock.patch.object(Channel, "gather", fails_once), pytest.raises(error):
            loss_of(model, tokens)
        runtime.rest()
        assert runtime.pool.live_bytes == storage_bytes(model) == resident
    assert loss_of(model, tokens).item() == expected


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def test_a_gather_that_raises_keeps_no_memory(error: type[BaseException], world_size: int) -> None:
    run_on_ranks(a_gather_raises, world_size, error)


def traffic_as_planned(rank: int, world_size: int) -> None:
    for zero in range(4):
        for name, policy in POLICIES.items():
            job = Job(zero=zero, policy=policy)
            model, optimizer = build(job)
            run_step(model, optimizer, job, 0, rank, world_size)
            optimizer.step()
            optimizer.zero_grad()
            traffic = runtime_of(model).collectives.traffic
            traffic.reset()
            run_step(model, optimizer, job, 1, rank, world_size)
            planned = ss.summary(model)
            assert sum(traffic.sent_bytes.values()) == planned.sent_bytes_per_step, (zero, name)
            assert traffic.calls["gather"] == sum(unit.gathers_per_step for unit in planned.units)
            assert (
                traffic.calls["exchange"]
                == sum(unit.exchanges_per_step for unit in planned.units)
                == 4
            )
            assert traffic.calls["gather"] == {0: 0, 1: 4, 2: 4, 3: 1 + 2 * 3}[zero]
            optimizer.step()
            traffic.reset()
            with ss.no_sync(model):
                run_step(model, optimizer, job, 2, rank, world_size)
            assert set(traffic.calls) <= {"gather"}, "no exchange under no_sync"


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_and_wire_bytes_as_planned(world_size: int) -> None:
    run_on_ranks(traffic_as_planned, world_size)


def bf16_wire(rank: int, world_size: int) -> None:
    """The FP32-accumulating exchange of bf16 gradients is the FP32 sum of the same bf16 values, at
    half the bytes.
    """
    sent = {}
    for wire in (torch.bfloat16, torch.float32):
        job = Job(zero=2, units="whole", policy={"grad_comm_dtype": wire})
        model, _ = build(job)
        traffic = runtime_of(model).collectives.traffic
        traffic.reset()
        plain = Transformer()
        plain.load_state_dict(ss.full_state_dict(model))
        loss_of(model, batch(0, rank=rank, world_size=world_size)).backward()
        sent[wire] = traffic.sent_bytes["exchange"]
        expected = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
        for source in range(world_size):
            plain.zero_grad()
            loss_of(plain, batch(0, rank=source, world_size=world_size)).backward()
            for name, param in plain.named_parameters():
                expected[name] += param.grad.to(wire).float()
        for name, param in model.named_parameters():
            mean = expected[name] * torch.tensor(1.0 / world_size)
            assert torch.equal(param.grad.full_tensor(), mean), name
    assert sent[torch.float32] == 2 * sent[torch.bfloat16] > 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bf16_wire_is_the_fp32_sum_at_half_the_bytes(world_size: int) -> None:
    run_on_ranks(bf16_wire, world_size)


@pytest.mark.parametrize("zero", range(4))
def test_deleting_model_and_optimizer_frees_everything_at_once(zero: int) -> None:
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ss.fully_shard(model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=zero)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        optimizer.step()
    tensors = [
        tensor
        for unit in runtime_of(model).units
        for tensor in (unit.main, unit.gradients.main_grad, *unit.faces.full, *unit.faces.sharded)
    ]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    references = [weakref.ref(tensor) for tensor in tensors] + [weakref.ref(runtime_of(model))]
    del tensors
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        alive = [reference() for reference in references if reference() is not None]
        assert not alive, "only the garbage collector would free these"
    finally:
        gc.enable()


def test_summary_prints_a_table() -> None:
    model = Transformer()
    ss.fully_shard(model, fsdp_unit_modules=[Block])
    text = str(ss.summary(model))
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["unit", "tensors", "elements"]
    assert [line.split()[0] for line in lines[2:6]] == [
        "(root)",
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    total = sum(param.numel() for param in Transformer().parameters())
    assert f"optim_grads_params, world 1, {total:,} elements" in lines[-2]
