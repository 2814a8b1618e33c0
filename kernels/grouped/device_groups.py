"""Which group a tile belongs to, inside Triton kernels: no host knows where groups end.

So many programs are launched as may be needed. Each reads all ends, checks them and counts the
tiles of groups before its own. The tiles that are left over have the rows of no group.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl


def lanes_for(ends: torch.Tensor) -> int:
    """Lanes that read the ends."""
    return triton.next_power_of_2(ends.numel())


@triton.jit
def group_of(
    ends, num_groups, rows, tile, row_size, TILE: tl.constexpr, GROUPS: tl.constexpr
) -> tuple:
    """(group, its first row, its rows, the tile in it, whether the ends are valid) of a tile.

    A row has `row_size` units, int64, and each group as many tiles of TILE units as it needs.
    Group `num_groups` are the rows of none, which are all where the ends are not valid.

    Example, TILE 4, rows of one unit, ends [5, 5, 7] of 8 rows: groups have 2, 0 and 1 tiles. Tile
    1 is the second of group 0, tile 2 the first of group 2, which begins at row 5; 3 has row 7.
    """
    lanes = tl.arange(0, GROUPS)
    is_group = lanes < num_groups
    end = tl.load(ends + lanes, mask=is_group, other=0).to(tl.int64)
    start = tl.load(ends + lanes - 1, mask=is_group & (lanes > 0), other=0).to(tl.int64)
    is_wrong = is_group & ((end < start) | (end > rows))
    is_valid = tl.max(is_wrong.to(tl.int32), 0) == 0
    count = tl.where(is_group & is_valid, end - start, 0)
    tiles = ((count * row_size + (TILE - 1)) // TILE).to(tl.int32)
    behind = tl.cumsum(tiles, 0)
    is_before = is_group & (behind <= tile)
    group = tl.sum(is_before.to(tl.int32), 0)
    first_tile = tl.max(tl.where(is_before, behind, 0), 0)
    first = tl.load(ends + group - 1, mask=is_valid & (group > 0), other=0).to(tl.int64)
    last = tl.load(ends + group, mask=group < num_groups, other=0).to(tl.int64)
    last = tl.where(group < num_groups, last, rows)
    return group, first, last - first, tile - first_tile, is_valid
