"""What docs/clusters.md says travels between nodes of 8 GPUs, by `summary`: on ranks that are not
there, of which this process is one.
"""

import itertools
import math
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sidestream as ss
from sidestream.sharding.collectives import Collectives
from sidestream.sharding.process_groups import Axis, DataParallelGroups
from sidestream.sharding.summary import Summary

RANKS_PER_NODE = 8
NODES = 8
BF16 = 2
NUMEL = 64 * 128 * 128  # cut into 64 parts, each a multiple of 128 elements


def summary_on(
    model: nn.Module, sizes: dict[str, int], outer: str | None = None, **options: Any
) -> Summary:
    """The summary of `model` on ranks along axes of `sizes`; `outer`: the strategy of the last."""
    world_size, names = math.prod(sizes.values()), list(sizes)
    group = mock.Mock(size=lambda: world_size)
    axes = tuple(Axis(name, range(sizes[name]), 0, group, group) for name in names)
    coordinates = tuple(itertools.product(*map(range, sizes.values())))
    groups = DataParallelGroups(0, world_size, torch.device("cpu"), group, axes, coordinates)
    entry = sys.modules[ss.fully_shard.__module__]
    over_two = {} if outer is None else {"dp_outer_dim": names[-1], "dp_shard_dim": names[0]}
    if outer is not None:
        over_two |= {"outer_dp_sharding_strategy": outer, "device_mesh": mock.Mock(DeviceMesh)}
    with (
        mock.patch.object(entry, "data_parallel_groups", lambda *_, **__: groups),
        mock.patch.multiple(entry, check_ranks_agree=mock.Mock(), MONITOR=mock.Mock()),
        mock.patch.multiple(Collectives, broadcast=mock.Mock(), gather_objects=mock.Mock()),
        mock.patch.multiple(dist, get_backend=lambda _: "nccl", get_rank=lambda _: 0),
    ):
        ss.fully_shard(model, **over_two, **options)
        return ss.summary(model)


def _sent(sizes: dict[str, int], outer: str | None = None, **policy: Any) -> dict[str, int]:
    model = nn.Linear(NUMEL // 1024, 1024, bias=False)
    mixed = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy)
    found = summary_on(model, sizes, outer, zero_dp_strategy=1, mixed_precision_policy=mixed)
    return dict(found.sent_bytes_by_axis)


PARTIALS = {"fp32": (torch.float32, 4), "bf16": (torch.bfloat16, 8)}


@pytest.mark.parametrize(("dtype", "times_fewer"), PARTIALS.values(), ids=PARTIALS)
def test_sums_by_node_send_4_to_8_times_fewer_bytes_of_gradients_between_nodes(
    dtype: torch.dtype, times_fewer: int
) -> None:
    world_size = RANKS_PER_NODE * NODES
    away = world_size - RANKS_PER_NODE
    gathered = NUMEL * BF16 * away // (RANKS_PER_NODE * world_size)  # once, at ZeRO-1
    sent = _sent({"node": RANKS_PER_NODE, "rail": NODES}, grad_partial_dtype=dtype)
    flat = NUMEL * BF16 * away // world_size  # of what goes to every other rank
    assert sent["rail"] - gathered == flat // times_fewer


def test_a_flat_axis_sends_a_part_to_every_other_rank() -> None:
    world_size = RANKS_PER_NODE * NODES
    part = NUMEL // world_size * BF16
    assert _sent({"dp": world_size}) == {"dp": 2 * (world_size - 1) * part}


OUTER = {"no_shard": 4 + 4, "optim": 4 + BF16}


@pytest.mark.parametrize(("strategy", "itemsize"), OUTER.items(), ids=OUTER)
def test_replicas_send_sums_and_what_comes_of_them(strategy: str, itemsize: int) -> None:
    sent = _sent({"dp_shard": RANKS_PER_NODE, "dp_outer": NODES}, strategy)
    part = NUMEL // RANKS_PER_NODE // NODES
    assert sent["dp_outer"] == (NODES - 1) * part * itemsize
