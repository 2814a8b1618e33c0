"""`keep_step`: a step that is run again from there has the bits of its first run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.checkpoint.wires import wires_of
from sidestream.tests.ranks import run_on_ranks

WIRE = ss.MessageWire("mxfp8", rounding="stochastic", error_feedback=torch.float32)


class Model(nn.Module):
    """Has a buffer of each kind that a forward changes: in place, anew, and registered late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Dropout(0.3), nn.Linear(40, 24)
        )
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        if self.calls > 2 and not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(1))
        return self.layers(x) * self.calls


def made(zero: int | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if zero is not None:
        policy = ss.MixedPrecisionPolicy(grad_wire=WIRE)
        units: Any = [nn.Linear, nn.BatchNorm1d]
        options: Any = {"zero_dp_strategy": zero, "mixed_precision_policy": policy}
        ss.fully_shard(model, optimizer, fsdp_unit_modules=units, **options)
    return model, optimizer


def forward_backward(model: nn.Module, rank: int, step: int, zero: int | None) -> None:
    """Three microbatches, of which the last exchanges."""
    torch.manual_seed(100 * step + rank)
    for microbatch in range(3):
        x = torch.randn(8, 24)
        if zero is None or microbatch == 2:
            model(x).square().mean().backward()
        else:
            with ss.no_sync(model):
                model(x).square().mean().backward()


def state(model: nn.Module) -> dict[str, Tensor]:
    found = {f"buffer {name}": x.clone() for name, x in model.named_buffers()}
    found |= {
        f"gradient {name}": getattr(x.grad, "local", x.grad).clone()
        for name, x in model.named_parameters()
    }
    return found | {f"owed {n}": x.tensor.clone() for n, x in wires_of(model).owed.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def runs_again(rank: int, world_size: int, levels: list[int | None]) -> None:
    for zero in levels:
        model, optimizer = made(zero)
        for step in range(2):
            for keeps_gradients in (False, True):
                kept = ss.keep_step(model)
                forward_backward(model, rank, step, zero)
                first = state(model)
                for _ in range(2):
                    kept.restore()
                    assert keeps_gradients or all(x.grad is None for x in model.parameters())
                    forward_backward(model, rank, step, zero)
                    assert same(state(model), first), (zero, step, keeps_gradients)
                if not keeps_gradients:
                    continue
                # Without it the bits are others: what this test compares can differ.
                forward_backward(model, rank, step, zero)
                assert not same(state(model), first)
                kept.restore()
                forward_backward(model, rank, step, zero)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param([0, 3, None], id="zero0,3,plain"),
        pytest.param([1, 2], id="zero1,2", marks=pytest.mark.slow),
    ],
)
def test_a_step_runs_again_with_the_same_bits(levels: list[int | None]) -> None:
    run_on_ranks(runs_again, 2, levels)


def forgets_a_step_that_was_not_exchanged(rank: int, world_size: int) -> None:
    model, _ = made(3)
    kept = ss.keep_step(model)
    forward_backward(model, rank, 0, 3)
    first = state(model)
    kept.restore()
    with ss.no_sync(model):
        model(torch.randn(8, 24)).sum().backward()
    with pytest.raises(RuntimeError, match="keep_step: expected exchanged gradients"):
        ss.keep_step(model)
    kept.restore()
    forward_backward(model, rank, 0, 3)
    assert same(state(model), first)


def test_sums_that_wait_are_forgotten_and_not_kept() -> None:
    run_on_ranks(forgets_a_step_that_was_not_exchanged, 2)
