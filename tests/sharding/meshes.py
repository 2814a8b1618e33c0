"""Four ranks laid out in every way, as options of `fully_shard`."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

WORLD = 4
_OUTER = {"dp_shard_dim": "shard", "dp_outer_dim": "outer"}
_OPTIM = {**_OUTER, "outer_dp_sharding_strategy": "optim"}
# The mesh's dimensions, each of two ranks, and the options besides it.
MESHES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "flat": ((), {}),
    "HSDP": (("outer", "shard"), _OUTER),
    "HSDP, shards apart": (("shard", "outer"), _OUTER),
    "HFSDP": (("outer", "shard"), _OPTIM),
    "HFSDP, shards apart": (("shard", "outer"), _OPTIM),
    "two nodes": ((), {"ranks_per_node": 2}),
}
CASES = [
    (mesh, zero)
    for mesh, (_, options) in MESHES.items()
    for zero in (0, 1, 3)
    # An optimizer that no rank of the shard axis divides is not divided over the outer one either.
    if zero or options is not _OPTIM
]


def options_of(mesh: str) -> dict[str, Any]:
    """The options that shard a model over `mesh` (a collective)."""
    names, options = MESHES[mesh]
    assert dist.get_world_size() == WORLD
    if not names:
        return dict(options)
    return {**options, "device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names)}
