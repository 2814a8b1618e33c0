"""Ranks that hold no element of a parameter take part in what follows a load like all others."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks

pytestmark = pytest.mark.timeout(120)


class Small(nn.Module):
    """A unit of 25 elements, of which the last of four ranks holds none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


def loads(rank: int, world_size: int, folder: str) -> None:
    x = torch.ones(2, 7)
    for zero in range(4):
        saved = ss.fully_shard_model(Small(0), zero_dp_strategy=zero)
        expected = saved(x)
        dcp.save({"m": saved.state_dict()}, checkpoint_id=f"{folder}/{zero}")
        ss.save_checkpoint(f"{folder}/ours-{zero}", saved)
        for seed, ours in ((1, False), (2, True)):
            model = ss.fully_shard_model(Small(seed), zero_dp_strategy=zero)
            model(x)
            if ours:
                ss.load_checkpoint(f"{folder}/ours-{zero}", model)
            else:
                dcp.load({"m": model.state_dict()}, checkpoint_id=f"{folder}/{zero}")
            assert torch.equal(model(x), expected), (zero, ours)


def test_a_load_is_seen_by_the_next_forward_of_every_rank(tmp_path: Path) -> None:
    for world_size in (2, 4):
        run_on_ranks(loads, world_size, str(tmp_path / f"{world_size}"), timeout_s=60)
