"""Parameters that backward still reads once their gradients are complete, and gradients that come
after their unit's exchange: each equals a plain model at every ZeRO level.
"""

from collections import Counter
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.trace import Kind
from sidestream.sharding.unit import UnitState
from sidestream.sharding.wire import Source
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins, square_loss

WIDTH = 6


class Unit(nn.Module):
    """What `fully_shard` takes as a unit here, in several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class ScalesDetached(Unit):
    """The bias's gradient comes first; the product needs its values after that."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.linear.bias.detach() + self.linear.bias


class MultipliesDetached(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(linear(x, self.linear.weight.detach())))


class Around(Unit):
    """Another unit lies between the use that gives the gradient and the detached one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Unit()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.inner(linear(x, self.linear.weight.detach())))


class Switched(Unit):
    detached = False

    def forward(self, x: Tensor) -> Tensor:
        if self.detached:
            return torch.tanh(linear(x, self.linear.weight.detach()))
        return torch.tanh(self.linear(x))


class CalledTwice(nn.Module):
    """The unit's gradient is complete before the backward of its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit, self.between = nn.Linear(WIDTH, WIDTH), Switched(), Unit()

    def forward(self, x: Tensor) -> Tensor:
        self.unit.detached = True
        x = self.between(self.unit(self.first(x)))
        self.unit.detached = False
        return self.unit(x)


class ChecksItsPart(Unit):
    """Recomputes a part of itself, `times` times over: a unit's hooks do not see it."""

    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.last(x)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class ChecksUnitsTwice(nn.Module):
    """Every unit runs in two checkpoints of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.units = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Unit(), Unit()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for unit in [*self.units, *self.units]:
            x = checkpoint(unit, x, use_reentrant=True)
        return x


class Passes(nn.Module):
    """Returns what it was given, as it came, as layers that are dropped do, or changed in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.scale, self.in_place = nn.Parameter(torch.ones(())), in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.scale) if self.in_place else x


class Position(nn.Module):
    """Its output is a part of its parameter, not a result computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: len(x)]


class AddsPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position, self.unit = Position(), Unit()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        position = self.position(x)
        return self.unit(x) * position, position


class CallsItself(Unit):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self.linear(self(x, depth - 1) if depth else x)


class KnownByTwoNames(nn.Module):
    """`outer` contains `inner`, which was registered under a name outside of it first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, outer = nn.Linear(WIDTH, WIDTH), Around()
        self.inner, self.outer = outer.inner, outer

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.first(x))


def in_a_stack(*units: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *units, nn.Linear(WIDTH, 3))


def detached_uses(rank: int, world_size: int, zero: int) -> None:
    for model in (
        in_a_stack(ScalesDetached(), ScalesDetached()),
        in_a_stack(MultipliesDetached(), MultipliesDetached()),
        in_a_stack(Around(), Unit()),
        CalledTwice(),
        # The unit's output is the root's.
        nn.Sequential(nn.Linear(WIDTH, WIDTH), MultipliesDetached()),
        KnownByTwoNames(),
        in_a_stack(CallsItself(), Unit()),
    ):
        Twins(rank, world_size, model, zero, [Unit]).train(square_loss, (4, WIDTH))


def units_that_return_their_input(rank: int, world_size: int, zero: int) -> None:
    for in_place in (False, True):
        for before in (MultipliesDetached(), ScalesDetached()):
            model = in_a_stack(before, Passes(in_place), Unit())
            twins = Twins(rank, world_size, model, zero, [Unit, Passes])
            twins.train(square_loss, (4, WIDTH))


def units_that_return_their_parameters(rank: int, world_size: int, zero: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].square().mean()

    twins = Twins(rank, world_size, AddsPositions(), zero, [Unit, Position])
    for step in range(3):
        twins.backward(loss, twins.data(step, 4, WIDTH))
        twins.step()
    twins.check_params()
    x = twins.data(5, 4, WIDTH)[rank]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            for got, expected in zip(twins.sharded(x), twins.plain(x), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    output, position = twins.sharded(x)
    output.sum().backward()
    torch.testing.assert_close(position, twins.plain(x)[1], rtol=1e-5, atol=1e-6)


def checkpoints_inside_units(rank: int, world_size: int, zero: int) -> None:
    for reentrant in (False, True):
        for times in (1, 2):
            units = [ChecksItsPart(reentrant, times) for _ in range(2)]
            Twins(rank, world_size, in_a_stack(*units), zero, [Unit]).train(square_loss, (4, WIDTH))


def units_in_two_reentrant_checkpoints(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, ChecksUnitsTwice(), zero, [Unit])
    twins.train(square_loss, (4, WIDTH))
    for step in range(2):
        with ss.no_sync(twins.sharded):
            twins.backward(square_loss, twins.data(10 + step, 4, WIDTH))
        twins.backward(square_loss, twins.data(20 + step, 4, WIDTH))
        twins.check_grads()
        twins.step()
    twins.check_params()


def gradient_penalties(rank: int, world_size: int, zero: int) -> None:
    """Second derivatives; `after` comes between the first backward and the second."""

    def penalised(model: nn.Module, x: Tensor, after: str) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x)
        (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        if after == "no_grad":
            with torch.no_grad():
                model(x)
        elif after == "state_dict":
            model.state_dict()
        second = model(x * 2).abs().mean() if after == "forward" else 0.0
        return output.square().mean() + grad.square().sum(1).mean() + second

    twins = Twins(rank, world_size, in_a_stack(Unit(), Unit(), Unit()), zero, [Unit])
    resident = twins.runtime.pool.live_bytes
    for step, after in enumerate(("nothing", "forward", "no_grad", "state_dict")):
        twins.backward(lambda m, x, a=after: penalised(m, x, a), twins.data(step, 4, WIDTH))
        twins.check_grads(rtol=1e-4)
        twins.step()
        grown = twins.runtime.pool.live_bytes - resident
        if step:
            assert grown == 0, "what the graph needed is kept no longer than the graph"
        resident += grown
    twins.check_params(rtol=1e-4)


def a_graph_that_nobody_uses(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, in_a_stack(Unit(), Unit()), zero, [Unit])
    twins.train(square_loss, (4, WIDTH), steps=1)
    x = twins.data(5, 4, WIDTH)[rank].requires_grad_()
    torch.autograd.grad(square_loss(twins.sharded, x), x, create_graph=True)
    twins.optimizer.zero_grad()
    for creates_graph in (True, True, False):
        for value in twins.data(6, 4, WIDTH):
            (square_loss(twins.plain, value) / world_size).backward()
        own = twins.data(6, 4, WIDTH)[rank]
        square_loss(twins.sharded, own).backward(create_graph=creates_graph)
    twins.check_grads()
    for unit in twins.runtime.units:
        assert unit.gradients.main_grad is not None
        assert unit.gradients.main_grad.grad_fn is None, "the sum is no part of the graph"
    twins.step()
    twins.train(square_loss, (4, WIDTH))
    square_loss(twins.sharded, twins.data(7, 4, WIDTH)[rank]).backward(create_graph=True)
    twins.optimizer.step()
    twins.check_at_rest()


def run_case(rank: int, world_size: int, name: str) -> None:
    for zero in LEVELS[world_size]:
        torch.manual_seed(0)
        globals()[name](rank, world_size, zero)


CASES = [
    detached_uses,
    units_that_return_their_input,
    units_that_return_their_parameters,
    checkpoints_inside_units,
    units_in_two_reentrant_checkpoints,
    gradient_penalties,
    a_graph_that_nobody_uses,
]


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_equals_a_plain_model(case: str) -> None:
    run_on_ranks(run_case, 2, case)


def trace(model: nn.Module) -> list[tuple[Kind, int]]:
    """What the second of two steps of `model` does at ZeRO-3 in this process."""
    twins = Twins(0, 1, model, 3, [Unit])
    twins.train(square_loss, (4, WIDTH), steps=1)
    steps: list[tuple[Kind, int]] = []
    twins.runtime.trace.steps = steps
    twins.train(square_loss, (4, WIDTH), steps=1)
    return steps


def exchanges(model: nn.Module) -> int:
    return [kind for kind, _ in trace(model)].count(Kind.EXCHANGE)


def test_only_gradients_that_come_late_cost_another_exchange() -> None:
    assert exchanges(in_a_stack(ChecksItsPart(True, 1), ChecksItsPart(False, 2))) == 3
    assert exchanges(ChecksUnitsTwice()) == 3 + 2


class Keys(ss.MessageWire):
    """Remembers the keys of the noise that it was asked for."""

    seen: ClassVar[list[int]] = []

    def pack(self, sent: Tensor, source: Source, parts: int) -> None:
        self.seen.append(source.noise_key)
        super().pack(sent, source, parts)


def test_exchanges_of_late_gradients_have_noise_of_their_own() -> None:
    model, x = ChecksUnitsTwice(), torch.randn(3, WIDTH)
    policy = ss.MixedPrecisionPolicy(grad_wire=Keys("nvfp4"))
    ss.fully_shard(model, fsdp_unit_modules=[Unit], mixed_precision_policy=policy)
    for _ in range(3):
        model(x).sum().backward()
    times = Counter(Keys.seen)
    assert sorted(times.values()) == [2, 2, 2, 3, 3, 3], "two units late, three in their turn"


def test_a_unit_used_again_after_its_gradients_is_released_again() -> None:
    first, used_twice = 1, 2
    steps = trace(nn.Sequential(Unit(), CalledTwice()))
    before = steps[: steps.index((Kind.BACKWARD, first))]
    assert before.count((Kind.GATHER, used_twice)) == 4
    assert before.count((Kind.RELEASE, used_twice)) == 4


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, WIDTH))
        self.copies = False

    def forward(self, count: int) -> Tensor:
        return self.rows[:count].clone() if self.copies else self.rows[:count]


class UsesTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = Table(), nn.Linear(WIDTH, 2)
        self.returns = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = self.table(len(x))
        return self.head(x + rows), rows if self.returns else None


@pytest.mark.parametrize("trains", [True, False], ids=["with a graph", "without a graph"])
def test_a_table_is_kept_while_its_rows_are_in_use_and_no_longer(trains: bool) -> None:
    model, x = UsesTable(), torch.randn(3, WIDTH)
    expected = model.table.rows[:3].detach().clone()
    ss.fully_shard(model, fsdp_unit_modules=[Table])
    unit = runtime_of(model).units[1]
    seen = []
    model.head.register_forward_pre_hook(lambda *_: seen.append(unit.state))
    with torch.set_grad_enabled(trains):
        output, _ = model(x)
        if trains:
            output.sum().backward()
        assert unit.state is UnitState.SHARDED
        model.returns = True
        assert torch.equal(model(x)[1], expected)
        assert unit.state is UnitState.GATHERED
        model.returns, model.table.copies = False, True
        model(x)
    assert seen == [UnitState.GATHERED, UnitState.GATHERED, UnitState.SHARDED]
