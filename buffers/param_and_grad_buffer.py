"""Gradients, and parameters, of a model in one piece of memory that is cut into buckets.

Tensors lie in reverse order of registration, as backward mostly comes to them; a bucket is closed
once it spans `bucket_size` elements. The rules are Megatron-Core's, so that a layout of theirs is a
layout of ours::

                         tensor starts    a bucket's length
    all ranks hold all   anywhere         as it comes
    divided over ranks   64               a multiple of lcm(ranks, 128), or of lcm(ranks, 128, 2^16)

Rank r of a bucket's ranks owns the r-th of its equal parts. For those who drive collectives
themselves: `fully_shard` lays its units out by `flat_layout`, at multiples of 128 elements, which
is one of the places that these rules allow. All sizes are in elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .flat_buffer import FlatBuffer
from .layout import FlatLayout, Segment, reverse_buckets, round_up
from .placed_buffer import cut

PARAM_START_NUMEL = 64
BUCKET_END_NUMEL = 128
BUS_NUMEL = 2**16
"""A bucket's length for the whole bandwidth of a bus, with `pad_for_bus_bandwidth`."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, stop) of a buffer. `indices`: its tensors, the last registered first."""

    start: int
    stop: int
    indices: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements, with those that pad it."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ParamAndGradLayout:
    """`flat`: where tensors lie, as registered. `num_shards`: over how many ranks each of `buckets`
    is divided, in equal parts; 1 where all hold all.
    """

    flat: FlatLayout
    buckets: tuple[Bucket, ...]
    num_shards: int


def param_and_grad_layout(
    shapes: Sequence[Sequence[int]],
    bucket_size: int | None = None,
    *,
    num_shards: int | None = None,
    pad_for_bus_bandwidth: bool = False,
    shared_embeddings: Collection[int] = (),
) -> ParamAndGradLayout:
    """Lay out tensors of `shapes`, in order of registration.

    Args:
        shapes: of the tensors.
        bucket_size: elements that close a bucket (None: all in one).
        num_shards: over how many ranks each bucket is divided (None: it is not).
        pad_for_bus_bandwidth: of divided buckets.
        shared_embeddings: indices of weights that the first and the last pipeline stage have: where
            buckets are divided, each has one of its own, so that both stages cut it alike.

    Raises:
        TypeError: a size or an index that is no whole number.
        ValueError: a size that is below 1, or of a shape below 0; padding of what is not divided;
            an index that no tensor has.
    """
    for name, value in (("bucket_size", bucket_size), ("num_shards", num_shards)):
        if value is not None and operator.index(value) < 1:
            raise ValueError(f"{name}: expected None or at least 1, got {value}")
    sizes = tuple(tuple(operator.index(size) for size in shape) for shape in shapes)
    if any(size < 0 for shape in sizes for size in shape):
        raise ValueError(f"shapes: expected sizes of at least 0, got {sizes}")
    if pad_for_bus_bandwidth and num_shards is None:
        raise ValueError(
            "pad_for_bus_bandwidth: expected False without num_shards, where no bucket is padded, "
            "got True; pass num_shards, or leave it out"
        )
    if not set(shared_embeddings) <= set(range(len(sizes))):
        raise ValueError(
            f"shared_embeddings: expected indices of {len(sizes)} tensors, got "
            f"{sorted(shared_embeddings)}; count them as they are registered, from 0"
        )
    align, length, apart = 1, 1, frozenset[int]()
    if num_shards is not None:
        align, apart = PARAM_START_NUMEL, frozenset(shared_embeddings)
        length = math.lcm(num_shards, BUCKET_END_NUMEL, BUS_NUMEL if pad_for_bus_bandwidth else 1)
    numels = [math.prod(shape) for shape in sizes]
    segments: dict[int, Segment] = {}
    buckets: list[Bucket] = []
    stop = 0
    for indices in reverse_buckets(numels, bucket_size, align_numel=align, apart=apart):
        start = stop
        for index in indices:
            segments[index] = Segment(sizes[index], round_up(stop, align), numels[index])
            stop = segments[index].stop
        stop = round_up(stop, length)
        buckets.append(Bucket(start, stop, tuple(indices)))
    placed = tuple(segments[index] for index in range(len(sizes)))
    flat = FlatLayout(placed, tuple(segments), 1, stop, align_numel=1)
    return ParamAndGradLayout(flat, tuple(buckets), num_shards or 1)


class ParamAndGradBuffer:
    """The gradients of a model on one rank, and its parameters if asked for, in buckets.

    `grads`, `params`: the memory with its layout; their `views()` are the tensors, as registered.
    Who drives collectives hands them `grads.data[bucket.start : bucket.stop]`, and
    `shards(number)[rank]` as the part of this rank.
    """

    def __init__(
        self,
        layout: ParamAndGradLayout,
        *,
        grad_dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Both are zero. param_dtype: None for gradients alone."""
        flats = [
            FlatBuffer(torch.zeros(layout.flat.numel, dtype=dtype, device=device), layout.flat)
            for dtype in (grad_dtype, param_dtype)
            if dtype is not None
        ]
        self.layout = layout
        self.grads, *self._params = flats

    @property
    def params(self) -> FlatBuffer:
        """That of the parameters.

        Raises:
            ValueError: there are none.
        """
        if not self._params:
            raise ValueError(
                "params: expected a buffer with parameters, got one of gradients alone; make it "
                "with param_dtype"
            )
        return self._params[0]

    def shards(self, bucket: int, *, of_params: bool = False) -> list[Tensor]:
        """Bucket number `bucket` in equal parts, that of rank r at r: views. Raises as `params`."""
        flat, where = (self.params if of_params else self.grads), self.layout.buckets[bucket]
        return cut(flat.data[where.start : where.stop], self.layout.num_shards)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by `factor`."""
        self.grads.data.mul_(factor)

    def reset(self) -> None:
        """Set all gradients to zero."""
        self.grads.data.zero_()
