"""Ranks that use units in different orders, and looking at a model whose backward failed."""

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks


class Layer(nn.Linear):
    """A unit."""


class Chain(nn.Module):
    """Two equal units used in `order`; `fails` raises in the backward of what comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 1)
        self.order = [0, 1]
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x).tanh()
        if self.fails:
            x.register_hook(_fail)
        return self.head(x)


def _fail(_grad: Tensor) -> Tensor:
    raise ArithmeticError("in backward")


def orders_differ(rank: int, world_size: int, zero: int) -> None:
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ss.fully_shard(model, optimizer, fsdp_unit_modules=[Layer], zero_dp_strategy=zero)
    x = torch.ones(2, 7)
    model.order = [0, 1] if rank == 0 else [1, 0]
    model(x).square().mean().backward()
    optimizer.step()
    model.order = [0, 1]
    with torch.no_grad():
        model(x)
        plain = Chain()
        plain.load_state_dict(ss.full_state_dict(model))
        torch.testing.assert_close(model(x), plain(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("zero", range(3))
def test_gathers_pair_up_although_ranks_differ_in_their_order_of_use(zero: int) -> None:
    run_on_ranks(orders_differ, 2, zero)


@pytest.mark.parametrize("zero", range(4))
def test_state_after_a_failed_backward_is_at_rest(zero: int) -> None:
    torch.manual_seed(0)
    model = Chain()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    policy = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ss.fully_shard(
        model, fsdp_unit_modules=[Layer], zero_dp_strategy=zero, mixed_precision_policy=policy
    )
    model.fails = True
    with pytest.raises(ArithmeticError):
        model(torch.ones(2, 7)).sum().backward()
    found = ss.full_state_dict(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
