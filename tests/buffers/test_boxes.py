"""Tests of `interval_boxes`: the boxes tile the interval once, in order, and are few."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream.buffers.boxes import Box, interval_boxes


def _flat_indices(shape: tuple[int, ...], box: Box) -> list[int]:
    """Row-major positions in `shape` of the box's elements, the slow way."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [
        range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)
    ]
    return [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*ranges)
    ]


def _assert_tiles(shape: tuple[int, ...], start: int, stop: int) -> None:
    boxes = interval_boxes(shape, start, stop)
    covered: list[int] = []
    for box in boxes:
        assert box.flat_start == len(covered)
        assert box.numel == math.prod(box.sizes) > 0
        for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
            assert 0 <= offset < offset + size <= extent, "a box that reaches out of the tensor"
        covered += _flat_indices(shape, box)
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (5,), (7, 3), (1, 9), (9, 1), (2, 2, 3), (3, 1, 2, 2), (0, 4), (4, 0), (2, 3, 2, 2)],
    ids=str,
)
def test_boxes_tile_every_interval_once_and_in_order(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            _assert_tiles(shape, start, stop)


def test_the_example_of_the_file() -> None:
    assert interval_boxes((4, 5), 3, 16) == (
        Box(offsets=(0, 3), sizes=(1, 2), flat_start=0, numel=2),
        Box(offsets=(1, 0), sizes=(2, 5), flat_start=2, numel=10),
        Box(offsets=(3, 0), sizes=(1, 1), flat_start=12, numel=1),
    )


@given(st.data())
def test_boxes_tile_random_intervals(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=5)))
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    _assert_tiles(shape, start, stop)


def test_the_bound_on_the_number_of_boxes_is_reached() -> None:
    assert len(interval_boxes((3, 3, 3), 1, 26)) == 5
    assert len(interval_boxes((7, 3), 1, 20)) == 3


def test_positions_beyond_32_bits_are_exact() -> None:
    shape = (70_000, 70_000)
    boxes = interval_boxes(shape, 1, math.prod(shape) - 1)
    assert boxes[1] == Box((1, 0), (69_998, 70_000), 69_999, 69_998 * 70_000)
    assert sum(box.numel for box in boxes) == math.prod(shape) - 2


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, 2), (0, 7), (4, 3)], ids=["before", "beyond", "reversed"]
)
def test_an_interval_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"6 elements of shape \(2, 3\)"):
        interval_boxes((2, 3), start, stop)
