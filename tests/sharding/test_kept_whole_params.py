"""What one rank alone keeps of `gathered`: the ranks still communicate in one order.

Many units: with few of them, gathers ahead hide that one rank exchanges later than another.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins, square_loss

SHAPE = (4, 6)
KEPT = 6


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def _twins(rank: int, world_size: int, zero: int) -> Twins:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Block() for _ in range(8)])
    return Twins(rank, world_size, model, zero, [_Block])


def _sum(weight: Tensor) -> Tensor:
    """Its gradient is that of any value of `weight`, an old one too."""
    return (weight * 0.5).sum()


def _train_with(twins: Twins, step: int, penalty: Tensor | None) -> None:
    """A step in which rank 0's loss has `penalty`, its own, besides."""
    data = twins.data(step, *SHAPE)
    for rank, x in enumerate(data):
        loss = square_loss(twins.plain, x)
        if rank == 0:
            loss = loss + _sum(twins.plain[KEPT].linear.weight)
        (loss / twins.world_size).backward()
    loss = square_loss(twins.sharded, data[twins.rank])
    (loss if penalty is None else loss + penalty).backward()
    twins.check_grads()
    twins.step()


def _deferred(twins: Twins) -> list[str]:
    return [unit.spec.name for unit in twins.runtime.units if unit.faces.awaits_more]


def _keep_parameter(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        kept = None
        for _ in range(2):
            with ss.gathered(twins.sharded):
                if rank == 0:
                    kept = twins.sharded[KEPT].linear.weight
            assert _deferred(twins) == [str(KEPT)]
            twins.train(square_loss, SHAPE, steps=1)
        _train_with(twins, 2, None if kept is None else _sum(kept))
        assert _deferred(twins) == [str(KEPT)]
        del kept
        twins.train(square_loss, SHAPE, steps=1)
        assert not _deferred(twins)
        twins.train(square_loss, SHAPE, steps=1)


def _keep_graph(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        penalty = None
        with ss.gathered(twins.sharded):
            if rank == 0:
                penalty = _sum(twins.sharded[KEPT].linear.weight)
        assert _deferred(twins) == [str(KEPT)]
        twins.train(square_loss, SHAPE, steps=1)
        _train_with(twins, 1, penalty)
        penalty = None
        twins.train(square_loss, SHAPE, steps=2)
        assert not _deferred(twins)


def _keep_nothing(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        with ss.gathered(twins.sharded, write=True):
            assert len(_deferred(twins)) == 8
        assert not _deferred(twins)
        twins.train(square_loss, SHAPE, steps=1)


CASES: dict[str, Callable[[int, int], None]] = {
    "a parameter": _keep_parameter,
    "a graph": _keep_graph,
    "nothing": _keep_nothing,
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_communicate_alike_whatever_one_of_them_keeps(
    case: Callable[[int, int], None], world_size: int
) -> None:
    run_on_ranks(case, world_size, timeout_s=40)
