"""What docs/clusters.md says travels between nodes of 8 GPUs, by `summary`: on ranks that are not
there, of which this process is one.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.bench.virtual_streams import Machine
from sidestream.tests.sharding.on_streams import SERIAL, sharding

RANKS_PER_NODE = 8
NODES = 8
WORLD = RANKS_PER_NODE * NODES
BF16 = 2
NUMEL = WORLD * 128 * 128  # cut into parts of whole blocks of 128 elements


def _sent(sizes: Sequence[int], outer: str | None = None, **policy: Any) -> list[int]:
    """What a ZeRO-1 step of one weight sends along each axis; `outer`: the strategy of the last."""
    options: dict[str, Any] = {}
    if outer is not None:
        options = {"dp_outer_dim": "outer", "outer_dp_sharding_strategy": outer}
    mixed = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy)
    with sharding(Machine(), SERIAL, sizes):
        model = nn.Linear(NUMEL // 1024, 1024, bias=False)
        ss.fully_shard(model, zero_dp_strategy=1, mixed_precision_policy=mixed, **options)
        found = ss.summary(model)
        del model
    return [found.sent_bytes_by_axis[name] for name in found.axes]


PARTIALS = {"fp32": (torch.float32, 4), "bf16": (torch.bfloat16, 8)}


@pytest.mark.parametrize(("dtype", "times_fewer"), PARTIALS.values(), ids=PARTIALS)
def test_sums_by_node_send_4_to_8_times_fewer_bytes_of_gradients_between_nodes(
    dtype: torch.dtype, times_fewer: int
) -> None:
    away = WORLD - RANKS_PER_NODE
    gathered = NUMEL * BF16 * away // (RANKS_PER_NODE * WORLD)  # once, at ZeRO-1
    _, along_rails = _sent((RANKS_PER_NODE, NODES), grad_partial_dtype=dtype)
    flat = NUMEL * BF16 * away // WORLD  # of what goes to every other rank
    assert along_rails - gathered == flat // times_fewer


def test_a_flat_axis_sends_a_part_to_every_other_rank() -> None:
    part = NUMEL // WORLD * BF16
    assert _sent((WORLD,)) == [2 * (WORLD - 1) * part]


OUTER = {"no_shard": 4 + 4, "optim": 4 + BF16}


@pytest.mark.parametrize(("strategy", "itemsize"), OUTER.items(), ids=OUTER)
def test_replicas_send_sums_and_what_comes_of_them(strategy: str, itemsize: int) -> None:
    _, between_replicas = _sent((RANKS_PER_NODE, NODES), strategy)
    assert between_replicas == (NODES - 1) * (NUMEL // WORLD) * itemsize
