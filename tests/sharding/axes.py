"""Data-parallel groups without a mesh, for tests of what is given some."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from sidestream.sharding.process_groups import Axis, DataParallelGroups


def groups_over(
    axes: Sequence[Axis], group: Any, device: torch.device, rank: int = 0
) -> DataParallelGroups:
    """All ranks along `axes`, in `group`."""
    places = tuple(itertools.product(*(range(axis.size) for axis in axes)))
    return DataParallelGroups(rank, len(places), device, group, tuple(axes), places)


def one_axis(
    rank: int, world_size: int, device: torch.device, group: Any = None
) -> DataParallelGroups:
    """All ranks along one axis; `group` is its two communicators too."""
    axis = Axis("dp", range(world_size), rank, group, group)
    return groups_over([axis], group, device, rank)
