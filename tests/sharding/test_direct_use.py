"""Losses that use sharded parameters directly: what comes back of `full_tensor()` and `to_local()`
counts as the rank's contribution, as through the module.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins

BF16 = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _whole(param: Tensor) -> Tensor:
    return param.full_tensor() if isinstance(param, ss.ShardedTensor) else param


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + _penalty(model, x)


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    return _whole(model[2].weight).sin().square().sum() * x.mean()  # type: ignore[index]


def _twins(rank: int, world_size: int, zero: int, **options: Any) -> Twins:
    return Twins(rank, world_size, _model(), zero, [nn.Linear], **options)


def _train_with_penalty(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        _twins(rank, world_size, zero).train(_loss, (4, 6))


def _train_on_the_penalty_alone(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        _twins(rank, world_size, zero).train(_penalty, (4, 6))


def _two_backwards(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        for step in range(2):
            data = twins.data(step, 4, 6)
            twins.backward(lambda model, x: model(x).square().mean(), data)
            twins.backward(_penalty, data)
            twins.check_grads()
            twins.step()
        twins.check_params()


def _accumulated(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        with ss.no_sync(twins.sharded):
            twins.backward(_penalty, twins.data(0, 4, 6))
        twins.backward(_loss, twins.data(1, 4, 6))
        twins.check_grads()
        twins.step()
        twins.check_params()


def _on_rank_0_only(rank: int, world_size: int) -> None:
    """All ranks gather, one uses what it got."""
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        data = twins.data(0, 4, 6)
        for other, x in enumerate(data):
            loss = twins.plain(x).square().mean()
            if other == 0:
                loss = loss + _penalty(twins.plain, x)
            (loss / world_size).backward()
        penalty = _penalty(twins.sharded, data[rank])
        loss = twins.sharded(data[rank]).square().mean()
        (loss + penalty if rank == 0 else loss).backward()
        twins.check_grads()


def _inside_forward(rank: int, world_size: int) -> None:
    """A sharded parameter that somebody kept is used within the module's own forward."""

    class Regularised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _model()
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            penalty = sum(_whole(param).square().sum() for param in self.kept)
            return self.inner(x).square().mean() + penalty

    for zero in LEVELS[world_size]:
        twins = Twins(rank, world_size, Regularised(), zero, [nn.Linear])
        twins.plain.kept = list(twins.plain.parameters())
        twins.sharded.kept = list(twins.sharded.parameters())
        twins.train(lambda model, x: model(x), (4, 6))


CASES: dict[str, Callable[[int, int], None]] = {
    "beside the module": _train_with_penalty,
    "alone": _train_on_the_penalty_alone,
    "in a backward of its own": _two_backwards,
    "under no_sync": _accumulated,
    "on one rank": _on_rank_0_only,
    "inside forward": _inside_forward,
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_whole_parameter_in_a_loss_trains_as_the_plain_twin(
    case: Callable[[int, int], None], world_size: int
) -> None:
    run_on_ranks(case, world_size)


def _local_parts(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        names = [name for name, _ in twins.plain.named_parameters()]
        sharded = dict(twins.sharded.named_parameters())
        for name, param in twins.plain.named_parameters():
            for start, stop in sharded[name].intervals:
                part = param.reshape(-1)[start:stop]
                (part.pow(3).sum() / world_size).backward()
        sum(sharded[name].to_local().pow(3).sum() for name in names).backward()
        twins.check_grads()
        twins.step()
        twins.check_params()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_local_part_in_a_loss_trains_the_rank_s_own_elements(world_size: int) -> None:
    run_on_ranks(_local_parts, world_size)


def _writes(rank: int, world_size: int) -> None:
    x = torch.ones(2, 6)
    for zero in LEVELS[world_size]:
        model = _model()
        plain = _model()
        ss.fully_shard(model, zero_dp_strategy=zero)
        weight = model[0].weight
        assert torch.equal(model(x), plain(x))
        version = weight.local._version
        weight.to_local().mul_(2.0)
        weight.to_local()[:] += 1.0
        assert weight.local._version > version
        with torch.no_grad():
            weight.to_local().sub_(0.5)
            plain[0].weight.mul_(2.0).add_(1.0).sub_(0.5)
            assert torch.equal(weight.full_tensor(), plain[0].weight)
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("world_size", [1, 2])
def test_writes_to_the_local_part_go_on_with_gradients_enabled(world_size: int) -> None:
    run_on_ranks(_writes, world_size)


def _with_bf16_compute(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero, mixed_precision_policy=BF16)
        weight = twins.sharded[2].weight
        assert weight.full_tensor().dtype == torch.float32
        data = twins.data(0, 4, 6)
        twins.backward(_penalty, data)
        # Each rank's gradient is rounded to bf16 once, then summed in FP32.
        eps = torch.finfo(torch.bfloat16).eps
        twins.check_grads(rtol=eps, atol=eps)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_of_a_master_weight_goes_through_the_compute_dtype(world_size: int) -> None:
    run_on_ranks(_with_bf16_compute, world_size)


def _frozen_and_detached(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        model = _model()
        model[0].weight.requires_grad_(False)
        ss.fully_shard(model, zero_dp_strategy=zero)
        frozen, trainable = model[0].weight, model[2].weight
        assert not frozen.full_tensor().requires_grad
        assert frozen.to_local() is frozen.local
        assert not trainable.detach().full_tensor().requires_grad
        with torch.no_grad():
            assert not trainable.full_tensor().requires_grad
            assert trainable.to_local() is trainable.local
            assert trainable.exp().full_tensor().shape == trainable.shape
        state = ss.full_state_dict(model)
        assert not any(value.requires_grad for value in state.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_detached_or_without_gradients_it_is_a_plain_value(world_size: int) -> None:
    run_on_ranks(_frozen_and_detached, world_size)


def _unfrozen(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        model = _model()
        model.requires_grad_(False)
        ss.fully_shard(model, zero_dp_strategy=zero)
        model.requires_grad_(True)
        model[0].weight.full_tensor().sum().backward()
        assert torch.equal(model[0].weight.grad.full_tensor(), torch.ones(8, 6))


def test_parameter_unfrozen_since_the_last_forward_gets_its_gradient() -> None:
    run_on_ranks(_unfrozen, 2)


@pytest.mark.parametrize("method", ["full_tensor", "to_local"])
def test_result_of_a_recorded_operator_is_refused_with_the_fix(method: str) -> None:
    model = _model()
    ss.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"'0.weight'.*p.full_tensor\(\).exp\(\)"):
        getattr(model[0].weight.exp(), method)()
    with pytest.raises(RuntimeError, match=r"'0.weight'.*no gradient reaches"):
        result = model[0].weight.exp()
        result.backward(torch.ones_like(model[0].weight))
    assert model[0].weight.grad is None


def _graph_of_the_gradient(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        x = twins.data(0, 4, 6)

        def loss(model: nn.Module, value: Tensor) -> Tensor:
            value = value.clone().requires_grad_()
            out = (value @ _whole(model[0].weight).t()).tanh().sum()  # type: ignore[index]
            (slope,) = torch.autograd.grad(out, value, create_graph=True)
            return slope.square().mean()

        twins.backward(loss, x)
        twins.check_grads()


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_of_a_gradient_reaches_a_parameter_used_directly(world_size: int) -> None:
    run_on_ranks(_graph_of_the_gradient, world_size)
