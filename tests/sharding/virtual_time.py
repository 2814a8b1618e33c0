"""A ZeRO-3 step of an 8B model in virtual time, over links that nothing shares.

    8B model     32 blocks of 218 million parameters, bf16: 436 MB
    kernels      2.5 TB/s, of what they read and write
    NVLink       350 GB/s, InfiniBand 50 GB/s a GPU, of what leaves a GPU or, across nodes, a node:
                 7/8 of a buffer with 8 GPUs a node or 8 nodes

Nobody measured these: they say what a schedule can hide. Each communicator has its links to itself
and carries one collective at a time.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.bench.virtual_ranks import Along, Lanes
from sidestream.bench.virtual_steps import Layer, record
from sidestream.bench.virtual_streams import LoopbackGroup
from sidestream.bench.virtual_time import Recorder, Transfer, Work
from sidestream.tests.sharding.on_streams import LANES

NVLINK_GBPS, INFINIBAND_GBPS, MEMORY_GBPS = 350.0, 50.0, 2500.0
LEAVES = 7 / 8
BLOCKS, BLOCK_NUMEL = 32, 218_112_000


@dataclass(frozen=True)
class Link:
    """GB/s of gathers and of exchanges along one axis of `ranks`."""

    ranks: int
    gather_gbps: float
    exchange_gbps: float


@dataclass(frozen=True)
class Cluster:
    """Links, the first axis first. `forward_ms`, `backward_ms`: compute of a block."""

    links: tuple[Link, ...]
    forward_ms: float
    backward_ms: float

    @property
    def compute_ms(self) -> float:
        """A step without any communication."""
        return BLOCKS * (self.forward_ms + self.backward_ms)

    @property
    def numel(self) -> int:
        """Elements of a block's stand-in: 128 for each rank."""
        return 128 * math.prod(link.ranks for link in self.links)


def step_ms(cluster: Cluster, lanes: Lanes = LANES["in order"], **policy: Any) -> float:
    """One ZeRO-3 step, from the end of one optimizer step to that of the next."""
    scale = BLOCK_NUMEL / cluster.numel
    gb_per_s = {
        (place, way): gbps
        for place, link in enumerate(cluster.links)
        for way, gbps in enumerate((link.gather_gbps, link.exchange_gbps))
    }

    def transfers(_: nn.Module, along: Along) -> Transfer:
        links = {
            group: (place, way)
            for place, pair in enumerate(along)
            for way, group in enumerate(pair)
        }

        def take(group: LoopbackGroup, kind: str, target: Tensor) -> Work:
            return Work(0.0, {links[group]: LEAVES * scale * target.nbytes})

        return take

    layer = Layer(
        numel=cluster.numel, forward_ms=cluster.forward_ms, backward_ms=cluster.backward_ms
    )
    recording = record(
        [layer] * BLOCKS,
        [link.ranks for link in cluster.links],
        Recorder(scale, MEMORY_GBPS),
        transfers,
        lanes,
        mixed_precision_policy=ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy),
    )
    return recording.step_ms(gb_per_s)
