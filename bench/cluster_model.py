"""A model of a GPU cluster: the step of a large decoder on it in virtual time, for each wire and
each way to exchange. What runs is the runtime itself, as rank 0 among ranks that are not there
(`virtual_steps.py`); how long anything takes is what the options say.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ..sharding.fully_shard import runtime_of
from ..sharding.precision import MixedPrecisionPolicy
from ..training.errors import UsageError
from .cluster_links import NIC, NVLINK, Rate, Shape, Span, rate, rates, shape
from .commands.parsing import count, names, names_of
from .virtual_ranks import Along
from .virtual_steps import Layer, Recording, record
from .virtual_streams import LoopbackGroup
from .virtual_time import Recorder, Transfer, Work

PART_NUMEL = 1024
"""Elements of a stand-in are this many for each rank, or a small multiple: what all wires can cut.
"""
MAX_STAND_IN_NUMEL = 2**27
BASELINE = ("bf16/bf16", "flat")
DEFAULT_WIRES = ("fp32/bf16", "bf16/bf16", "mxfp8/mxfp8", "nvfp4/mxfp8")


@dataclass(frozen=True)
class Exchange:
    """`splits`: a first axis inside nodes, a second one across them. `options`: of `fully_shard`."""

    splits: bool
    options: Mapping[str, str] = field(default_factory=dict)

    def spans(self, cluster: Shape) -> tuple[Span, ...]:
        """The axes, the first one first."""
        if self.splits:
            return Span(cluster.per_node, cluster.per_node), Span(cluster.nodes, 1)
        return (Span(cluster.world_size, cluster.per_node),)


_OUTER = {"dp_outer_dim": "outer"}
EXCHANGES: Mapping[str, Exchange] = {
    "flat": Exchange(splits=False),
    "hierarchical": Exchange(splits=True),
    "hsdp": Exchange(True, {**_OUTER, "outer_dp_sharding_strategy": "no_shard"}),
    "hfsdp": Exchange(True, {**_OUTER, "outer_dp_sharding_strategy": "optim"}),
}
