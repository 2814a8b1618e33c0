"""What a warning is worth before training starts: options and an environment that hide nothing."""

from __future__ import annotations

import logging
import os

import torch

from .data_parallel_groups import DataParallelGroups
from .shard_config import ShardConfig

_logger = logging.getLogger("sidestream")


def note_missing_units(config: ShardConfig, groups: DataParallelGroups) -> None:
    """Tell of a model that is one unit."""
    sizes = config.sizes
    has_buckets = sizes.bucket_bytes is not None or sizes.reverse_buckets is not None
    one_unit = not config.classes and not has_buckets
    if one_unit and groups.world_size > 1 and groups.rank == 0:
        _logger.warning(
            "fully_shard: fsdp_unit_modules is None, so the whole module is one unit; pass the "
            "class of its blocks to overlap communication with compute"
        )


def note_connections(config: ShardConfig, groups: DataParallelGroups) -> None:
    """Tell of a variable that has kernels of several streams follow each other."""
    overlaps = config.overlap_grad_reduce or config.runtime.overlap_param_gather
    serialised = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    tells = groups.world_size > 1 and groups.rank == 0
    if tells and overlaps and serialised and _has_streams(groups.device):
        _logger.warning(
            "fully_shard: CUDA_DEVICE_MAX_CONNECTIONS is 1, so gathers and exchanges wait for all "
            "compute that was enqueued before them, and hardly overlap; unset it, or pass "
            "overlap_grad_reduce=False and overlap_param_gather=False if you want that"
        )


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda"
