"""Models whose ranks use different parts of them in one step, beside a plain twin that follows all
ranks' ways one after the other.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import sidestream as ss
from sidestream.tests.sharding.twins import Twins

WIDTH = 6
NUM_UNITS = 5
DETACHED = 100
"""Added to a unit's place in a route: its weights are used, but get no gradient."""


class Block(nn.Module):
    """A unit. All have equal shapes, so that one could be taken for another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, detached: bool = False) -> Tensor:
        if detached:
            return x + torch.tanh(linear(x, self.linear.weight.detach()))
        return x + torch.tanh(self.linear(x))


class Routed(nn.Module):
    """Runs its units in the order of `route`, perhaps recomputing each in backward."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        """`checkpoints`: whether those are reentrant; None: there are none."""
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Block() for _ in range(NUM_UNITS))
        self.last = nn.Linear(WIDTH, 3)
        self.route: Sequence[int] = ()
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place in self.route:
            unit, detached = self.units[place % DETACHED], place >= DETACHED
            if self.checkpoints is None:
                x = unit(x, detached)
            else:
                x = checkpoint(unit, x, detached, use_reentrant=self.checkpoints)
        return self.last(x)


Routes = Callable[[int, int], Sequence[int]]
"""What a rank uses in a step."""


def experts(rank: int, step: int) -> Sequence[int]:
    return (0, 1 + (rank + step) % 3, 4)


def dropped_layer(rank: int, step: int) -> Sequence[int]:
    return tuple(place for place in range(NUM_UNITS) if place != 1 + rank)


def one_rank_drops(rank: int, step: int) -> Sequence[int]:
    return (0, 2, 3, 4) if rank == 0 else (0, 1, 2, 3, 4)


def used_twice(rank: int, step: int) -> Sequence[int]:
    return (0, 1, 0, 2, 3, 4) if rank == 0 else (0, 1, 2, 3, 4)


def other_order(rank: int, step: int) -> Sequence[int]:
    return (0, 1, 2, 3, 4) if rank == 0 else (4, 3, 2, 1, 0)


def nothing_in_common(rank: int, step: int) -> Sequence[int]:
    return (0, 1) if rank == 0 else (2, 3)


def nothing_on_one_rank(rank: int, step: int) -> Sequence[int]:
    return () if rank == 1 else (0, 1, 2, 3, 4)


def no_gradient_on_one_rank(rank: int, step: int) -> Sequence[int]:
    return (0, 1, 2, 3, DETACHED + 4) if rank == 1 else (0, 1, 2, 3, 4)


def alike(rank: int, step: int) -> Sequence[int]:
    return (0, 1, 2, 3, 4)


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
        no_gradient_on_one_rank,
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

    def output(self, model: nn.Module, x: Tensor, route: Sequence[int]) -> Tensor:
        model.route = route
        return model(x)

    def pass_both(self, step: int, routes: Routes, *, sync: bool = True) -> None:
        """Forward and backward of both."""
        inputs = self.data(step, 4, WIDTH)
        for rank, value in enumerate(inputs):
            loss = self.output(self.plain, value, routes(rank, step)).square().mean()
            (loss / self.world_size).backward()
        with contextlib.nullcontext() if sync else ss.no_sync(self.sharded):
            own = self.output(self.sharded, inputs[self.rank], routes(self.rank, step))
            own.square().mean().backward()

    def train_on(self, routes: Routes, steps: int = 3) -> None:
        """Some steps of both, whose gradients and parameters must be equal."""
        for step in range(steps):
            self.pass_both(step, routes)
            self.check_grads()
            self.step()
        self.check_params()
