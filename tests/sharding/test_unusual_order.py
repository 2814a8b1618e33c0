"""Units used in changing orders, ranks that differ in theirs, and looking at a model whose backward
failed.
"""

import itertools

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.trace import Kind
from sidestream.tests.ranks import run_on_ranks


class Layer(nn.Linear):
    """A unit."""


class Chain(nn.Module):
    """Equal units used in `order`; `fails` raises in the backward of what comes first."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(7, 7) for _ in range(num_layers))
        self.head = nn.Linear(7, 1)
        self.order = list(range(num_layers))
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


def follows_each_change_of_order(rank: int, world_size: int, prefetch: int) -> None:
    torch.manual_seed(0)
    model = Chain(6)
    ss.fully_shard(model, fsdp_unit_modules=[Layer], prefetch=prefetch)
    trace = runtime_of(model).trace
    model(torch.ones(2, 7)).sum().backward()
    for model.order in ([5, 3, 1, 4, 2, 0], [0, 2, 4, 1, 3, 5], [1, 5, 4, 0, 3, 2]):
        units = [1 + index for index in model.order]  # the root's is 0
        for is_known in (False, True):
            trace.steps = []
            model(torch.ones(2, 7)).sum().backward()
            places: dict[tuple[Kind, int], list[int]] = {}
            for place, step in enumerate(trace.steps):
                places.setdefault(step, []).append(place)
            for unit in units:
                assert len(places[Kind.GATHER, unit]) == 2, "gathered after it had done its work"
            for unit, after in itertools.pairwise(units if is_known else []):
                assert places[Kind.GATHER, after][0] < places[Kind.FORWARD, unit][0]
                assert places[Kind.GATHER, unit][1] < places[Kind.BACKWARD, after][0]


@pytest.mark.parametrize("prefetch", [1, 2])
def test_gathers_go_ahead_in_the_order_of_the_forward_before(prefetch: int) -> None:
    run_on_ranks(follows_each_change_of_order, 2, prefetch)


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
