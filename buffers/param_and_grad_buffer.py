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
    """Elements [start, start + layout.numel) of a buffer. `indices`: its tensors, in the order of
    `layout.segments`, the last registered first.
    """

    start: int
    indices: tuple[int, ...]
    layout: FlatLayout

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.layout.numel

    @property
    def unpadded_numel(self) -> int:
        """Elements up to the end of its last tensor."""
        return self.layout.segments[-1].stop


@dataclass(frozen=True, slots=True)
class ParamAndGradLayout:
    """The buckets of a buffer one after the other; `shapes` are its tensors', as registered."""

    shapes: tuple[tuple[int, ...], ...]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """(start, stop, bucket) of each tensor in the buffer, as registered."""
        found = {
            index: (bucket.start + segment.start, bucket.start + segment.stop, number)
            for number, bucket in enumerate(self.buckets)
            for index, segment in zip(bucket.indices, bucket.layout.segments, strict=True)
        }
        return [found[index] for index in range(len(self.shapes))]


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
    buckets: list[Bucket] = []
    for indices in reverse_buckets(numels, bucket_size, align_numel=align, apart=apart):
        layout = _bucket_layout([sizes[i] for i in indices], num_shards or 1, align, length)
        start = buckets[-1].stop if buckets else 0
        buckets.append(Bucket(start, tuple(indices), layout))
    return ParamAndGradLayout(sizes, tuple(buckets))


def _bucket_layout(
    shapes: Sequence[tuple[int, ...]], num_shards: int, align: int, length: int
) -> FlatLayout:
    segments: list[Segment] = []
    for shape in shapes:
        start = round_up(segments[-1].stop if segments else 0, align)
        segments.append(Segment(shape, start, math.prod(shape)))
    order, numel = tuple(range(len(segments))), round_up(segments[-1].stop, length) // num_shards
    return FlatLayout(tuple(segments), order, num_shards, numel, math.gcd(align, numel))


class ParamAndGradBuffer:
    """The gradients of a model on one rank, and its parameters if asked for, in buckets.

    `grad_data`, `param_data`: their memory [layout.numel]. Who drives collectives hands them
    `buckets()[bucket].data`, and `shards(bucket)[rank]` as the part of this rank. With `of_params`
    these are of the parameters, or a ValueError where there are none.
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
        self.layout = layout
        self.grad_data = torch.zeros(layout.numel, dtype=grad_dtype, device=device)
        self.param_data: Tensor | None = None
        if param_dtype is not None:
            self.param_data = torch.zeros(layout.numel, dtype=param_dtype, device=device)

    def views(self, *, of_params: bool = False) -> list[Tensor]:
        """The gradient of each tensor [its shape], as registered: views."""
        data, placed = (
            self._data(of_params),
            zip(self.layout.shapes, self.layout.places, strict=True),
        )
        return [data[start:stop].view(shape) for shape, (start, stop, _) in placed]

    def buckets(self, *, of_params: bool = False) -> list[FlatBuffer]:
        """The memory cut as the layout says: views."""
        data = self._data(of_params)
        return [FlatBuffer(data[b.start : b.stop], b.layout) for b in self.layout.buckets]

    def shards(self, bucket: int, *, of_params: bool = False) -> list[Tensor]:
        """Bucket number `bucket` in equal parts, that of rank r at r: views."""
        flat = self.buckets(of_params=of_params)[bucket]
        return cut(flat.data, flat.layout.world_size)

    def _data(self, of_params: bool) -> Tensor:
        data = self.param_data if of_params else self.grad_data
        if data is None:
            raise ValueError(
                "of_params: expected a buffer with parameters, got one of gradients alone; make it "
                "with param_dtype"
            )
        return data

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by `factor`."""
        self.grad_data.mul_(factor)

    def reset(self) -> None:
        """Set all gradients to zero."""
        self.grad_data.zero_()
