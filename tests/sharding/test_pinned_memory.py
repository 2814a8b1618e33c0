"""A forward that has numpy share a parameter's memory: what cannot be freed is refused by name."""

import pytest
import torch
from torch import Tensor, nn

from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import Twins, square_loss


class Block(nn.Module):
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.detach()
        weight = weight.clone() if self.copies else weight
        return self.linear(x) * float(weight.numpy().max())


def forward(rank: int, world_size: int, copies: bool) -> None:
    for zero in range(4):
        torch.manual_seed(0)
        model = nn.Sequential(Block(copies=copies), nn.Linear(6, 6))
        twins = Twins(rank, world_size, model, zero, [Block])
        if copies or zero < 3:
            twins.train(square_loss, (4, 6))
            continue
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"unit '0': .*0.linear.weight.*clone\(\).numpy"):
                twins.sharded(torch.ones(4, 6))
        twins.check_params()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("copies", [True, False], ids=["copied", "shared"])
def test_memory_that_numpy_shares_is_refused_by_name(copies: bool, world_size: int) -> None:
    run_on_ranks(forward, world_size, copies)
