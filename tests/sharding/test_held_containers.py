"""Lists and dictionaries of modules that hold parameters beside other things."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.modules.cached_params import HeldContainer
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins, square_loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """Holds a unit's module in one dictionary with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(6))
        self.table = {"module": self.block, "nested": ([self.block, self.scale],)}

    def forward(self, x: Tensor) -> Tensor:
        return self.table["module"](x) * self.table["nested"][0][1]


class Rebuilding(Model):
    """Fills its dictionary anew in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.table = {"module": self.block, "nested": ([self.block, self.scale],)}
        return super().forward(x)


def train(rank: int, world_size: int, kind: type[Model]) -> None:
    for zero in LEVELS[world_size]:
        torch.manual_seed(0)
        twins = Twins(rank, world_size, kind(), zero, [Block])
        twins.train(square_loss, (4, 6))
        held = twins.sharded.table["nested"][0][1]
        assert held is twins.sharded.scale


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", [Model, Rebuilding], ids=lambda kind: kind.__name__)
def test_train_as_a_plain_model(kind: type[Model], world_size: int) -> None:
    run_on_ranks(train, world_size, kind)


def test_a_container_that_holds_a_units_module_does_not_keep_it_alive() -> None:
    for zero in range(4):
        model = Model()
        ss.fully_shard_model(model, zero_dp_strategy=zero, fsdp_unit_modules=[Block])
        model(torch.ones(2, 6)).sum().backward()
        gone = [weakref.ref(part) for part in (model, model.block, model.block.linear)]
        gc.disable()
        try:
            del model
            assert [part() for part in gone] == [None] * 3
        finally:
            gc.enable()


def test_a_container_that_is_gone_keeps_what_was_put_there() -> None:
    module = nn.Module()
    module.kept = [[1]]
    held = HeldContainer(module, ("kept", 0))
    held[0] = 2
    assert module.kept == [[2]]
    module.kept = None
    assert held.get(0) == 2
    module.kept = [[]]
    held[0] = 3
    assert held.get(0) is None
    del module
    assert held.get(0) == 3
