"""Models whose ranks use different parts of them in one step, and the plain twin that knows all
ranks' choices.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sidestream.tests.sharding.twins import Twins

WIDTH = 6
NUM_UNITS = 4


class Block(nn.Module):
    """A unit. All have equal shapes, so that one could be taken for another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Routed(nn.Module):
    """Runs its units in the order of `route`, perhaps recomputing each in backward."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        """`checkpoints`: whether those are reentrant; None for none."""
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Block() for _ in range(NUM_UNITS))
        self.last = nn.Linear(WIDTH, 3)
        self.route: Sequence[int] = ()
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.route:
            unit = self.units[index]
            if self.checkpoints is None:
                x = unit(x)
            else:
                x = checkpoint(unit, x, use_reentrant=self.checkpoints)
        return self.last(x)


Routes = Callable[[int, int], Sequence[int]]
"""What rank r uses in step s."""


def experts(rank: int, step: int) -> Sequence[int]:
    return (0, 1 + (rank + step) % 2, 3)


def dropped_layer(rank: int, step: int) -> Sequence[int]:
    return tuple(index for index in range(NUM_UNITS) if index != 1 + rank)


def one_rank_drops(rank: int, step: int) -> Sequence[int]:
    return (0, 2, 3) if rank == 0 else (0, 1, 2, 3)


def used_twice(rank: int, step: int) -> Sequence[int]:
    return (0, 1, 0, 2, 3) if rank == 0 else (0, 1, 2, 3)


def other_order(rank: int, step: int) -> Sequence[int]:
    return (0, 1, 2, 3) if rank == 0 else (3, 2, 1, 0)


def nothing_in_common(rank: int, step: int) -> Sequence[int]:
    return (0, 1) if rank == 0 else (2, 3)


def nothing_on_one_rank(rank: int, step: int) -> Sequence[int]:
    return () if rank == 1 else (0, 1, 2, 3)


def alike(rank: int, step: int) -> Sequence[int]:
    return (0, 1, 2, 3)


ROUTES: dict[str, Routes] = {
    function.__name__: function
    for function in (
        experts,
        dropped_layer,
        one_rank_drops,
        used_twice,
        other_order,
        nothing_in_common,
        nothing_on_one_rank,
    )
}


class RoutedTwins(Twins):
    """Twins whose plain half follows every rank's route in turn."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        zero: int,
        *,
        checkpoints: bool | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        super().__init__(rank, world_size, Routed(checkpoints), zero, [Block], **options)

    def loss(self, model: nn.Module, x: Tensor, route: Sequence[int]) -> Tensor:
        model.route = route
        return model(x).square().mean()

    def pass_both(self, step: int, routes: Routes, *, sync: bool = True) -> None:
        """Forward and backward of both."""
        inputs = self.data(step, 4, WIDTH)
        for rank, value in enumerate(inputs):
            (self.loss(self.plain, value, routes(rank, step)) / self.world_size).backward()
        import sidestream as ss

        with contextlib.nullcontext() if sync else ss.no_sync(self.sharded):
            self.loss(self.sharded, inputs[self.rank], routes(self.rank, step)).backward()
