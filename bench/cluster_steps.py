"""A step of a decoder on a GPU cluster in virtual time, for one wire and one way to exchange.

What runs is the runtime itself, as rank 0 among ranks that are not there (`virtual_steps.py`). A
layer's stand-in has the shape of the layer's flat buffer, with fewer elements; what a message of it
takes is asked of the wire, for a part of the size that stands behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ..sharding.fully_shard import runtime_of
from ..sharding.message_wire import message_bytes
from ..sharding.precision import MixedPrecisionPolicy
from ..sharding.unit_spec import UnitSpec
from .cluster_links import Cluster, Exchange
from .virtual_ranks import Along
from .virtual_steps import Layer, Recording, record
from .virtual_streams import LoopbackGroup
from .virtual_time import Recorder, Transfer, Work

PART_NUMEL = 1024
"""Elements of a stand-in are a small multiple of this for each rank: what all wires can cut."""
MAX_STAND_IN_NUMEL = 2**27
_FINEST = (8, 4, 2, 1)


@dataclass(frozen=True)
class DecoderSizes:
    """`blocks` of `block_numel` parameters between an embedding and a head of `table_numel`."""

    blocks: int
    block_numel: int
    table_numel: int

    @property
    def numel(self) -> int:
        """Parameters."""
        return self.blocks * self.block_numel + 2 * self.table_numel

    @property
    def multiplied_numel(self) -> int:
        """Parameters that are factors of a matrix product: an embedding is looked up."""
        return self.numel - self.table_numel


@dataclass(frozen=True)
class Gpu:
    """`flops_per_ms`: what matrix products reach. `latency_ms`: of a message."""

    flops_per_ms: float
    memory_gb_per_s: float
    latency_ms: float


@dataclass(frozen=True)
class StandIns:
    """Elements of a stand-in of a block and of a table, each of which stands for `scale`."""

    block: int
    table: int
    scale: float

    def numel(self, decoder: DecoderSizes) -> int:
        """Of all layers together."""
        return decoder.blocks * self.block + 2 * self.table


def stand_ins(decoder: DecoderSizes, world_size: int) -> StandIns:
    """Multiples of `PART_NUMEL` for each rank, in the ratio of the layers or near it: the finest
    that has `MAX_STAND_IN_NUMEL` elements at most in all, or the coarsest.
    """
    found = [_in_ratio(decoder, finest, world_size) for finest in _FINEST]
    fitting = [one for one in found if one.numel(decoder) <= MAX_STAND_IN_NUMEL]
    return [*fitting, found[-1]][0]


def _in_ratio(decoder: DecoderSizes, finest: int, world_size: int) -> StandIns:
    """A block has at most `finest` parts for each rank, and a table is at least one of them."""
    ratio = Fraction(0)
    if decoder.table_numel:
        exact = Fraction(decoder.table_numel, decoder.block_numel)
        ratio = max(exact.limit_denominator(finest), Fraction(1, finest))
    part = PART_NUMEL * world_size
    block = ratio.denominator * part
    return StandIns(block, ratio.numerator * part, decoder.block_numel / block)


def record_step(
    decoder: DecoderSizes,
    tokens: int,
    gpu: Gpu,
    cluster: Cluster,
    exchange: Exchange,
    policy: MixedPrecisionPolicy,
) -> Recording:
    """The works of training `decoder` on `tokens` a GPU."""
    small = stand_ins(decoder, cluster.world_size)
    spans = exchange.spans(cluster)
    machine = Recorder(small.scale, gpu.memory_gb_per_s)

    def multiplied(numel: int, *, is_unit: bool) -> Layer:
        forward_ms = 2 * numel * small.scale * tokens / gpu.flops_per_ms
        return Layer(
            numel=numel, forward_ms=forward_ms, backward_ms=2 * forward_ms, is_unit=is_unit
        )

    layers = [multiplied(small.block, is_unit=True)] * decoder.blocks
    if small.table:
        embedding = Layer(numel=small.table, is_unit=False)
        layers = [embedding, *layers, multiplied(small.table, is_unit=False)]

    def transfers(model: nn.Module, along: Along) -> Transfer:
        places = {group: place for place, groups in enumerate(along) for group in groups}
        specs = [unit.spec for unit in runtime_of(model).units]
        block = next(spec for spec in specs if spec.layout.numel == small.block)
        sizes = _Sizes(block, [span.ranks for span in spans], small.scale)

        def take(group: LoopbackGroup, kind: str, target: Tensor) -> Work:
            span = spans[places[group]]
            if kind == "gather":
                return span.gather(sizes.gathered(target), gpu.latency_ms)
            return span.exchange(sizes.exchanged(target, places[group]), gpu.latency_ms)

        return take

    options: dict[str, Any] = {**exchange.options, "mixed_precision_policy": policy}
    return record(layers, [span.ranks for span in spans], machine, transfers, **options)


class _Sizes:
    """Bytes that buffers stand for, headers and padding of messages as they are for a block."""

    def __init__(self, spec: UnitSpec, sizes: Sequence[int], scale: float) -> None:
        def large(numel: int) -> int:
            return round(numel * scale / PART_NUMEL) * PART_NUMEL

        self._scale = self._message_scale = scale
        shard, wire = spec.layout.shard_numel, spec.param_wire
        if wire is not None:
            self._message_scale = message_bytes(wire, large(shard)) / message_bytes(wire, shard)
        parts = [spec.layout.numel // math.prod(sizes[: place + 1]) for place in range(len(sizes))]
        wires = [spec.wires[min(place, 1)] for place in range(len(sizes))]
        self._wire_scales = [
            wire.part_numel(large(part)) / wire.part_numel(part)
            for wire, part in zip(wires, parts, strict=True)
        ]

    def gathered(self, target: Tensor) -> float:
        """Of a gather into `target`."""
        is_message = target.dtype == torch.uint8
        return target.nbytes * (self._message_scale if is_message else self._scale)

    def exchanged(self, target: Tensor, place: int) -> float:
        """Of an exchange into `target` along the axis at `place`."""
        return target.nbytes * self._wire_scales[place]
