"""What messages of gradients still owe: for which tensors, and when it is forgotten."""

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks

WIRE = ss.MessageWire("mxfp4", rounding="nearest", error_feedback=torch.float32)


def make(*, frozen: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))
    model[1].requires_grad_(not frozen)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    policy = ss.MixedPrecisionPolicy(grad_wire=WIRE)
    ss.fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear], mixed_precision_policy=policy)
    return model, optimizer


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


def forgets_what_failed(rank: int, world_size: int) -> None:
    grads = []
    for fails in (True, False):
        model, optimizer = make()
        for step in range(3):
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))
            if step == 2 and fails:
                handle = model[0].register_forward_hook(lambda *call: Failing.apply(call[-1]))
                with pytest.raises(ZeroDivisionError):
                    model(x).square().sum().backward()
                handle.remove()
            elif step == 2:
                ss.reset_error_feedback(model)
            model(x).square().sum().backward()
            found = [param.grad.full_tensor() for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        grads.append(found)
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_a_backward_that_failed_leaves_nothing_owed() -> None:
    run_on_ranks(forgets_what_failed, 2)


def owes_for_the_trained(rank: int, world_size: int) -> None:
    model, _ = make(frozen=True)

    def kept() -> list[int]:
        return [unit.residual_bytes for unit in ss.summary(model).units]

    one = 4 * 512  # a weight's elements over two ranks; a bias travels in another wire
    assert sorted(kept()) == [0, 0, 0, 0, one, one]
    model[1].requires_grad_(True)
    model(torch.randn(4, 20)).sum().backward()
    assert sorted(kept()) == [0, 0, 0, one, one, one]


def test_what_is_frozen_is_owed_nothing() -> None:
    run_on_ranks(owes_for_the_trained, 2)
