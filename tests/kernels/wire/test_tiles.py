"""How messages are cut into tiles: every element in one tile, and the paths that these need."""

import bisect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.kernels import tables
from sidestream.kernels.wire import tiles
from sidestream.kernels.wire.layout import layout_of_numel

TILE = 512
FIELDS = (tables.NUMEL, tables.OFFSET, tables.FIRST_TILE, tiles.EXTENT,
          tiles.INDEX, tiles.MESSAGE_AT, tables.ADDRESS)  # fmt: skip


def table_of(pieces):
    """The rows, each as FIELDS, and the tiles as (row, tile of the row)."""
    table = tiles.piece_table(pieces, TILE)
    rows = table.entries.view(table.num_rows, tiles.ROW_FIELDS).tolist()
    rows = [[row[field] for field in FIELDS] for row in rows]
    firsts = [row[2] % 2**32 for row in rows]
    found = [bisect.bisect(firsts, tile) - 1 for tile in range(table.num_tiles)]
    return rows, [(row, tile - firsts[row]) for tile, row in enumerate(found)]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 12),
    parts=st.integers(1, 9),
    gap=st.integers(0, 9),
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    late=st.booleans(),
)
def test_tiles_have_every_element_once(groups, parts, gap, numels, late):
    layout = layout_of_numel("mxfp8", 128 * groups)
    tensors = [torch.empty(numel + late, dtype=torch.bfloat16)[int(late) :] for numel in numels]
    offsets, end = [], 128 * gap
    for numel in numels:
        offsets.append(end)
        end += -(-numel // 128) * 128
    parts = max(parts, -(-end // layout.numel))
    pieces = tiles.packed_pieces(tensors, offsets, [7 * 16] * len(numels), layout, parts)
    rows, of_tiles = table_of(pieces)
    paths = tiles.paths_of(pieces, TILE)
    covered = torch.zeros(parts * layout.numel, dtype=torch.int32)
    read = [torch.zeros(numel, dtype=torch.int32) for numel in numels]
    for at, tile in of_tiles:
        numel, offset, first, extent, index, message_at, address = rows[at]
        begin = tile * TILE
        is_full = first >> 32 and numel - begin >= TILE
        assert paths.full if is_full else paths.masked
        assert message_at % layout.num_bytes == 0
        start = message_at // layout.num_bytes * layout.numel + offset + begin
        stop = start + min(TILE, extent - begin)
        assert offset + extent <= layout.numel
        covered[start:stop] += 1
        if (count := min(numel - begin, TILE)) > 0:
            tensor = next(i for i, one in enumerate(offsets) if one <= start < one + numels[i])
            first = start - offsets[tensor]
            assert index + begin == 7 * 16 + first
            assert address + 2 * begin == tensors[tensor].data_ptr() + 2 * first
            read[tensor][first : first + count] += 1
    assert covered.eq(1).all()
    assert all(one.eq(1).all() for one in read)


@pytest.mark.parametrize(
    ("numel", "places", "expected"),
    [
        (4 * TILE, [(0, 8 * TILE)], (True, False)),  # two whole messages
        (4 * TILE, [(0, 8 * TILE - 1)], (True, True)),
        (4 * TILE, [(128, 4 * TILE)], (True, True)),  # two messages, both of less than whole tiles
        (128, [(0, 128 * 9)], (False, True)),
    ],
    ids=["whole", "tail", "late", "small"],
)
def test_paths_are_those_of_the_cuts(numel, places, expected):
    layout = layout_of_numel("mxfp8", numel)
    tensors = [torch.empty(count) for _, count in places]
    pieces = tiles.unpacked_pieces(tensors, [offset for offset, _ in places], layout)
    paths = tiles.paths_of(pieces, TILE)
    assert (paths.full, paths.masked) == expected


def test_a_key_is_no_longer_for_more_messages():
    tensor = [torch.empty(1 << 16)]
    keys = [
        tiles.packed_pieces(tensor, [0], None, layout_of_numel("mxfp8", (1 << 16) // parts), parts)
        for parts in (1, 512)
    ]
    assert len(keys[0].keys) == len(keys[1].keys) == 1
    assert hash(keys[0]) != hash(keys[1])
