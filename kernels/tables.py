"""Tables that tell every program of a many-tensor launch what to work on, and their cache.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .launch import ACCESS_BYTES, device_guard, is_capturing

ADDRESS, NUMEL, OFFSET, FIRST_TILE, DTYPE, ALIGNED = range(6)
ROW_FIELDS = 6
CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CODES = {dtype: code for code, dtype in enumerate(CODED_DTYPES)}
_ELEMENT_BYTES = tuple(dtype.itemsize for dtype in CODED_DTYPES)

CACHED_NUMEL = 4 * 1024 * 1024  # 32 MiB of tables on all devices together
STAGED_NUMEL = 512 * 1024  # 4 MiB of pinned memory for the tables of all CUDA graphs together

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


# A tuple of keys and the size of a tile -> entries on the CPU, tiles last, and the number of tiles.
EntriesOf = Callable[[Any, int], tuple[torch.Tensor, int]]


class TableCache:
    """Tables by their contents, the least recently used dropped first.

    A table is made on the current stream and found again only there, so no other stream can read it
    before its copy has arrived. The key holds addresses, sizes and offsets: memory that moved makes
    another key, and memory that came back to an address makes the same table.

    While a CUDA graph is captured nothing runs, but every replay reads the table. So one that is
    there is kept for good, whatever stream it was made on: it was copied before the capture began,
    and who captures waits for what came before. Else the copy becomes a part of the graph, from
    pinned memory that is never used again, and only that graph has the table.
    """

    def __init__(
        self, max_numel: int = CACHED_NUMEL, entries_of: EntriesOf = table_entries
    ) -> None:
        self._max_numel = max_numel
        self._entries_of = entries_of
        self._numel = 0
        self._tables: OrderedDict[tuple, TileTable] = OrderedDict()
        self._captured: list[TileTable] = []
        self._lock = threading.Lock()

    def get(self, keys: tuple[Any, ...], tile_size: int, device: torch.device) -> TileTable:
        """The table for `keys`, at least one, made of tiles of this size if it is not there."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        identity = (device, stream, tile_size, keys)
        with self._lock, device_guard(device):
            if is_capturing(device):
                return self._for_a_graph(keys, tile_size, device)
            table = self._tables.get(identity)
            if table is not None:
                self._tables.move_to_end(identity)
                return table
            table = _on_device(*self._entries_of(keys, tile_size), device)
            self._tables[identity] = table
            self._numel += table.entries.numel()
            while self._numel > self._max_numel and len(self._tables) > 1:
                _, dropped = self._tables.popitem(last=False)
                self._numel -= dropped.entries.numel()
            return table

    def __len__(self) -> int:
        return len(self._tables)

    def _for_a_graph(
        self, keys: tuple[Any, ...], tile_size: int, device: torch.device
    ) -> TileTable:
        """A table that lasts as long as this cache; the lock is held."""
        table = next(
            (
                there
                for (of_device, _, *rest), there in self._tables.items()
                if (of_device, *rest) == (device, tile_size, keys)
            ),
            None,
        )
        if table is None:
            table = _copied_by_a_graph(*self._entries_of(keys, tile_size), device)
        self._captured.append(table)
        return table


def _on_device(entries: torch.Tensor, num_tiles: int, device: torch.device) -> TileTable:
    if device.type == "cuda":
        # Pinned memory cannot be had while a graph is captured.
        _staging.reserve()
        # Pinned memory may be freed at once: its allocator waits for the copy before reusing it.
        entries = entries.pin_memory().to(device, non_blocking=True)
    return TileTable(entries, entries.numel() - num_tiles, num_tiles)


class _Staging:
    """Pinned memory that the copies of captured graphs read at every replay; nothing is freed."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._lock = threading.Lock()

    def reserve(self) -> None:
        """Take the memory, if it is not there."""
        with self._lock:
            if self._memory is None:
                pinned = torch.cuda.is_available()
                self._memory = torch.zeros(STAGED_NUMEL, dtype=torch.int64, pin_memory=pinned)

    def place(self, entries: torch.Tensor) -> torch.Tensor:
        """`entries` again, in memory of its own. Raises `RuntimeError` where there is none."""
        with self._lock:
            end = self._used + entries.numel()
            if self._memory is None or end > STAGED_NUMEL:
                raise RuntimeError(
                    f"CUDA graph: expected its tables of addresses, {entries.numel()} entries, "
                    f"to be there, or room for them, got {0 if self._memory is None else end} of "
                    f"{STAGED_NUMEL} entries in use; make a step with these tensors before "
                    "capturing"
                )
            staged = self._memory[self._used : end]
            self._used = end
        return staged.copy_(entries)


_staging = _Staging()


def _copied_by_a_graph(entries: torch.Tensor, num_tiles: int, device: torch.device) -> TileTable:
    table = torch.empty(entries.numel(), dtype=torch.int64, device=device)
    table.copy_(_staging.place(entries), non_blocking=True)
    return TileTable(table, entries.numel() - num_tiles, num_tiles)
