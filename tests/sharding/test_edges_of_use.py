"""Uses at the edges: dropping a model after an exception, looking at gradients that wait, copies,
ranks that ask for different parts, gradients from before.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))


def _explode(*_: Any) -> None:
    raise ZeroDivisionError


def dropped_after_failures(rank: int, world_size: int, zero: int) -> None:
    for attempt in range(12):
        model = _model()
        ss.fully_shard(model, zero_dp_strategy=zero, fsdp_unit_modules=[nn.Linear])
        if attempt % 2:
            model[2].register_forward_hook(_explode)
        else:
            model[2].register_full_backward_hook(_explode)
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(5, 6)).sum().backward()
        del model
        dist.barrier()


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_dropped_after_an_exception_leaves_the_group_in_order(
    world_size: int, zero: int
) -> None:
    run_on_ranks(dropped_after_failures, world_size, zero)


def waiting_gradients(rank: int, world_size: int) -> None:
    for zero in range(4):
        model = _model()
        ss.fully_shard(model, zero_dp_strategy=zero)
        look_at_waiting_gradients(model)


def look_at_waiting_gradients(model: nn.Sequential) -> None:
    x, weight = torch.ones(2, 6), model[0].weight
    with ss.no_sync(model):
        model(x).sum().backward()
    grad = weight.grad
    looks: list[Any] = [
        lambda: grad.norm(),
        lambda: grad.isnan().any(),
        lambda: grad * 0.5,
        lambda: grad.mul_(0.5),
        lambda: grad.full_tensor(),
        lambda: grad.to_local(),
        lambda: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]),
        lambda: setattr(weight, "grad", grad),
    ]
    for look in looks:
        with pytest.raises(RuntimeError, match="expected an exchanged one, got one that was"):
            look()
    model(x).sum().backward()
    plain = _model()
    (2 * plain(x).sum()).backward()
    expected = plain[0].weight.grad
    torch.testing.assert_close(grad.full_tensor(), expected)
    with ss.no_sync(model):
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), expected / 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_wait_for_their_exchange_are_not_to_be_seen(world_size: int) -> None:
    run_on_ranks(waiting_gradients, world_size)


def other_parts(rank: int, world_size: int) -> None:
    model = _model()
    ss.fully_shard(model, fsdp_unit_modules=[nn.Linear])
    before = [p.full_tensor() for p in model.parameters()]
    with (
        pytest.raises(RuntimeError, match="expected the same part of the model on all ranks"),
        ss.gathered(model[rank], write=True),
        torch.no_grad(),
    ):
        model[rank].weight.mul_(2)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), value)


def test_ranks_that_gather_different_parts_are_refused_before_anything_changes() -> None:
    run_on_ranks(other_parts, 2)


def snapshots(rank: int, world_size: int) -> None:
    for zero in range(4):
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ss.fully_shard(model, optimizer, zero_dp_strategy=zero)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        saved, weights = copy.deepcopy(optimizer.state_dict()), ss.full_state_dict(model)
        step()
        expected = ss.full_state_dict(model)
        step()
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        step()
        for name, value in ss.full_state_dict(model).items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_snapshot_of_optimizer_state_rolls_back(world_size: int) -> None:
    run_on_ranks(snapshots, world_size)


def test_copies_of_sharded_modules_are_refused_with_the_way_out() -> None:
    model = _model()
    ss.fully_shard(model, fsdp_unit_modules=[nn.Linear])
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied.*full_state_dict\(module\)"):
            take(model)
        with ss.gathered(model), pytest.raises(TypeError, match="cannot be copied"):
            take(model)


def test_a_gradient_from_before_sharding_is_refused_by_name() -> None:
    model = _model()
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"'0.weight' has a gradient, which each rank computed"):
        ss.fully_shard(model)
    model.zero_grad()
    ss.fully_shard(model)
