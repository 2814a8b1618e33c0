"""From meshes to axes and communicators: names decide, members alone take part, nothing stale."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sidestream.sharding.process_groups import DataParallelGroups, data_parallel_groups
from sidestream.tests.ranks import run_on_ranks

ALONE = "SIDESTREAM_ONE_RANK_GROUPS"


def _told(groups: DataParallelGroups) -> dict[str, Any]:
    """What of `groups` can travel; the ranks by their numbers in the job."""

    def ranks(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    for axis in groups.axes:
        for group in (axis.gather, axis.reduce):
            assert group is None or dist.get_rank(group) == axis.rank
        assert axis.gather is None or axis.gather is not axis.reduce
    return {
        "axes": [(axis.name, axis.size, ranks(axis.gather)) for axis in groups.axes],
        "reduce": [ranks(axis.reduce) for axis in groups.axes],
        "group": ranks(groups.group),
        "own": tuple(axis.rank for axis in groups.axes),
        "coordinates": groups.coordinates,
        "rank": groups.rank,
    }


# ---- names decide


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _two_axes(rank: int, world_size: int, names: tuple[str, str]) -> dict[str, Any]:
    return _told(data_parallel_groups(_mesh((2, 2), names), "shard", "outer"))


@pytest.mark.parametrize(
    ("names", "along_shard", "along_outer", "coordinates"),
    [
        (("outer", "shard"), [[0, 1], [2, 3]], [[0, 2], [1, 3]], ((0, 0), (1, 0), (0, 1), (1, 1))),
        (("shard", "outer"), [[0, 2], [1, 3]], [[0, 1], [2, 3]], ((0, 0), (0, 1), (1, 0), (1, 1))),
    ],
    ids=["outer dimension first", "shard dimension first"],
)
def test_names_decide_and_not_positions(names, along_shard, along_outer, coordinates):
    for rank, found in enumerate(run_on_ranks(_two_axes, 4, names)):
        shard = next(ranks for ranks in along_shard if rank in ranks)
        outer = next(ranks for ranks in along_outer if rank in ranks)
        assert found["axes"] == [("shard", 2, shard), ("outer", 2, outer)]
        assert found["reduce"] == [shard, outer]
        assert found["group"] == [0, 1, 2, 3] and found["rank"] == rank
        assert found["coordinates"] == coordinates and found["own"] == coordinates[rank]
