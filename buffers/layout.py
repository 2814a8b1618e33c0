"""Where each tensor of a unit lies in its flat buffer, and which slice a rank owns: pure integers.

A flat buffer holds the tensors one after the other, 2-D and larger ones first (optimizers usually
treat them alike), and is cut into `world_size` equal slices. Every tensor start and every cut is a
multiple of `ALIGN_NUMEL` elements, the largest quantisation block, or of more where scales are
shared by longer rows, so that none straddles two tensors or two ranks::

    element      0        512      640             1024      1152       1280
    tensor       | weight (16, 32) | bias (100,) pad | scale (7,) pad | pad |
    world 2      | rank 0: 0..640                  | rank 1: 640..1280      |

A cut may fall inside a row: rows are never padded. All sizes are in elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..kernels import ALIGN_NUMEL


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor's place: elements [start, start + numel) of the flat buffer hold it in row-major
    order.
    """

    shape: tuple[int, ...]
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The places of a unit's tensors (`segments`, in the caller's order) and the ranks' equal
    slices.

    `order` lists segment indices by ascending start. `shard_numel` elements belong to each rank.
    `align_numel`: what all starts and cuts are multiples of.
    """

    segments: tuple[Segment, ...]
    order: tuple[int, ...]
    world_size: int
    shard_numel: int
    align_numel: int = ALIGN_NUMEL

    def __post_init__(self) -> None:
        stop = 0
        for index in self.order:
            segment = self.segments[index]
            assert segment.start >= stop, "segments overlap"
            assert segment.start % self.align_numel == 0, "segment start is not block-aligned"
            assert segment.numel == math.prod(segment.shape), "segment numel and shape disagree"
            stop = segment.stop
        assert stop <= self.numel, "segments run past the flat buffer"
        assert self.shard_numel % self.align_numel == 0, "a rank's slice is not block-aligned"

    @property
    def numel(self) -> int:
        """Elements of the whole flat buffer, padding included."""
        return self.world_size * self.shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no tensor."""
        return self.numel - sum(segment.numel for segment in self.segments)

    def gaps(self) -> list[tuple[int, int]]:
        """The [start, stop) stretches of the flat buffer that no tensor covers, ascending."""
        gaps = []
        cursor = 0
        for index in self.order:
            segment = self.segments[index]
            if segment.start > cursor:
                gaps.append((cursor, segment.start))
            cursor = segment.stop
        if cursor < self.numel:
            gaps.append((cursor, self.numel))
        return gaps

    def overlap(self, index: int, span: tuple[int, int]) -> tuple[int, int]:
        """[start, stop) of tensor `index`, in its own elements, that lies in flat [span)."""
        segment = self.segments[index]
        start = min(max(span[0] - segment.start, 0), segment.numel)
        stop = min(max(span[1] - segment.start, 0), segment.numel)
        return start, max(start, stop)


def flat_layout(
    shapes: Sequence[Sequence[int]],
    world_size: int,
    *,
    align_numel: int = ALIGN_NUMEL,
    whole_numel: int = 1,
) -> FlatLayout:
    """Lay tensors of `shapes` out for `world_size` ranks.

    `align_numel`: what starts and cuts are multiples of, a multiple of `ALIGN_NUMEL` itself.
    `whole_numel`: what the length of the flat buffer is a multiple of. Equal arguments give one and
    the same object. Works for any world size (ranks beyond the last element own padding only), 0-d
    and empty tensors.

    Raises:
        ValueError: `world_size` is below 1 or a dimension is negative.
    """
    assert align_numel % ALIGN_NUMEL == 0, "a start would not be block-aligned"
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, got {world_size}")
    sizes = tuple(tuple(int(size) for size in shape) for shape in shapes)
    for shape in sizes:
        if any(size < 0 for size in shape):
            raise ValueError(f"shapes: expected sizes of at least 0, got {shape}")
    return _lay_out(sizes, world_size, align_numel, whole_numel)


@functools.lru_cache(maxsize=1024)
def _lay_out(
    sizes: tuple[tuple[int, ...], ...], world_size: int, align_numel: int, whole_numel: int
) -> FlatLayout:
    order = sorted(range(len(sizes)), key=lambda index: (len(sizes[index]) <= 1, index))
    starts = [0] * len(sizes)
    cursor = 0
    for index in order:
        starts[index] = cursor
        cursor = round_up(cursor + math.prod(sizes[index]), align_numel)
    segments = tuple(
        Segment(shape=shape, start=start, numel=math.prod(shape))
        for shape, start in zip(sizes, starts, strict=True)
    )
    whole = math.lcm(world_size * align_numel, whole_numel)
    shard_numel = round_up(cursor, whole) // world_size
    order.sort(key=lambda index: (starts[index], segments[index].numel, index))
    return FlatLayout(segments, tuple(order), world_size, shard_numel)


def reverse_buckets(
    numels: Sequence[int],
    least_numel: int | None,
    *,
    align_numel: int = 1,
    apart: Collection[int] = (),
) -> list[list[int]]:
    """Indices of tensors with `numels` elements in buckets, from the last tensor to the first.

    A bucket is closed once it spans `least_numel` elements (None: never), so it may have more; each
    tensor in it starts at a multiple of `align_numel`. Those in `apart` have a bucket of their own.
    No bucket is empty.
    """
    buckets: list[list[int]] = []
    stop = 0
    is_open = False
    for index in reversed(range(len(numels))):
        if not is_open or index in apart:
            buckets.append([])
            stop = 0
        buckets[-1].append(index)
        stop = round_up(stop, align_numel) + numels[index]
        is_open = index not in apart and (least_numel is None or stop < least_numel)
    return buckets
