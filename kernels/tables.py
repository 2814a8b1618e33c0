"""Owns the tables that tell every program of a many-tensor launch what to work on, and their cache.

    entries (int64)   one row a tensor: [address, numel, offset, first tile, dtype, aligned]
                      then one entry a tile: the tensor's index

    program p -> tensor i = entries[tiles_at + p] -> row i -> tile p - first tile of tensor i

Addresses are bytes, offsets elements of the flat buffer. A table is int64 throughout: it is sent in
one copy, and a tensor may have more than 2**31 elements. Gradients mostly come back at the
addresses of the step before, so tables stay on the device and are found again by their contents.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .launch import ACCESS_BYTES

ADDRESS, NUMEL, OFFSET, FIRST_TILE, DTYPE, ALIGNED = range(6)
ROW_FIELDS = 6
CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CODES = {dtype: code for code, dtype in enumerate(CODED_DTYPES)}
_ELEMENT_BYTES = tuple(dtype.itemsize for dtype in CODED_DTYPES)

CACHED_NUMEL = 4 * 1024 * 1024  # 32 MiB of tables on all devices together

# What a table is made from, per tensor: address, numel, offset, dtype code, aligned.
TensorKey = tuple[int, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class TileTable:
    """A table on its device: its entries, the index of the first tile entry, how many there are."""

    entries: torch.Tensor
    tiles_at: int
    num_tiles: int


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


def table_entries(keys: Sequence[TensorKey], tile_bytes: int) -> tuple[torch.Tensor, int]:
    """The entries of the table, on the CPU, and the number of tiles.

    A tile is `tile_bytes` of its tensor, so that programs do equal work whatever the dtype.
    """
    rows: list[int] = []
    tile_counts: list[int] = []
    first_tile = 0
    for address, numel, offset, code, aligned in keys:
        rows += (address, numel, offset, first_tile, code, aligned)
        tile_counts.append(-(-numel * _ELEMENT_BYTES[code] // tile_bytes))
        first_tile += tile_counts[-1]
    tiles = torch.repeat_interleave(torch.tensor(tile_counts), output_size=first_tile)
    return torch.cat((torch.tensor(rows), tiles)), first_tile


class TableCache:
    """Tables by their contents, the least recently used dropped first.

    A table is made on the current stream and found again only there, so no other stream can read it
    before its copy has arrived. The key holds addresses, sizes and offsets: memory that moved makes
    another key, and memory that came back to an address makes the same table.
    """

    def __init__(self, max_numel: int = CACHED_NUMEL) -> None:
        self._max_numel = max_numel
        self._numel = 0
        self._tables: OrderedDict[tuple, TileTable] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, keys: tuple[TensorKey, ...], tile_bytes: int, device: torch.device) -> TileTable:
        """The table for `keys`, at least one, made if it is not there."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        identity = (device, stream, tile_bytes, keys)
        with self._lock:
            table = self._tables.get(identity)
            if table is not None:
                self._tables.move_to_end(identity)
                return table
            table = _on_device(keys, tile_bytes, device)
            self._tables[identity] = table
            self._numel += table.entries.numel()
            while self._numel > self._max_numel and len(self._tables) > 1:
                _, dropped = self._tables.popitem(last=False)
                self._numel -= dropped.entries.numel()
            return table

    def __len__(self) -> int:
        return len(self._tables)


def _on_device(keys: tuple[TensorKey, ...], tile_bytes: int, device: torch.device) -> TileTable:
    entries, num_tiles = table_entries(keys, tile_bytes)
    if device.type == "cuda":
        # Pinned memory may be freed at once: its allocator waits for the copy before reusing it.
        entries = entries.pin_memory().to(device, non_blocking=True)
    return TileTable(entries, len(keys) * ROW_FIELDS, num_tiles)
