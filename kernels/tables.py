"""Tables that tell every program of a many-tensor launch what to work on.

    entries (int64)   one row a tensor: [address, numel, offset, first tile, dtype]

    program p -> row i, the last whose first tile is not above p -> tile p - first tile of row i

Addresses are bytes, offsets elements of the flat buffer. Tiles are fewer than 2**31, and above the
number of the first stands whether all is 16-byte aligned. A table is int64 throughout: it is sent
at once, and a tensor may have more than 2**31 elements. That of the nine tensors of a Llama block
has 360 bytes, whatever their sizes.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .launch import ACCESS_BYTES

ADDRESS, NUMEL, OFFSET, FIRST_TILE, DTYPE = range(5)
ROW_FIELDS = 5
CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CODES = {dtype: code for code, dtype in enumerate(CODED_DTYPES)}
_ELEMENT_BYTES = tuple(dtype.itemsize for dtype in CODED_DTYPES)

SEARCHED_ROWS = 32  # that a program looks at in one step: one a thread of a warp

# What a table is made from, per tensor: address, numel, offset, dtype code, aligned.
TensorKey = tuple[int, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class TileTable:
    """A table, how many rows it has, how many tiles its tensors have, and how rows are found.

    search_steps: of 32 rows each, in which a program finds its own. Kernels are compiled for it:
    more than 32 rows take two, more than 1024 three.
    """

    entries: Any
    num_rows: int
    num_tiles: int
    search_steps: int


def table_of(rows: Sequence[Sequence[int]], num_tiles: int) -> TileTable:
    """The table of these rows, on the CPU."""
    # torch takes 100 ns a number of a list: 2.6 ms for 1,024 rows, and 1.2.
    entries = torch.frombuffer(array("q", itertools.chain(*rows)), dtype=torch.int64)
    steps = next(count for count in itertools.count(1) if SEARCHED_ROWS**count >= len(rows))
    return TileTable(entries, len(rows), num_tiles, steps)


def tensor_keys(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int]
) -> tuple[TensorKey, ...]:
    """What the launch depends on, for every tensor that has elements."""
    flat_address, flat_bytes = flat.data_ptr(), flat.element_size()
    keys = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        numel = tensor.numel()
        if numel:
            address = tensor.data_ptr()
            aligned = (address | (flat_address + offset * flat_bytes)) % ACCESS_BYTES == 0
            keys.append((address, numel, offset, _CODES[tensor.dtype], aligned))
    return tuple(keys)


def tensor_table(keys: Sequence[TensorKey], tile_bytes: int) -> TileTable:
    """The table of tensors, on the CPU.

    A tile is `tile_bytes` of its tensor, so that programs do equal work whatever the dtype.
    """
    rows: list[tuple[int, ...]] = []
    first_tile = 0
    for address, numel, offset, code, aligned in keys:
        rows.append((address, numel, offset, first_tile_of(first_tile, aligned), code))
        first_tile += -(-numel * _ELEMENT_BYTES[code] // tile_bytes)
    return table_of(rows, first_tile)


def first_tile_of(number: int, aligned: int) -> int:
    """The field FIRST_TILE of a row."""
    return aligned << 32 | number
