"""The cache of tables: found again, bounded, and what a captured CUDA graph takes."""

import weakref

import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl

from sidestream.kernels import table_cache, tables
from sidestream.kernels.ahead.compile import TARGETS, compile_launch
from sidestream.kernels.device_tables import ARGUMENT_NUMEL, fit_arguments, write_table
from sidestream.kernels.launch import recorded
from sidestream.kernels.table_cache import LEAST_NUMEL, TableCache

TILE_BYTES = 64
MANY = 30  # whose table does not travel as arguments
CPU = torch.device("cpu")


def _keys(count, address=0):
    return tuple((address + 16 * i, 4, 4 * i, 0, True) for i in range(count))


def test_cache_returns_the_same_table_and_drops_the_oldest():
    cache = TableCache(max_numel=3 * LEAST_NUMEL - 1)
    first = cache.get(_keys(2), TILE_BYTES, CPU)
    second = cache.get(_keys(2, address=1024), TILE_BYTES, CPU)
    assert first.entries.numel() == 10
    assert cache.get(_keys(2), TILE_BYTES, CPU) is first
    assert cache.get(_keys(2), 2 * TILE_BYTES, CPU) is not first
    assert len(cache) == 2  # there is no room for three: the second, used longest ago, had to go
    assert cache.get(_keys(2), TILE_BYTES, CPU) is first
    assert cache.get(_keys(2, address=1024), TILE_BYTES, CPU) is not second


def test_cache_keeps_a_table_larger_than_itself():
    cache = TableCache(max_numel=1)
    table = cache.get(_keys(2), TILE_BYTES, CPU)
    assert cache.get(_keys(2), TILE_BYTES, CPU) is table
    assert len(cache) == 1


def test_units_that_take_turns_find_their_tables():
    """80 blocks of a 70B model, which no cache may be too small for, sent to each of 1024 ranks."""
    made = []

    def table_of(keys, tile_size):
        made.append(keys)
        return tables.tensor_table(keys, tile_size)

    for num_rows in (9, 9 + 1023):
        cache = TableCache(table_of=table_of)
        for _ in range(3):
            for unit in range(80):
                cache.get(_keys(num_rows, address=unit << 20), TILE_BYTES, CPU)
        assert len(made) == len(cache) == 80
        made.clear()


@pytest.fixture
def _capturing(monkeypatch):
    """A cache whose tables a graph takes; memory for its copies is there, as after any step."""
    staging = table_cache._Staging()
    staging.reserve()
    monkeypatch.setattr(table_cache, "_staging", staging)
    monkeypatch.setattr(table_cache, "is_capturing", lambda device: True)


@pytest.mark.usefixtures("_capturing")
def test_a_graph_s_table_is_kept_and_nobody_else_gets_it(monkeypatch):
    cache = TableCache()
    first = cache.get(_keys(MANY), TILE_BYTES, CPU)
    second = cache.get(_keys(MANY), TILE_BYTES, CPU)
    assert first.entries.data_ptr() != second.entries.data_ptr()
    expected = tables.tensor_table(_keys(MANY), TILE_BYTES)
    assert torch.equal(first.entries, expected.entries)
    assert (first.num_rows, first.num_tiles, first.search_steps) == (MANY, MANY, 1)
    monkeypatch.setattr(table_cache, "is_capturing", lambda device: False)
    eager = cache.get(_keys(MANY), TILE_BYTES, CPU)
    assert eager.entries.data_ptr() not in {first.entries.data_ptr(), second.entries.data_ptr()}
    assert len(cache) == 1


def test_a_graph_takes_a_table_that_is_there_and_it_lasts(monkeypatch):
    cache = TableCache(max_numel=LEAST_NUMEL)
    table = cache.get(_keys(2), TILE_BYTES, CPU)
    reference = weakref.ref(table.entries)
    monkeypatch.setattr(table_cache, "is_capturing", lambda device: True)
    assert cache.get(_keys(2), TILE_BYTES, CPU) is table
    monkeypatch.setattr(table_cache, "is_capturing", lambda device: False)
    del table
    cache.get(_keys(2, address=1024), TILE_BYTES, CPU)
    assert len(cache) == 1  # dropped from there, as there was no room, and yet alive
    assert reference() is not None


@pytest.mark.usefixtures("_capturing")
def test_a_graph_without_room_for_its_table_is_refused(monkeypatch):
    cache = TableCache()
    monkeypatch.setattr(table_cache, "STAGED_NUMEL", 200)
    cache.get(_keys(MANY), TILE_BYTES, CPU)
    with pytest.raises(RuntimeError, match=r"150 entries, .*make a step with these tensors before"):
        cache.get(_keys(MANY, address=1024), TILE_BYTES, CPU)
    monkeypatch.setattr(table_cache, "_staging", table_cache._Staging())
    with pytest.raises(RuntimeError, match="got 0 of 200"):
        cache.get(_keys(MANY), TILE_BYTES, CPU)


@pytest.mark.usefixtures("_capturing")
def test_a_graph_of_32_llama_blocks_has_room(monkeypatch):
    """Those of flat buffers in the launches' arguments, those of messages to 1024 ranks staged."""
    with recorded() as launches:
        cache = TableCache()
        for unit in range(32):
            cache.get(_keys(9, address=unit << 20), TILE_BYTES, CPU)
    assert table_cache._staging._used == 0
    assert [launch.programs for launch in launches] == [1] * 32
    cache = TableCache()  # their rows have 8 fields in place of 5
    for unit in range(32):
        cache.get(_keys(8 * (9 + 1023) // 5, address=unit << 20), TILE_BYTES, CPU)


def test_one_compilation_serves_all_small_tables():
    """Whatever their lengths, and numbers that Triton would compile anew for."""
    with recorded() as launches:
        for entries in ([1], [16, 1, 0], [1 << 57, 1 << 40, 2**31], range(ARGUMENT_NUMEL)):
            write_table(torch.empty(len(entries), dtype=torch.int64), entries)
    backend = CUDABackend(TARGETS["sm_90"])
    found = {
        native_specialize_impl(backend, launch.arguments["words"], False, True, True)
        for launch in launches
    }
    assert found == {(("i64",) * ARGUMENT_NUMEL, ("",) * ARGUMENT_NUMEL)}


@pytest.mark.usefixtures("_capturing")
@pytest.mark.parametrize("index", [2**60, -(2**60), 2**63 - 1], ids=str)
def test_numbers_too_large_for_arguments_are_copied(index):
    """As the first index of an element's noise may be."""
    assert not fit_arguments([1, index])
    cache = TableCache(table_of=lambda keys, tile_size: tables.table_of([keys], 1))
    table = cache.get((1, index, 0, 0, 0), TILE_BYTES, CPU)
    assert table.entries.tolist() == [1, index, 0, 0, 0]
    assert table_cache._staging._used == 5


@pytest.mark.parametrize("target", ["sm_80", "sm_103", "gfx942"])
def test_the_kernel_that_writes_them_compiles(target):
    with recorded() as launches:
        write_table(torch.empty(2, dtype=torch.int64), [1, 2])
    made = compile_launch(launches[0], target)
    # AMD's compiler loads all arguments first, and keeps them in lanes of vector registers.
    assert made.spill_bytes == 0 or target == "gfx942"
    assert made.registers <= 128
