"""Tile tables: every element in exactly one tile, alignment told right, a cache that is bounded."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.kernels import tables

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
    entries, num_tiles = tables.table_entries(keys, TILE_BYTES)
    rows = entries[: -num_tiles or None].view(len(keys), tables.ROW_FIELDS).tolist()
    covered = {index: [] for index in filled}
    for program, row_index in enumerate(entries[-num_tiles:].tolist()):
        row, index = rows[row_index], filled[row_index]
        block = TILE_BYTES // tensors[index].element_size()
        start = (program - row[tables.FIRST_TILE]) * block
        covered[index] += range(start, min(start + block, row[tables.NUMEL]))
        assert row[tables.ADDRESS] == tensors[index].data_ptr()
        assert row[tables.OFFSET] == offsets[index]
        assert tables.CODED_DTYPES[row[tables.DTYPE]] == tensors[index].dtype
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


def _keys(count, address=0):
    return tuple((address + 16 * i, 4, 4 * i, 0, True) for i in range(count))


def test_cache_returns_the_same_table_and_drops_the_oldest():
    cache = tables.TableCache(max_numel=40)
    device = torch.device("cpu")
    first = cache.get(_keys(2), TILE_BYTES, device)
    second = cache.get(_keys(2, address=1024), TILE_BYTES, device)
    assert first.entries.numel() == 14
    assert cache.get(_keys(2), TILE_BYTES, device) is first
    assert cache.get(_keys(2), 2 * TILE_BYTES, device) is not first
    assert len(cache) == 2  # 3 * 14 > 40: the second, used longest ago, had to go
    assert cache.get(_keys(2), TILE_BYTES, device) is first
    assert cache.get(_keys(2, address=1024), TILE_BYTES, device) is not second


def test_cache_keeps_a_table_larger_than_itself():
    cache = tables.TableCache(max_numel=1)
    table = cache.get(_keys(2), TILE_BYTES, torch.device("cpu"))
    assert cache.get(_keys(2), TILE_BYTES, torch.device("cpu")) is table
    assert len(cache) == 1
