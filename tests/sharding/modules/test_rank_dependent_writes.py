"""Forwards that write by what a rank's own inputs are: refused by name, before anything changes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks


class Lookup(nn.Module):
    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 6))
        self.max_norm = max_norm


class Constant(Lookup):
    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight, max_norm=1.0)


class PassedOn(Lookup):
    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight, max_norm=self.max_norm)


def shard(rank: int, world_size: int) -> None:
    for zero in range(4):
        for lookup, refused in ((Constant(), True), (PassedOn(1.0), True), (PassedOn(), False)):
            model = nn.Sequential(lookup, nn.Linear(6, 2))
            before = dict(model.named_parameters())
            if refused and world_size > 1:
                with pytest.raises(ValueError, match=r"module '0': .*embedding\(.*max_norm"):
                    ss.fully_shard(model, zero_dp_strategy=zero)
                assert all(before[name] is now for name, now in model.named_parameters())
            else:
                ss.fully_shard(model, zero_dp_strategy=zero)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_functional_embedding_with_max_norm_is_refused_on_several_ranks(world_size: int) -> None:
    run_on_ranks(shard, world_size)
