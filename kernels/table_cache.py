"""Tables on their devices, how they get there, and their cache.

    up to 128 entries    as arguments of a kernel that writes them: no memory of the host is kept,
                         and a CUDA graph has them in its launch
    more                 by a copy from pinned memory

Gradients mostly come back at the addresses of the step before, so tables stay on the device and are
found again by their contents.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from .device_tables import fit_arguments, write_table
from .launch import device_guard, is_capturing
from .tables import TileTable, tensor_table

CACHED_NUMEL = 4 * 1024 * 1024  # 32 MiB of tables on all devices together
LEAST_NUMEL = 64  # that a table counts as: torch's allocator gives 512 bytes or more
STAGED_NUMEL = 512 * 1024  # 4 MiB of pinned memory for the tables of all CUDA graphs together

# A tuple of keys and the size of a tile -> their table on the CPU.
TableOf = Callable[[Any, int], TileTable]


class TableCache:
    """Tables by their contents, the least recently used dropped first.

    A table is made on the current stream and found again only there, so no other stream can read it
    before its copy has arrived. The key holds addresses, sizes and offsets: memory that moved makes
    another key, and memory that came back to an address makes the same table.

    While a CUDA graph is captured nothing runs, but every replay reads the table. So one that is
    there is kept for good, whatever stream it was made on: it was copied before the capture began,
    and who captures waits for what came before. Else the launch that writes it becomes a part of
    the graph, or the copy, from pinned memory that is never used again; only that graph has it.
    """

    def __init__(self, max_numel: int = CACHED_NUMEL, table_of: TableOf = tensor_table) -> None:
        self._max_numel = max_numel
        self._table_of = table_of
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
            table = _on_device(self._table_of(keys, tile_size), device, captured=False)
            self._tables[identity] = table
            self._numel += _counted(table)
            while self._numel > self._max_numel and len(self._tables) > 1:
                _, dropped = self._tables.popitem(last=False)
                self._numel -= _counted(dropped)
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
            table = _on_device(self._table_of(keys, tile_size), device, captured=True)
        self._captured.append(table)
        return table


def _counted(table: TileTable) -> int:
    return max(table.entries.numel(), LEAST_NUMEL)


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


def _on_device(table: TileTable, device: torch.device, *, captured: bool) -> TileTable:
    if not captured and device.type != "cuda":
        return table
    source = table.entries
    entries = torch.empty_like(source, device=device)
    numbers = source.tolist()
    if fit_arguments(numbers):
        write_table(entries, numbers)
    elif captured:
        entries.copy_(_staging.place(source), non_blocking=True)
    else:
        _staging.reserve()  # pinned memory cannot be had while a graph is captured
        # This may be freed at once: its allocator waits for the copy before reusing it.
        entries.copy_(source.pin_memory(), non_blocking=True)
    return dataclasses.replace(table, entries=entries)
