"""Data-parallel groups without a mesh, for tests of what is given some."""

from typing import Any

import torch

from sidestream.bench.virtual_ranks import groups_over
from sidestream.sharding.data_parallel_groups import Axis, DataParallelGroups


def one_axis(
    rank: int, world_size: int, device: torch.device, group: Any = None
) -> DataParallelGroups:
    """All ranks along one axis; `group` is its two communicators too."""
    axis = Axis("dp", range(world_size), rank, group, group)
    return groups_over([axis], group, device, rank)
