"""The interpreted search for a program's row, and the kernel that writes small tables."""

import pytest
import torch
import triton
import triton.language as tl

from sidestream.kernels.device_tables import ARGUMENT_NUMEL, row_of, write_table
from sidestream.kernels.tables import FIRST_TILE, ROW_FIELDS, table_of

PROGRAMS = 24


@triton.jit
def _rows_kernel(found, table, num_rows, STEPS: tl.constexpr):
    row, tile = row_of(table, num_rows, STEPS)
    tl.store(found + 2 * tl.program_id(0), tl.load(row))
    tl.store(found + 2 * tl.program_id(0) + 1, tile)


@pytest.mark.parametrize("late", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("num_rows", [1, 9, 32, 33, 1024, 1025])
def test_programs_find_their_rows(num_rows, late):
    """Those of the first rows or of the last: numbers of tiles differ, and most rows have few."""
    counts = [1 + index % 3 for index in range(num_rows)]
    shift = sum(counts) - PROGRAMS if late else 0
    firsts = [sum(counts[:index]) - shift for index in range(num_rows)]
    rows = [[index, *[0] * (ROW_FIELDS - 1)] for index in range(num_rows)]
    for row, first in zip(rows, firsts, strict=True):
        row[FIRST_TILE] = first
    table = table_of(rows, PROGRAMS)
    found = torch.full((PROGRAMS, 2), -1)
    _rows_kernel[(PROGRAMS,)](found, table.entries, num_rows, STEPS=table.search_steps)
    expected = []
    for program in range(PROGRAMS):
        index = max(index for index, first in enumerate(firsts) if index == 0 or first <= program)
        expected.append([index, program - firsts[index]])
    assert found.tolist() == expected


def test_small_tables_are_written_from_arguments():
    numbers = [0, 1, -1, 16, 2**31, -(2**33), 2**57 + 1, 2**60 - 1, 1 - 2**60]
    memory = torch.full((ARGUMENT_NUMEL,), -7)
    write_table(memory[: len(numbers)], numbers)
    assert memory.tolist() == numbers + [-7] * (ARGUMENT_NUMEL - len(numbers))
