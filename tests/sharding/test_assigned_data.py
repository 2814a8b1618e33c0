"""Data assigned to a parameter that lies in a parameter's own memory: it counts as on a plain
model, or backward refuses.
"""

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins

SHAPE = (4, 6)


class _Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(6, 6) / 3)
        self.other = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        self.assign()
        return torch.tanh(x @ self.one) @ self.other

    def assign(self) -> None:
        pass


class Transposed(_Assigning):
    def assign(self) -> None:
        self.one.data = self.one.data.t()


class Swapped(_Assigning):
    def assign(self) -> None:
        self.one.data, self.other.data = self.other.data, self.one.data


class Shared(_Assigning):
    def assign(self) -> None:
        self.one.data = self.other.data


class TransposedCopy(_Assigning):
    def assign(self) -> None:
        self.one.data = self.one.data.t().clone()


KINDS = {kind.__name__: kind for kind in (Transposed, Swapped, Shared, TransposedCopy)}


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(KINDS[kind](), nn.Linear(6, 6), KINDS[kind]())


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def in_forward(rank: int, world_size: int, kind: str) -> None:
    for zero in LEVELS[world_size]:
        twins = Twins(rank, world_size, _model(kind), zero, [KINDS[kind], nn.Linear])
        x = twins.data(0, *SHAPE)[rank]
        for _ in range(3):
            with torch.no_grad():
                expected = twins.plain(x)
                torch.testing.assert_close(twins.sharded(x), expected)
            twins.check_params(rtol=0, atol=0)


def in_training(rank: int, world_size: int, kind: str) -> None:
    for zero in LEVELS[world_size]:
        twins = Twins(rank, world_size, _model(kind), zero, [KINDS[kind], nn.Linear])
        for step in range(3):
            data = twins.data(step, *SHAPE)
            # A single forward: each one changes the parameters.
            _loss(twins.plain, torch.cat(data)).backward()
            _loss(twins.sharded, data[rank]).backward()
            twins.check_grads()
            twins.step()
        twins.check_params()


def refused_in_training(rank: int, world_size: int, kind: str) -> None:
    for zero in LEVELS[world_size]:
        twins = Twins(rank, world_size, _model(kind), zero, [KINDS[kind], nn.Linear])
        loss = _loss(twins.sharded, twins.data(0, *SHAPE)[rank])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def whole(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        twins = Twins(rank, world_size, model, zero, [nn.Linear])
        with ss.gathered(twins.sharded, write=True):
            for first, second in (twins.plain, twins.sharded):
                first.weight.data, second.weight.data = second.weight.data, first.weight.data.t()
                first.bias.data = second.bias.data.flip(0)
            loss = _loss(twins.sharded, twins.data(0, *SHAPE)[rank])
        twins.check_params(rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        twins.train(_loss, SHAPE)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_data_assigned_in_forward_lasts(kind: str, world_size: int) -> None:
    run_on_ranks(in_forward, world_size, kind)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_data_in_new_memory_trains_as_on_a_plain_model(world_size: int) -> None:
    run_on_ranks(in_training, world_size, "TransposedCopy")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Transposed", "Swapped", "Shared"])
def test_backward_refuses_data_that_lay_in_memory_of_parameters(kind: str, world_size: int) -> None:
    run_on_ranks(refused_in_training, world_size, kind)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_data_swapped_between_whole_parameters_is_written_back(world_size: int) -> None:
    run_on_ranks(whole, world_size)
