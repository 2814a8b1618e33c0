"""Tile tables: every element in exactly one tile, alignment told right, a row a tensor."""

import bisect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.kernels import tables
from sidestream.kernels.inputs import LLAMA_BLOCK, offsets_of
from sidestream.kernels.wire.layout import layout_of_numel
from sidestream.kernels.wire.tiles import packed_pieces, piece_table

TILE_BYTES = 64


@settings(max_examples=60, deadline=None)
@given(
    numels=st.lists(st.integers(0, 200), max_size=8),
    codes=st.lists(st.integers(0, 2), min_size=1, max_size=3),
)
def test_tiles_cover_every_element_once(numels, codes):
    dtypes = [tables.CODED_DTYPES[codes[i % len(codes)]] for i in range(len(numels))]
    tensors = [torch.empty(n, dtype=d) for n, d in zip(numels, dtypes, strict=True)]
    offsets = [128 * index for index in range(len(tensors))]
    keys = tables.tensor_keys(torch.empty(2000), tensors, offsets)
    filled = [index for index, numel in enumerate(numels) if numel]
    assert len(keys) == len(filled)
    if not keys:
        return
    table = tables.tensor_table(keys, TILE_BYTES)
    rows = table.entries.view(len(keys), tables.ROW_FIELDS).tolist()
    firsts = [row[tables.FIRST_TILE] % 2**32 for row in rows]
    covered = {index: [] for index in filled}
    for program in range(table.num_tiles):
        place = bisect.bisect(firsts, program) - 1
        row, index = rows[place], filled[place]
        block = TILE_BYTES // tensors[index].element_size()
        start = (program - firsts[place]) * block
        covered[index] += range(start, min(start + block, row[tables.NUMEL]))
        assert row[tables.ADDRESS] == tensors[index].data_ptr()
        assert row[tables.OFFSET] == offsets[index]
        assert tables.CODED_DTYPES[row[tables.DTYPE]] == tensors[index].dtype
        assert row[tables.FIRST_TILE] >> 32 == keys[place][4]
    assert covered == {index: list(range(numels[index])) for index in filled}


def test_alignment_counts_both_sides():
    memory = torch.empty(64)
    assert memory.data_ptr() % 16 == 0
    flat = torch.empty(256, dtype=torch.bfloat16)

    def aligned(tensor, offset):
        return tables.tensor_keys(flat, [tensor], [offset])[0][4]

    assert aligned(memory[4:], 8)
    assert not aligned(memory[1:], 8)
    assert not aligned(memory, 4)


@pytest.mark.parametrize(
    ("num_rows", "steps"), [(1, 1), (32, 1), (33, 2), (1024, 2), (1025, 3)], ids=str
)
def test_a_step_finds_one_row_of_32(num_rows, steps):
    rows = [(0, 1, 0, first, 0) for first in range(num_rows)]
    assert tables.table_of(rows, num_rows).search_steps == steps


def test_the_tables_of_a_llama_block_are_small(monkeypatch):
    """Whatever the sizes of its tensors: for a flat buffer, and as messages for 8 ranks."""
    with torch.device("meta"):
        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in LLAMA_BLOCK]
        offsets, end = offsets_of(tensors)
        flat = torch.empty(end, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 1 << 40)
    keys = tables.tensor_keys(flat, tensors, offsets)
    table = tables.tensor_table(keys, 8192)
    assert table.num_tiles > 50_000
    assert table.entries.nbytes == 9 * 40
    layout = layout_of_numel("mxfp8", end // 8)
    pieces = packed_pieces(tensors, offsets, None, layout, 8)
    assert piece_table(pieces, 4096).entries.nbytes <= 1024
