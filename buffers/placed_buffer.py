"""A flat buffer on a grid of ranks: what one rank holds of it along each axis, and the way from one
placement to another.

The buffer is cut into as many equal slices as the grid has ranks. The first axis cuts the whole,
each further one what the axes before it have cut::

    grid (2, 2), slice            0        1        2        3
    coordinate                  (0, 0)   (0, 1)   (1, 0)   (1, 1)
    rank (1, 0) holds
      (shard, shard)                              2
      (shard, replicate)                          2        3
      (replicate, replicate)      0        1      2        3

So what a rank holds is one stretch, as long as no axis that replicates comes before one that
shards. Ranks move it along one axis at a time:

    from -> to             movement
    partial -> shard       sum, the first axis first: each leaves a part of the part before
    shard -> replicate     gather, the last axis first: parts grow together
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from .layout import FlatLayout
from .pool import BufferPool

Span = tuple[int, int]
"""[start, stop) in elements of a whole flat buffer."""


class Placement(Enum):
    """What the ranks along one axis hold of a flat buffer."""

    REPLICATE = "replicate"
    """Each has all of it."""
    SHARD = "shard"
    """Each has one of as many equal parts as there are ranks."""
    PARTIAL = "partial"
    """Each has a summand of all of it."""


Placements = tuple[Placement, ...]
"""A placement per axis."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks along each axis, and where this one is."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.coordinate)
        places = zip(self.coordinate, self.sizes, strict=True)
        assert all(0 <= place < size for place, size in places)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.sizes)

    def span(self, numel: int, placements: Placements) -> Span:
        """What this rank holds of a buffer of `numel` elements, a multiple of `world_size`."""
        start, length, is_cut = 0, numel, True
        for size, place, placement in zip(self.sizes, self.coordinate, placements, strict=True):
            if placement is Placement.SHARD:
                assert is_cut or size == 1, "an axis that replicates comes before one that shards"
                length //= size
                start += place * length
            elif size > 1:
                is_cut = False
        return start, start + length


class Movement(Enum):
    """What ranks along an axis do with their parts."""

    SUM = "sum"
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class Hop:
    """One movement along one axis: elements [start, stop) of the whole buffer, in `parts` equal
    parts, of which this rank's is number `own`.
    """

    movement: Movement
    axis: int
    start: int
    stop: int
    parts: int
    own: int

    @property
    def part_numel(self) -> int:
        """Elements of a part."""
        return (self.stop - self.start) // self.parts

    @property
    def own_span(self) -> Span:
        """Where this rank's part lies in the whole buffer."""
        start = self.start + self.own * self.part_numel
        return start, start + self.part_numel


def redistribute(numel: int, grid: Grid, source: Placements, target: Placements) -> tuple[Hop, ...]:
    """The movements that bring a buffer of `numel` elements from placements `source` to `target`,
    in their order. Axes of one rank need none.
    """
    summed, gathered = [], []
    cut = tuple(Placement.SHARD if p is Placement.PARTIAL else p for p in source)
    for axis, (size, place) in enumerate(zip(grid.sizes, grid.coordinate, strict=True)):
        uncut = (Placement.REPLICATE,) * (len(cut) - axis)
        start, stop = grid.span(numel, cut[:axis] + uncut)
        if source[axis] is Placement.PARTIAL:
            summed.append(Hop(Movement.SUM, axis, start, stop, size, place))
        if cut[axis] is Placement.SHARD and target[axis] is Placement.REPLICATE:
            gathered.append(Hop(Movement.GATHER, axis, start, stop, size, place))
        assert cut[axis] is target[axis] or target[axis] is Placement.REPLICATE, "no such movement"
    return (*summed, *reversed(gathered))


class PlacedBuffer:
    """One rank's part of a flat buffer: `data` [numel] holds elements [start, stop) of it."""

    def __init__(
        self,
        pool: BufferPool,
        layout: FlatLayout,
        grid: Grid,
        placements: Placements,
        dtype: torch.dtype,
    ) -> None:
        """Without memory yet: see `hold`, `allocate`."""
        assert layout.world_size == grid.world_size, "the layout is for another number of ranks"
        self.layout = layout
        self.dtype = dtype
        self.placements = placements
        self.span = self.start, self.stop = grid.span(layout.numel, placements)
        self.numel = self.stop - self.start
        self.nbytes = self.numel * dtype.itemsize
        self.data: Tensor | None = None
        self._storage: torch.UntypedStorage
        self._pool = pool

    @property
    def memory(self) -> Tensor:
        """`data`, which there must be."""
        assert self.data is not None, "the buffer has no memory"
        return self.data

    def hold(self, data: Tensor) -> None:
        """Lie in `data` [numel] from now on."""
        assert data.numel() == self.numel and data.dtype == self.dtype, "data does not fit"
        self.data, self._storage = data, data.untyped_storage()

    def allocate(self) -> Tensor:
        """`data`, new memory with any contents if there is none."""
        if self.data is None:
            self.data = self._pool.allocate(self.numel, self.dtype)
        return self.data

    def forget(self) -> None:
        """Let go of what `allocate` made: it lives as long as somebody refers to it."""
        assert self.data is not None, "the buffer has no memory"
        self._pool.forget(self.data)
        self.data = None

    @property
    def is_shrunk(self) -> bool:
        """Whether its memory was freed, by `shrink`, and not given back yet."""
        return self.numel > 0 and not self._storage.nbytes()

    def shrink(self) -> None:
        """Free the memory that it holds; tensors over it are valid again after `grow`.

        Raises:
            RuntimeError: torch keeps the memory for good, as `numpy()` has it do.
        """
        self._pool.shrink(self._storage, self.nbytes)

    def grow(self) -> None:
        """Get memory again, with any contents."""
        self._pool.grow(self._storage, self.nbytes)

    def part(self, span: Span) -> Tensor:
        """Elements [start, stop) of the whole buffer, which lie in this part, as a view."""
        start, stop = span
        assert self.start <= start <= stop <= self.stop, "another rank holds them"
        assert self.data is not None, "the buffer has no memory"
        return self.data[start - self.start : stop - self.start]

    def write(self, index: int, whole: Tensor) -> None:
        """Copy what lies here of tensor `index`, which is `whole` [its shape], past the version
        counter.
        """
        first, stop = self.layout.overlap(index, self.span)
        if first < stop:
            offset = self.layout.segments[index].start - self.start
            self.memory.data[offset + first : offset + stop] = whole.reshape(-1)[first:stop]

    def parts(self, hop: Hop) -> tuple[Tensor, list[Tensor]]:
        """What `hop` moves: all of it, and each rank's part [part_numel], as views."""
        flat = self.part((hop.start, hop.stop))
        return flat, cut(flat, hop.parts)


def cut(flat: Tensor, parts: int) -> list[Tensor]:
    """`flat` in equal parts, as views."""
    numel = flat.numel() // parts
    return [flat[part * numel : (part + 1) * numel] for part in range(parts)]


def spans(
    numel: int, sizes: tuple[int, ...], coordinates: Sequence[tuple[int, ...]], held: Placements
) -> tuple[Span, ...]:
    """What every rank holds: those at `coordinates` on a grid of `sizes`."""
    return tuple(Grid(sizes, coordinate).span(numel, held) for coordinate in coordinates)
