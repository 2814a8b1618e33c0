"""Data-parallel groups without a mesh, for tests of what is given some."""

from typing import Any

import torch

from sidestream.sharding.process_groups import Axis, DataParallelGroups


def one_axis(
    rank: int, world_size: int, device: torch.device, gather: Any = None, reduce: Any = None
) -> DataParallelGroups:
    """All ranks along one axis; both communicators are `gather` where only that is given."""
    axis = Axis("dp", range(world_size), rank, gather, gather if reduce is None else reduce)
    coordinates = tuple((one,) for one in range(world_size))
    return DataParallelGroups(rank, world_size, device, gather, (axis,), coordinates)
