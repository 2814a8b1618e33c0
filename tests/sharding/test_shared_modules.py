"""Modules that stand in several places of the tree: in two units, in a slice, below themselves."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import Twins, square_loss

WIDTH = 6


class Block(nn.Module):
    """`norm`, and perhaps `shared`, may be another block's too."""

    def __init__(self, norm: nn.Module, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.norm = norm
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.own(self.norm(x)))
        return x if self.shared is None else x + self.shared(x)


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Halves(Chain):
    """Its blocks stand in two slices as well, which are what forward uses."""

    def __init__(self) -> None:
        super().__init__([Block(nn.LayerNorm(WIDTH)) for _ in range(3)])
        self.first, self.rest = self.blocks[:2], self.blocks[1:]

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.first, *self.rest):
            x = block(x)
        return self.head(x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inner(x))


def in_two_units() -> nn.Module:
    norm = nn.LayerNorm(WIDTH)
    return Chain([Block(norm), Block(norm)])


def in_a_unit_and_the_root() -> nn.Module:
    model = Chain([Block(nn.LayerNorm(WIDTH)), Block(nn.LayerNorm(WIDTH))])
    model.blocks.append(model.blocks[0].norm)
    return model


def with_parts_in_two_units() -> nn.Module:
    shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return Chain([Block(nn.LayerNorm(WIDTH), shared), Block(shared[0], shared)])


def a_unit_twice() -> nn.Module:
    block = Block(nn.LayerNorm(WIDTH))
    return Chain([block, Block(nn.LayerNorm(WIDTH)), block])


def a_unit_in_two_units() -> nn.Module:
    block = Block(nn.LayerNorm(WIDTH))
    return Chain([Outer(block), Outer(block)])


def below_itself() -> nn.Module:
    model = Chain([Block(nn.LayerNorm(WIDTH)), Block(nn.LayerNorm(WIDTH))])
    model.blocks[0].add_module("parent", model.blocks[1])
    model.blocks[1].add_module("child", model.blocks[0])
    return model


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "in two units": in_two_units,
    "in a unit and the root": in_a_unit_and_the_root,
    "with parts in two units": with_parts_in_two_units,
    "in slices": Halves,
    "a unit twice": a_unit_twice,
    "a unit in two units": a_unit_in_two_units,
    "below itself": below_itself,
}


def trains(rank: int, world_size: int, shape: str) -> None:
    for zero in range(4):
        torch.manual_seed(0)
        model = SHAPES[shape]()
        units = [cls for cls in (Block, Outer) if any(type(m) is cls for m in model.modules())]
        twins = Twins(rank, world_size, model, zero, units)
        twins.train(square_loss, (2, WIDTH))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_module_in_several_places_trains_as_in_a_plain_model(shape: str, world_size: int) -> None:
    run_on_ranks(trains, world_size, shape)
