"""Gradients through the whole parameters of `gathered`: they count as the rank's contribution."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins

SHAPE = (4, 6)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((6,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(x * self.scale))))


def _twins(rank: int, world_size: int, zero: int) -> Twins:
    torch.manual_seed(0)
    return Twins(rank, world_size, _Model(), zero, [nn.Linear])


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Some parameters, saved by the graph both as they are and as views."""
    weight, bias = model.second.weight, model.last.weight
    return (x @ weight.t() * weight.sin().sum()).square().mean() + bias.square().sum()


def _plain(twins: Twins, loss: Callable[[nn.Module, Tensor], Tensor], step: int = 0) -> Tensor:
    """Backward of the plain twin; returns this rank's input."""
    data = twins.data(step, *SHAPE)
    for x in data:
        (loss(twins.plain, x) / twins.world_size).backward()
    return data[twins.rank]


def _both(model: nn.Module, x: Tensor) -> Tensor:
    return _loss(model, x) + _penalty(model, x)


def _inside(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        for step, loss in enumerate([_penalty, _loss, _both]):
            x = _plain(twins, loss, step)
            with ss.gathered(twins.sharded):
                loss(twins.sharded, x).backward()
            twins.check_grads()
            twins.step()
        twins.check_params()


def _after(rank: int, world_size: int) -> None:
    """What the graph read of the whole parameters outlives the block."""
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        for step, loss in enumerate([_penalty, _loss, _both]):
            x = _plain(twins, loss, step)
            with ss.gathered(twins.sharded):
                value = loss(twins.sharded, x)
            value.backward()
            twins.check_grads()
            twins.step()
            del value
        twins.train(_loss, SHAPE)


def _beside(rank: int, world_size: int) -> None:
    """One backward through the model's own forward and through whole parameters."""
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        for step in range(3):
            x = _plain(twins, _both, step)
            if step == 1:
                value = _loss(twins.sharded, x)
                with ss.gathered(twins.sharded.second), ss.gathered(twins.sharded.first):
                    value = value + _penalty(twins.sharded, x)
            else:
                with ss.gathered(twins.sharded):
                    value = _penalty(twins.sharded, x)
                value = _loss(twins.sharded, x) + value
            value.backward()
            twins.check_grads()
            twins.step()
        twins.check_params()


def _on_one_rank(rank: int, world_size: int) -> None:
    """All ranks gather, one has a penalty."""
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        data = twins.data(0, *SHAPE)
        for other, x in enumerate(data):
            loss = _both if other == 0 else _loss
            (loss(twins.plain, x) / world_size).backward()
        value = _loss(twins.sharded, data[rank])
        with ss.gathered(twins.sharded):
            penalty = _penalty(twins.sharded, data[rank])
        (value + penalty if rank == 0 else value).backward()
        twins.check_grads()


def _accumulated(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        x = _plain(twins, _penalty)
        with ss.no_sync(twins.sharded), ss.gathered(twins.sharded):
            _penalty(twins.sharded, x).backward()
        twins.backward(_loss, twins.data(1, *SHAPE))
        twins.check_grads()


def _checkpointed(rank: int, world_size: int) -> None:
    """Parts are computed again in backward: after the block only those that are units."""

    def unit(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model.second, x.tanh(), use_reentrant=False).square().mean()

    def parts(model: nn.Module, x: Tensor) -> Tensor:
        return unit(model, checkpoint(model.first, x * model.scale, use_reentrant=False))

    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        x = _plain(twins, parts)
        with ss.gathered(twins.sharded):
            parts(twins.sharded, x).backward()
        twins.check_grads()
        x = _plain(twins, unit)
        with ss.gathered(twins.sharded):
            value = unit(twins.sharded, x)
        value.backward()
        twins.check_grads()


def _older_graph(rank: int, world_size: int) -> None:
    """The backward of a forward from before the block runs inside it."""
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        value = _loss(twins.sharded, _plain(twins, _loss))
        with ss.gathered(twins.sharded):
            value.backward()
            assert type(twins.sharded.first.weight) is nn.Parameter
        twins.check_grads()
        twins.train(_loss, SHAPE)


def _in_a_hook(rank: int, world_size: int) -> None:
    """The block is entered while a backward runs, and while a forward runs."""
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        seen = []

        def look(model: nn.Module, seen: list[Tensor]) -> None:
            with ss.gathered(model):
                seen.append(model.second.weight.detach().clone())
                seen.append(model.first.weight.detach().clone())
                assert type(model.scale) is nn.Parameter

        def forward_hook(module: nn.Module, args: object, output: Tensor) -> None:
            look(twins.sharded, seen)  # noqa: B023
            output.register_hook(lambda _: look(twins.sharded, seen))  # noqa: B023

        twins.sharded.second.register_forward_hook(forward_hook)
        expected = [twins.plain.second.weight.clone(), twins.plain.first.weight.clone()]
        twins.train(_loss, SHAPE, steps=1)
        assert len(seen) == 4
        assert all(torch.equal(a, b) for a, b in zip(seen, expected * 2, strict=True))


def _named_inputs(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        for x in twins.data(0, *SHAPE):
            (_penalty(twins.plain, x) / world_size).backward(inputs=[twins.plain.second.weight])
        x = twins.data(0, *SHAPE)[rank]
        with ss.gathered(twins.sharded):
            value = _penalty(twins.sharded, x)
            (own,) = torch.autograd.grad(value, twins.sharded.second.weight, retain_graph=True)
        (expected,) = torch.autograd.grad(_penalty(twins.plain, x), twins.plain.second.weight)
        torch.testing.assert_close(own, expected)
        value.backward(inputs=[twins.sharded.second.weight])
        twins.check_grads()


CASES: dict[str, Callable[[int, int], None]] = {
    "inside": _inside,
    "after": _after,
    "beside forward": _beside,
    "on one rank": _on_one_rank,
    "under no_sync": _accumulated,
    "checkpointed": _checkpointed,
    "of an older graph": _older_graph,
    "in a hook": _in_a_hook,
    "of named inputs": _named_inputs,
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_through_whole_parameters(
    case: Callable[[int, int], None], world_size: int
) -> None:
    run_on_ranks(case, world_size)


def test_units_are_exchanged_in_backward_again_once_no_graph_holds_their_parameters() -> None:
    torch.manual_seed(0)
    model = _Model()
    ss.fully_shard(model, fsdp_unit_modules=[nn.Linear])
    units = runtime_of(model).units
    with ss.gathered(model):
        loss = _penalty(model, torch.ones(SHAPE))
    assert any(unit.faces.open_paths() for unit in units)
    del loss
    assert not any(unit.faces.open_paths() for unit in units)
