"""What users do to gradients between passes counts as in plain PyTorch: hold, put back, replace."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.tensor.sharded_tensor import ShardedTensor
from sidestream.tests.ranks import run_on_ranks

WIDTH = 8


class Explodes(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


class Pair:
    """A sharded model and a plain one, on the same data on every rank."""

    def __init__(self, zero: int) -> None:
        self.plain, self.sharded = _model(), _model()
        self.optimizer = torch.optim.SGD(self.sharded.parameters(), lr=0.1)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        ss.fully_shard(
            self.sharded, self.optimizer, zero_dp_strategy=zero, fsdp_unit_modules=[nn.Linear]
        )

    def models(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
        yield self.plain, self.plain_optimizer
        yield self.sharded, self.optimizer

    def backward(self, seed: int) -> None:
        for model, _ in self.models():
            model(_data(seed)).sum().backward()

    def zero_grad(self) -> None:
        for _, optimizer in self.models():
            optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.sharded(_data(9))

    def check(self) -> None:
        both = zip(self.plain.named_parameters(), self.sharded.named_parameters(), strict=True)
        for (name, plain), (_, sharded) in both:
            assert isinstance(sharded, ShardedTensor), name
            found = None if sharded.grad is None else sharded.grad.full_tensor()
            assert (found is None) == (plain.grad is None), name
            assert found is None or torch.equal(found, plain.grad), name

    def flat(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    return nn.Sequential(*layers)


def _data(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def _give(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def put_back(pair: Pair) -> None:
    pair.backward(0)
    held = [[param.grad for param in model.parameters()] for model, _ in pair.models()]
    pair.zero_grad()
    for (model, _), grads in zip(pair.models(), held, strict=True):
        _give(model.parameters(), grads)
    pair.check()
    pair.backward(1)
    pair.check()


def flat_put_back_after_an_evaluation(pair: Pair) -> None:
    pair.backward(0)
    held = [param.grad for param in pair.flat()]
    pair.optimizer.zero_grad()
    pair.evaluate()
    _give(pair.flat(), held)
    pair.check()
    pair.backward(1)
    pair.check()


def flat_set_before_the_first_backward(pair: Pair) -> None:
    for flat in pair.flat():
        flat.grad = torch.ones_like(flat)
    for param in pair.plain.parameters():
        param.grad = torch.ones_like(param)
    pair.check()
    pair.backward(1)
    pair.check()


def flat_replaced(pair: Pair) -> None:
    pair.backward(0)
    for param in [*pair.flat(), *pair.plain.parameters()]:
        param.grad = param.grad * 0.5
    pair.check()
    pair.backward(1)
    pair.check()


def cleared_after_a_failed_backward(pair: Pair) -> None:
    pair.backward(0)
    hook = pair.sharded[1].register_forward_hook(lambda module, args, out: Explodes.apply(out))
    with pytest.raises(ZeroDivisionError):
        pair.sharded(_data(2)).sum().backward()
    hook.remove()
    pair.check()
    for model, _ in pair.models():
        model.zero_grad()
    pair.backward(1)
    pair.check()


def held_over_a_late_zero_grad(pair: Pair) -> None:
    pair.backward(0)
    held = [param.grad for param in pair.sharded.parameters()]
    values = [grad.full_tensor().clone() for grad in held]
    loss = pair.sharded(_data(1)).sum()
    pair.zero_grad()
    loss.backward()
    for grad, value in zip(held, values, strict=True):
        assert torch.equal(grad.full_tensor(), value)


def a_dropped_sum_is_freed(pair: Pair) -> None:
    pool = runtime_of(pair.sharded).pool
    at_start = pool.live_bytes
    with ss.no_sync(pair.sharded):
        pair.sharded(_data(0)).sum().backward()
    assert pool.live_bytes > at_start
    pair.zero_grad()
    pair.evaluate()
    assert pool.live_bytes == at_start


CASES = (
    put_back,
    flat_put_back_after_an_evaluation,
    flat_set_before_the_first_backward,
    flat_replaced,
    cleared_after_a_failed_backward,
    held_over_a_late_zero_grad,
    a_dropped_sum_is_freed,
)


def all_cases(rank: int, world_size: int, zero: int) -> None:
    for case in CASES:
        case(Pair(zero))


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_rank(case: Any, zero: int) -> None:
    case(Pair(zero))


@pytest.mark.parametrize("zero", [0, 3])
def test_two_ranks(zero: int) -> None:
    run_on_ranks(all_cases, 2, zero)


def test_gradient_of_a_model_that_is_gone() -> None:
    pair = Pair(3)
    pair.backward(0)
    param = next(pair.sharded.parameters())
    del pair
    gc.collect()
    assert param.grad is None
