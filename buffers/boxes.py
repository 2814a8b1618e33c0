"""A flat interval of a tensor as boxes, the form in which checkpoints name parts of a tensor.

Elements [3, 16) of a (4, 5) tensor: the end of a row, whole rows, the start of a row::

    row 0   .  .  .  #  #    Box(offsets=(0, 3), sizes=(1, 2), flat_start=0,  numel=2)
    row 1   #  #  #  #  #    Box(offsets=(1, 0), sizes=(2, 5), flat_start=2,  numel=10)
    row 2   #  #  #  #  #
    row 3   #  .  .  .  .    Box(offsets=(3, 0), sizes=(1, 1), flat_start=12, numel=1)

All sizes and positions are in elements.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Elements [offsets, offsets + sizes) of a tensor.

    In row-major order they are elements [flat_start, flat_start + numel) of the interval that was
    cut into boxes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat_start: int
    numel: int


@functools.lru_cache(maxsize=65536)
def interval_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Cut the row-major interval [start, stop) of a `shape` tensor into at most 2 * ndim - 1 boxes.

    No box is empty; they follow each other in the interval without gaps, in ascending order. An
    empty interval has none; a 0-d tensor's one element is one box without dimensions.

    Raises:
        ValueError: the interval does not lie in the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(
            f"expected an interval within the {numel} elements of shape {tuple(shape)}, "
            f"got [{start}, {stop})"
        )
    boxes: list[Box] = []
    for offsets, sizes in _split(tuple(shape), start, stop):
        flat_start = boxes[-1].flat_start + boxes[-1].numel if boxes else 0
        boxes.append(Box(offsets, sizes, flat_start, math.prod(sizes)))
    return tuple(boxes)


def _split(
    shape: tuple[int, ...], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The (offsets, sizes) of each box."""
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    row_shape = shape[1:]
    row_numel = math.prod(row_shape)
    first_whole_row = -(-start // row_numel)
    end_of_whole_rows = stop // row_numel
    if first_whole_row > end_of_whole_rows:
        return _split_row(row_shape, end_of_whole_rows, start, stop)
    parts = _split_row(row_shape, first_whole_row - 1, start, first_whole_row * row_numel)
    if first_whole_row < end_of_whole_rows:
        offsets = (first_whole_row,) + (0,) * len(row_shape)
        parts.append((offsets, (end_of_whole_rows - first_whole_row, *row_shape)))
    parts += _split_row(row_shape, end_of_whole_rows, end_of_whole_rows * row_numel, stop)
    return parts


def _split_row(
    row_shape: tuple[int, ...], row: int, start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of [start, stop), which lies in row `row`."""
    origin = row * math.prod(row_shape)
    return [
        ((row, *offsets), (1, *sizes))
        for offsets, sizes in _split(row_shape, start - origin, stop - origin)
    ]
