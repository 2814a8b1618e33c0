"""Tests of flat layouts: alignment, slices, intervals, for any shapes and world size."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.buffers import FlatLayout, Grid, Placement, Span, flat_layout
from sidestream.buffers.layout import reverse_buckets
from sidestream.kernels import ALIGN_NUMEL

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)
WORLDS = st.integers(1, 9)


def shard_of(layout: FlatLayout, rank: int) -> Span:
    """What `rank` owns where all ranks are along one axis."""
    return Grid((layout.world_size,), (rank,)).span(layout.numel, (Placement.SHARD,))


@settings(deadline=None)
@given(SHAPES, WORLDS)
def test_every_element_of_every_tensor_has_one_owner(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    layout = flat_layout(shapes, world_size)
    for index, shape in enumerate(shapes):
        cuts = [layout.overlap(index, shard_of(layout, rank)) for rank in range(world_size)]
        owned = [element for start, stop in cuts for element in range(start, stop)]
        assert owned == list(range(math.prod(shape)))


@settings(deadline=None)
@given(SHAPES, WORLDS)
def test_blocks_straddle_neither_tensors_nor_ranks(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    layout = flat_layout(shapes, world_size)
    owner = [None] * (layout.numel // ALIGN_NUMEL)
    for index, segment in enumerate(layout.segments):
        for block in range(segment.start // ALIGN_NUMEL, -(-segment.stop // ALIGN_NUMEL)):
            if segment.numel:
                assert owner[block] is None
                owner[block] = index
    for rank in range(world_size):
        start, stop = shard_of(layout, rank)
        assert start % ALIGN_NUMEL == 0 and stop - start == layout.shard_numel
    assert shard_of(layout, world_size - 1)[1] == layout.numel


@settings(deadline=None)
@given(SHAPES, WORLDS)
def test_padding_is_less_than_a_block_per_tensor_and_rank(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    layout = flat_layout(shapes, world_size)
    assert 0 <= layout.padding_numel < max(1, ALIGN_NUMEL * (len(shapes) + world_size))


@settings(deadline=None)
@given(SHAPES, WORLDS)
def test_gaps_are_just_what_no_tensor_covers(shapes: list[tuple[int, ...]], world: int) -> None:
    layout = flat_layout(shapes, world)
    gaps = layout.gaps()
    assert sum(stop - start for start, stop in gaps) == layout.padding_numel
    covered = [(segment.start, segment.stop) for segment in layout.segments if segment.numel]
    for (_, stop), (start, _) in itertools.pairwise(sorted(gaps + covered)):
        assert stop == start


def test_a_gap_of_one_element_is_one() -> None:
    assert flat_layout([(1, 127), (1,)], 1).gaps() == [(127, 128), (129, 256)]
    assert flat_layout([(127,)], 1).gaps() == [(127, 128)]
    assert flat_layout([(129,)], 2).gaps() == [(129, 256)]
    assert flat_layout([(128,)], 1).gaps() == []


def test_padding_of_a_real_block_is_under_one_percent() -> None:
    width = 512
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] + [
        (width,)
    ] * 6
    for world_size in (2, 3, 7, 64):
        layout = flat_layout(block, world_size)
        assert layout.padding_numel <= 0.01 * layout.numel


def test_matrices_come_before_vectors_and_scalars() -> None:
    layout = flat_layout([(5,), (3, 4), (), (2, 2, 2)], 2)
    assert layout.order == (1, 3, 0, 2)
    assert [segment.start for segment in layout.segments] == [256, 0, 384, 128]


def test_more_ranks_than_elements_leaves_ranks_with_padding_alone() -> None:
    layout = flat_layout([(3,)], 4)
    assert [layout.overlap(0, shard_of(layout, rank)) for rank in range(4)] == [
        (0, 3),
        (3, 3),
        (3, 3),
        (3, 3),
    ]
    assert layout.shard_numel == ALIGN_NUMEL


def test_nothing_to_lay_out() -> None:
    assert flat_layout([], 3).numel == 0
    assert flat_layout([(0, 4)], 3).numel == 0


@pytest.mark.parametrize(
    ("shapes", "world_size"), [([(2,)], 0), ([(-1,)], 1)], ids=["world 0", "size -1"]
)
def test_refuses(shapes: list[tuple[int, ...]], world_size: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        flat_layout(shapes, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8], ids="{} ranks".format)
def test_whole_length_is_a_multiple_of_what_is_asked_for(world_size):
    shapes = [(300, 7), (5,)]
    plain, padded = (flat_layout(shapes, world_size, whole_numel=n) for n in (1, 2**16))
    assert padded.numel % 2**16 == 0 and padded.shard_numel % 128 == 0
    assert padded.numel - plain.numel < 2**16 * world_size
    assert padded.segments == plain.segments
    assert flat_layout(shapes, world_size) == plain


def test_buckets_from_the_last_tensor_to_the_first():
    assert reverse_buckets([5, 5, 5, 5], 10) == [[3, 2], [1, 0]]
    assert reverse_buckets([5, 5, 5, 5], 11) == [[3, 2, 1], [0]]
    assert reverse_buckets([5, 5, 5], None) == [[2, 1, 0]]
    assert reverse_buckets([], 3) == []
    # A start that is rounded up counts.
    assert reverse_buckets([1, 1, 1], 65, align_numel=64) == [[2, 1], [0]]
    assert reverse_buckets([9, 1, 1], 100, apart={0}) == [[2, 1], [0]]
    assert reverse_buckets([1, 1, 9], 100, apart={2}) == [[2], [1, 0]]
