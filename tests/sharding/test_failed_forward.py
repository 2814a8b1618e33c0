"""After a forward that failed, whoever catches it finds the modules as they are at rest, and the
next step gives what a plain model gives.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins, square_loss

SHAPE = (4, 6)
ERRORS = (ArithmeticError, KeyboardInterrupt, SystemExit)


class Layer(nn.Linear):
    """A unit that raises `error` in forward, from the call on that `after` counts down to."""

    error: type[BaseException] | None = None
    after = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            self.after -= 1
            if self.after < 0:
                raise self.error("in forward")
        return torch.tanh(super().forward(x))


class Nest(nn.Module):
    """Units in units, one of them in a checkpoint, and parameters of the root beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(6, 6)
        self.pair = Pair()
        self.last = nn.Linear(6, 2)
        self.falls_back = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.pair(self.first(x))
        try:
            x = checkpoint(self.first, x, use_reentrant=False)
        except ArithmeticError:
            if not self.falls_back:
                raise
        return self.last(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList([Layer(6, 6), Layer(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


def make_twins(rank: int, world_size: int, zero: int, **options: Any) -> Twins:
    torch.manual_seed(0)
    return Twins(rank, world_size, Nest(), zero, [Layer, Pair], **options)


def fail(twins: Twins, call: Callable[[], object], error: type[BaseException]) -> None:
    """`call` fails; inside the handler, while its frames live, all is as at rest."""
    with pytest.raises(error):
        try:
            call()
        except BaseException:
            for name, param in twins.sharded.named_parameters():
                assert isinstance(param, ss.ShardedTensor), name
            twins.sharded.zero_grad()
            assert all(param.grad is None for param in twins.sharded.parameters())
            raise
    twins.plain.zero_grad()


def raise_in(where: str, twins: Twins, error: type[BaseException]) -> Callable[[], None]:
    """Make the sharded model fail at `where`; returns what ends that."""

    def fails(*_: object) -> None:
        raise error("in a hook")

    model = twins.sharded
    if where.startswith("hook"):
        module = model if where.endswith("root") else model.pair.layers[1]
        if "before" in where:
            return module.register_forward_pre_hook(fails, prepend="first" in where).remove
        return module.register_forward_hook(fails, prepend="first" in where).remove
    layer = {"unit": model.first, "nested": model.pair.layers[1]}.get(where)
    if layer is None:
        model.last.forward = fails
        return lambda: delattr(model.last, "forward")
    layer.error = error
    return lambda: setattr(layer, "error", None)


PLACES = ("unit", "nested", "root", "hook before unit", "hook before first unit")
PLACES += ("hook after unit", "hook after first unit", "hook before root", "hook before first root")
PLACES += ("hook after root", "hook after first root")


def training_goes_on(rank: int, world_size: int, zero: int) -> None:
    twins = make_twins(rank, world_size, zero)
    twins.train(square_loss, SHAPE, steps=1)
    for number, where in enumerate(PLACES):
        error = ERRORS[number % len(ERRORS)]
        # A gradient is there, which whoever catches the error clears.
        twins.backward(square_loss, twins.data(1, *SHAPE))
        undo = raise_in(where, twins, error)
        fail(twins, lambda: twins.sharded(twins.data(2, *SHAPE)[rank]), error)
        with torch.no_grad():
            fail(twins, lambda: twins.sharded(twins.data(2, *SHAPE)[rank]), error)
        undo()
        twins.train(square_loss, SHAPE, steps=1)


def failures_in_recomputation(rank: int, world_size: int, zero: int) -> None:
    for error in ERRORS:
        twins = make_twins(rank, world_size, zero)
        twins.backward(square_loss, twins.data(1, *SHAPE))
        loss = square_loss(twins.sharded, twins.data(2, *SHAPE)[rank])
        twins.sharded.first.error = error
        fail(twins, loss.backward, error)
        twins.sharded.first.error = None
        twins.train(square_loss, SHAPE, steps=2)


def caught_inside_forward(rank: int, world_size: int, zero: int) -> None:
    """The root goes on with its own parameters where a unit failed."""
    twins = make_twins(rank, world_size, zero)
    for step in range(3):
        for model in (twins.plain, twins.sharded):
            model.falls_back = True
            model.first.error = ArithmeticError if step == 1 else None

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            model.first.after = 1
            return square_loss(model, x)

        twins.train(loss, SHAPE, steps=1)


def units_called_alone(rank: int, world_size: int, zero: int) -> None:
    twins = make_twins(rank, world_size, zero)
    for where in ("nested", "hook after first unit"):
        twins.backward(square_loss, twins.data(1, *SHAPE))
        undo = raise_in(where, twins, ArithmeticError)
        x = twins.data(2, *SHAPE)[rank]
        fail(twins, lambda x=x: twins.sharded.pair(x), ArithmeticError)
        undo()
        twins.train(square_loss, SHAPE, steps=1)


def run_case(rank: int, world_size: int, name: str) -> None:
    for zero in LEVELS[world_size]:
        globals()[name](rank, world_size, zero)


CASES = (
    training_goes_on,
    failures_in_recomputation,
    caught_inside_forward,
    units_called_alone,
)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_equals_a_plain_model(case: str, world_size: int) -> None:
    run_on_ranks(run_case, world_size, case)
