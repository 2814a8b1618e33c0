"""Tile tables: every element in exactly one tile, alignment told right, a cache that is bounded."""

import weakref

import pytest
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


@pytest.fixture
def _capturing(monkeypatch):
    """A cache whose tables a graph takes; memory for its copies is there, as after any step."""
    staging = tables._Staging()
    staging.reserve()
    monkeypatch.setattr(tables, "_staging", staging)
    monkeypatch.setattr(tables, "is_capturing", lambda device: True)


@pytest.mark.usefixtures("_capturing")
def test_a_graph_s_table_is_kept_and_nobody_else_gets_it(monkeypatch):
    cache, device = tables.TableCache(), torch.device("cpu")
    first = cache.get(_keys(2), TILE_BYTES, device)
    second = cache.get(_keys(2), TILE_BYTES, device)
    assert first.entries.data_ptr() != second.entries.data_ptr()
    assert torch.equal(first.entries, tables.table_entries(_keys(2), TILE_BYTES)[0])
    assert (first.tiles_at, first.num_tiles) == (2 * tables.ROW_FIELDS, 2)
    monkeypatch.setattr(tables, "is_capturing", lambda device: False)
    eager = cache.get(_keys(2), TILE_BYTES, device)
    assert eager.entries.data_ptr() not in {first.entries.data_ptr(), second.entries.data_ptr()}
    assert len(cache) == 1


def test_a_graph_takes_a_table_that_is_there_and_it_lasts(monkeypatch):
    cache, device = tables.TableCache(max_numel=20), torch.device("cpu")
    table = cache.get(_keys(2), TILE_BYTES, device)
    reference = weakref.ref(table.entries)
    monkeypatch.setattr(tables, "is_capturing", lambda device: True)
    assert cache.get(_keys(2), TILE_BYTES, device) is table
    monkeypatch.setattr(tables, "is_capturing", lambda device: False)
    del table
    cache.get(_keys(2, address=1024), TILE_BYTES, device)
    assert len(cache) == 1  # dropped from there, as there was no room, and yet alive
    assert reference() is not None


@pytest.mark.usefixtures("_capturing")
def test_a_graph_without_room_for_its_table_is_refused(monkeypatch):
    cache, device = tables.TableCache(), torch.device("cpu")
    monkeypatch.setattr(tables, "STAGED_NUMEL", 20)
    cache.get(_keys(2), TILE_BYTES, device)
    with pytest.raises(RuntimeError, match=r"14 entries, .*make a step with these tensors before"):
        cache.get(_keys(2, address=1024), TILE_BYTES, device)
    monkeypatch.setattr(tables, "_staging", tables._Staging())
    with pytest.raises(RuntimeError, match="got 0 of 20"):
        cache.get(_keys(2), TILE_BYTES, device)
