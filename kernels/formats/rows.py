"""How the definitions of block formats work on the rows of a tensor [..., K], the last block short.

Conversions need some ten times an element's bytes, so rows are worked on in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_CHUNK_NUMEL = 128 * 1024


def width_of(row_numel: int, block_numel: int) -> int:
    """The length of rows to work on: whole blocks are rows of their own, so no row is too long."""
    return row_numel if row_numel % block_numel else block_numel


def pieces_of(num_rows: int, width: int) -> Iterator[slice]:
    """Rows of `width` elements that are worked on at a time."""
    step = max(1, _CHUNK_NUMEL * torch.get_num_threads() // width)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def blocks_of(rows: torch.Tensor, block_numel: int) -> torch.Tensor:
    """[r, K] -> [r, blocks, block_numel], zeros for the elements that a short block lacks."""
    missing = -rows.shape[1] % block_numel
    return torch.nn.functional.pad(rows, (0, missing)).unflatten(-1, (-1, block_numel))
