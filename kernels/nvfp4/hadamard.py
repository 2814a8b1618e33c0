"""The random Hadamard transform on the GPU, and how the kernels that make it cut tensors.

Formula, order of additions and rounding are those of `reference`. Bytes moved: twice those of an
element. Blocks come as halves of eight elements: then a thread has a block's elements, and none of
them is found twice. Tiles that are full and 16-byte aligned take the unmasked path, 16 bytes an
access; the tail, and rows whose length is no multiple of 16, take the masked one. A block is
stored after all of it was loaded, and one program has it, so the result may replace the source.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..formats.table import wire_format_of
from ..launch import LaunchConfig, is_aligned, launch
from ..portable import covered, round_to, to_fp32
from ..tuned import config_for
from ..wide import aligned_eights, wide_lanes
from .reference import BLOCK_NUMEL, NORM, SIGNS

_NORM = tl.constexpr(NORM)
_NEGATIVE = tl.constexpr(sum(1 << lane for lane, sign in enumerate(SIGNS) if sign < 0))
TILE_NUMEL = 4096
NUM_WARPS = 4


@triton.jit
def _stage(x, BLOCKS: tl.constexpr):
    """(a + b, a - b) of neighbours; then the lowest bit of an element's place becomes the highest.

    So three stages are the strides 1, 2 and 4, and leave every element in its place.
    """
    low, high = tl.split(tl.reshape(x, [BLOCKS, 4, 2]))
    pairs = tl.join(low + high, low - high)
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), [BLOCKS, 8])


@triton.jit
def stages_of_eight(x) -> tl.tensor:
    """The strides 1, 2 and 4 of FP32 [n, 8]."""
    for _ in tl.static_range(3):
        x = _stage(x, x.shape[0])
    return x


@triton.jit
def sign_factors(lanes) -> tl.tensor:
    """What the elements `lanes` of a block are multiplied by: of their shape."""
    # A constant shifted by a tensor stays a constant in the interpreter of Triton 3.7.
    signs = tl.zeros_like(lanes) + _NEGATIVE
    return tl.where(((signs >> lanes) & 1) != 0, -_NORM, _NORM)


@triton.jit
def _transformed(low, high, INVERSE: tl.constexpr):
    """`reference.hadamard16_` of FP32 blocks, not yet rounded.

    low, high: [blocks, 8], elements 0 to 7 and 8 to 15 of each. So eight elements lie in one
    thread, and no stage has to move them to another: 29 instructions an element for a fused NVFP4
    cast of BF16, 50 with whole blocks.
    """
    lanes = tl.arange(0, 8)
    if not INVERSE:
        low, high = low * sign_factors(lanes)[None, :], high * sign_factors(lanes + 8)[None, :]
    low, high = stages_of_eight(low), stages_of_eight(high)
    low, high = low + high, low - high
    if INVERSE:
        low, high = low * sign_factors(lanes)[None, :], high * sign_factors(lanes + 8)[None, :]
    return low, high


@triton.jit
def full_halves(
    source, HADAMARD: tl.constexpr, INVERSE: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """TILE elements from aligned memory on, in FP32, as halves of blocks, [TILE / 16, 8] each.

    HADAMARD: transformed, and rounded to the dtype they came in.
    """
    places = tl.arange(0, TILE // 16) * 16
    low, high = aligned_eights(source, places), aligned_eights(source, places + 8)
    if HADAMARD:
        dtype: tl.constexpr = source.dtype.element_ty
        low, high = _transformed(low, high, INVERSE)
        low, high = to_fp32(round_to(low, dtype)), to_fp32(round_to(high, dtype))
    return low, high


@triton.jit
def masked_halves(
    source, blocks, cut, HADAMARD: tl.constexpr, INVERSE: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """(`full_halves` of these blocks, 0 where no element is; where low ones are; their columns).

    blocks: int64 [n]; those from `num_blocks` on are not there. Rows have `row_blocks` each, of
    which the last may be short, and then is not transformed. cut: as `Cut` begins.
    """
    num_blocks, row_blocks, row_numel = cut
    columns = (blocks % row_blocks)[:, None] * 16 + tl.arange(0, 8)[None, :]
    columns = tl.where((blocks < num_blocks)[:, None], columns, row_numel)
    places = (blocks // row_blocks)[:, None] * row_numel + columns
    low = to_fp32(tl.load(source + places, mask=columns < row_numel, other=0.0))
    high = to_fp32(tl.load(source + places + 8, mask=columns + 8 < row_numel, other=0.0))
    if HADAMARD:
        dtype: tl.constexpr = source.dtype.element_ty
        made_low, made_high = _transformed(low, high, INVERSE)
        is_whole = columns // 16 * 16 + 16 <= row_numel
        low = tl.where(is_whole, to_fp32(round_to(made_low, dtype)), low)
        high = tl.where(is_whole, to_fp32(round_to(made_high, dtype)), high)
    return low, high, places, columns


@triton.jit
def joined(low, high) -> tl.tensor:
    """Halves [blocks, n] -> [blocks * 2 * n], those of a block one after the other."""
    pairs = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(pairs, [2 * low.shape[0] * low.shape[1]])


@triton.jit(
    do_not_specialize=["num_blocks", "row_blocks", "row_numel"],
    do_not_specialize_on_alignment=["source", "destination"],
)
def _hadamard_kernel(
    source,
    destination,
    num_blocks,
    row_blocks,
    row_numel,
    INVERSE: tl.constexpr,
    FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE / 16 blocks of rows that have `row_blocks` each.

    Example: rows of 20 elements have 2 blocks, so block 5 is the second of row 2: elements 56 to
    59, which are fewer than 16 and so copied.
    """
    BLOCKS: tl.constexpr = TILE // 16
    dtype: tl.constexpr = destination.dtype.element_ty
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    start = first_block * 16
    cut = (num_blocks, row_blocks, row_numel)
    if FLAT and start + TILE <= row_numel:
        low, high = full_halves(source + start, True, INVERSE, TILE)
        made = joined(round_to(low, dtype), round_to(high, dtype))
        tl.store(tl.multiple_of(destination + start + wide_lanes(TILE), 16), made)
    else:
        # In four pieces, whose other shape keeps the compiler from giving both paths one layout.
        for first in range(0, covered(num_blocks - first_block, BLOCKS), BLOCKS // 4):
            blocks = first_block + first + tl.arange(0, BLOCKS // 4)
            low, high, places, columns = masked_halves(source, blocks, cut, True, INVERSE)
            tl.store(destination + places, round_to(low, dtype), mask=columns < row_numel)
            mask = columns + 8 < row_numel
            tl.store(destination + places + 8, round_to(high, dtype), mask=mask)


@dataclass(frozen=True, slots=True)
class Cut:
    """How the elements of a contiguous tensor [..., K] fall into rows, blocks and tiles."""

    num_blocks: int
    row_blocks: int
    row_numel: int
    num_tiles: int
    is_flat: bool


def cut_of(x: torch.Tensor, tile_numel: int) -> Cut:
    """How programs of `tile_numel` elements share `x`; one row where that makes the same blocks."""
    rows, row_numel = x.shape[:-1].numel(), x.shape[-1]
    if x.numel() == 0 or row_numel % BLOCK_NUMEL == 0:
        rows, row_numel = 1, x.numel()
    row_blocks = triton.cdiv(row_numel, BLOCK_NUMEL)
    num_blocks = rows * row_blocks
    num_tiles = triton.cdiv(num_blocks, tile_numel // BLOCK_NUMEL)
    return Cut(num_blocks, row_blocks, row_numel, num_tiles, rows == 1)


@functools.cache
def default_config(element_bytes: int) -> LaunchConfig:
    """The block is of the source."""
    return LaunchConfig(TILE_NUMEL * element_bytes, NUM_WARPS)


def hadamard16_(out: torch.Tensor, x: torch.Tensor, inverse: bool = False) -> None:
    """`reference.hadamard16_` in one launch."""
    default = default_config(x.element_size())
    config = config_for("hadamard16_", wire_format_of(x.dtype).name, default, x.device)
    tile = config.block_bytes // x.element_size()
    cut = cut_of(x, tile)
    if cut.num_blocks:
        launch(
            _hadamard_kernel,
            cut.num_tiles,
            x,
            out,
            cut.num_blocks,
            cut.row_blocks,
            cut.row_numel,
            on=x,
            num_warps=config.num_warps,
            INVERSE=inverse,
            FLAT=cut.is_flat and is_aligned(x, out),
            TILE=tile,
        )
