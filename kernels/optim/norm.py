"""L2 norms on the GPU: any number of tensors of any number of norms, in two launches.

Formula, limbs and bits are those of `norm_reference`. Bytes moved: those of the elements, twice.

    _largest_kernel   the largest magnitude of each norm, as bits: an atomic maximum a program
    _squares_kernel   the block sums of each norm, as limbs: two atomic sums a program

Maxima and sums of integers have no order, so no bit depends on launch configurations. Of 8 rows of
16 elements a thread has all that are 16 apart in a block: the halving stays inside the threads down
to 16 elements, which FP32 has in four neighbours and half precision in two.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import tables
from ..formats.table import wire_format_of
from ..launch import ACCESS_BYTES, LaunchConfig, launch
from ..portable import covered, quotient, quotient_terms, to_fp32
from ..tuned import config_for
from ..wide import wide_lanes
from .norm_reference import (
    BLOCK_NUMEL,
    HIGH_SCALE,
    INFINITY_BITS,
    LOW_SCALE,
    NAN_BITS,
    Quantities,
    fill_norm_,
)

TILE_BYTES = 64 * 1024
NUM_WARPS = 8

_ADDRESS, _NUMEL = tl.constexpr(tables.ADDRESS), tl.constexpr(tables.NUMEL)
_NORM, _FIRST_TILE = tl.constexpr(tables.OFFSET), tl.constexpr(tables.FIRST_TILE)
_DTYPE, _ALIGNED = tl.constexpr(tables.DTYPE), tl.constexpr(tables.ALIGNED)
_ROW_FIELDS = tl.constexpr(tables.ROW_FIELDS)
_FP32, _BF16, _FP16 = (
    tl.constexpr(tables.CODED_DTYPES.index(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)
_INFINITY, _NAN = tl.constexpr(INFINITY_BITS), tl.constexpr(NAN_BITS)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_BLOCK, _PIECE = tl.constexpr(BLOCK_NUMEL), tl.constexpr(16)
_HIGH_SCALE, _LOW_SCALE = tl.constexpr(HIGH_SCALE), tl.constexpr(LOW_SCALE)

_tables = tables.TableCache()


@triton.jit
def _tile_of(table, tiles_at) -> tuple:
    """(row of the tensor, its elements' address, their number, this program's tile of them).

    Example with tiles of 16 bytes: FP32 tensors of 6 and 3 elements make the rows [.., 6, 0, 0,
    ..] and [.., 3, 0, 2, ..] and the tiles [0, 0, 1]. Program 1 has tile 1 - 0 of tensor 0.
    """
    # A tensor may have more than 2**31 elements, so all that counts elements is int64.
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(table + tiles_at + program) * _ROW_FIELDS
    tile = program - tl.load(row + _FIRST_TILE)
    return row, tl.load(row + _ADDRESS), tl.load(row + _NUMEL), tile


@triton.jit
def _magnitudes(loaded) -> tl.tensor:
    """|x| as bits: NaN and infinity are largest."""
    return to_fp32(loaded).to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _full_largest(source, NUMEL: tl.constexpr) -> tl.tensor:
    """The source is 16-byte aligned, which a loaded address does not show: hence the hint."""
    loaded = tl.load(tl.multiple_of(source + wide_lanes(NUMEL), 16))
    return tl.max(_magnitudes(loaded), axis=0)


@triton.jit
def _masked_largest(source, count, NUMEL: tl.constexpr) -> tl.tensor:
    """In four pieces, whose other shape keeps the compiler from giving both paths one layout."""
    largest = tl.zeros((NUMEL // 4,), tl.int32)
    for first in range(0, covered(count, NUMEL), NUMEL // 4):
        lanes = first + tl.arange(0, NUMEL // 4)
        loaded = tl.load(source + lanes, mask=lanes < count, other=0.0)
        largest = tl.maximum(largest, _magnitudes(loaded))
    return tl.max(largest, axis=0)


@triton.jit
def _largest_of(source, tile, numel, aligned, NUMEL: tl.constexpr) -> tl.tensor:
    source += tile * NUMEL
    count = numel - tile * NUMEL
    if aligned != 0 and count >= NUMEL:
        largest = _full_largest(source, NUMEL)
    else:
        largest = _masked_largest(source, count, NUMEL)
    return largest


@triton.jit(do_not_specialize=["tiles_at"], do_not_specialize_on_alignment=["table", "largest"])
def _largest_kernel(table, tiles_at, largest, TILE_BYTES: tl.constexpr):
    """largest[norm] = max(.., the tile's largest magnitude), int32."""
    row, address, numel, tile = _tile_of(table, tiles_at)
    dtype = tl.load(row + _DTYPE)
    aligned = tl.load(row + _ALIGNED)
    WIDE: tl.constexpr = TILE_BYTES // 4
    HALF: tl.constexpr = TILE_BYTES // 2
    bits = 0
    if dtype == _FP32:
        bits = _largest_of(address.to(tl.pointer_type(tl.float32)), tile, numel, aligned, WIDE)
    elif dtype == _BF16:
        bits = _largest_of(address.to(tl.pointer_type(tl.bfloat16)), tile, numel, aligned, HALF)
    elif dtype == _FP16:
        bits = _largest_of(address.to(tl.pointer_type(tl.float16)), tile, numel, aligned, HALF)
    tl.atomic_max(largest + tl.load(row + _NORM), tl.minimum(bits, _NAN), sem="relaxed")


@triton.jit
def _squares(loaded, terms) -> tl.tensor:
    x = quotient(to_fp32(loaded), terms)
    return x * x


@triton.jit
def _aligned_squares(source, places, PART: tl.constexpr, terms) -> tl.tensor:
    # The hint must sit on the sum it is about.
    pointers = tl.multiple_of(source + (places + PART * _PIECE), [1, 16])
    return _squares(tl.load(pointers), terms)


@triton.jit
def _masked_squares(source, places, count, PART: tl.constexpr, terms) -> tl.tensor:
    places += PART * _PIECE
    return _squares(tl.load(source + places, mask=places < count, other=0.0), terms)


@triton.jit
def _limbs_of(pieces) -> tuple:
    """(sum of high limbs, of low ones), int64, from [n, 16]: blocks halved as far as that."""
    BLOCKS: tl.constexpr = pieces.shape[0]
    for _ in tl.static_range(4):
        halves = tl.reshape(pieces, (BLOCKS, 2, pieces.shape[1] // 2))
        pieces = tl.sum(halves, axis=1)
    scaled = tl.reshape(pieces, (BLOCKS,)) * _HIGH_SCALE
    high = tl.floor(scaled)
    low = (scaled - high) * _LOW_SCALE
    return tl.sum(high.to(tl.int64), axis=0), tl.sum(low.to(tl.int64), axis=0)


@triton.jit
def _places(BLOCKS: tl.constexpr) -> tl.tensor:
    """Where the first 16 elements of each block lie, [n, 16]."""
    return (wide_lanes(BLOCKS) * _BLOCK)[:, None] + wide_lanes(_PIECE)[None, :]


@triton.jit
def _full_sums(p, terms, BLOCKS: tl.constexpr) -> tuple:
    """`p`, where the elements are, is 16-byte aligned."""
    at = _places(BLOCKS)
    a = _aligned_squares(p, at, 0, terms) + _aligned_squares(p, at, 4, terms)
    b = _aligned_squares(p, at, 1, terms) + _aligned_squares(p, at, 5, terms)
    c = _aligned_squares(p, at, 2, terms) + _aligned_squares(p, at, 6, terms)
    d = _aligned_squares(p, at, 3, terms) + _aligned_squares(p, at, 7, terms)
    return _limbs_of((a + c) + (b + d))


@triton.jit
def _masked_sums(p, count, terms, BLOCKS: tl.constexpr) -> tuple:
    """In four pieces, whose other shape keeps the compiler from giving both paths one layout."""
    high, low = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    PART: tl.constexpr = BLOCKS // 4
    for first in range(0, covered(count, BLOCKS * _BLOCK), PART * _BLOCK):
        at = first + _places(PART)
        a = _masked_squares(p, at, count, 0, terms) + _masked_squares(p, at, count, 4, terms)
        b = _masked_squares(p, at, count, 1, terms) + _masked_squares(p, at, count, 5, terms)
        c = _masked_squares(p, at, count, 2, terms) + _masked_squares(p, at, count, 6, terms)
        d = _masked_squares(p, at, count, 3, terms) + _masked_squares(p, at, count, 7, terms)
        more_high, more_low = _limbs_of((a + c) + (b + d))
        high += more_high
        low += more_low
    return high, low


@triton.jit
def _sums_of(source, tile, numel, aligned, terms, NUMEL: tl.constexpr) -> tuple:
    source += tile * NUMEL
    count = numel - tile * NUMEL
    if aligned != 0 and count >= NUMEL:
        high, low = _full_sums(source, terms, NUMEL // _BLOCK)
    else:
        high, low = _masked_sums(source, count, terms, NUMEL // _BLOCK)
    return high, low


@triton.jit(
    do_not_specialize=["tiles_at"], do_not_specialize_on_alignment=["table", "largest", "limbs"]
)
def _squares_kernel(table, tiles_at, largest, limbs, TILE_BYTES: tl.constexpr):
    """limbs[norm] += those of the tile's blocks, int64; none where `largest` is not finite."""
    row, address, numel, tile = _tile_of(table, tiles_at)
    norm = tl.load(row + _NORM)
    bits = tl.load(largest + norm)
    if bits < _INFINITY:
        dtype = tl.load(row + _DTYPE)
        aligned = tl.load(row + _ALIGNED)
        terms = quotient_terms(bits)
        WIDE: tl.constexpr = TILE_BYTES // 4
        HALF: tl.constexpr = TILE_BYTES // 2
        high, low = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        if dtype == _FP32:
            wide = address.to(tl.pointer_type(tl.float32))
            high, low = _sums_of(wide, tile, numel, aligned, terms, WIDE)
        elif dtype == _BF16:
            brain = address.to(tl.pointer_type(tl.bfloat16))
            high, low = _sums_of(brain, tile, numel, aligned, terms, HALF)
        elif dtype == _FP16:
            half = address.to(tl.pointer_type(tl.float16))
            high, low = _sums_of(half, tile, numel, aligned, terms, HALF)
        tl.atomic_add(limbs + 2 * norm, high, sem="relaxed")
        tl.atomic_add(limbs + 2 * norm + 1, low, sem="relaxed")


def largest_magnitudes(quantities: Quantities, device: torch.device) -> torch.Tensor:
    """`norm_reference.largest_magnitudes` in one launch; tensors not contiguous are copied."""
    return _largest(_plan(quantities, device), len(quantities), device)


def square_sums(quantities: Quantities, largest: torch.Tensor) -> torch.Tensor:
    """`norm_reference.power_sums` of exponent 2 in one launch."""
    return _squares_of(_plan(quantities, largest.device), largest)


def l2_norm_(
    norm: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    *,
    found_inf: torch.Tensor | None,
    squared: bool,
) -> None:
    """`norm_reference.l2_norm_` in two launches."""
    plan = _plan([tensors], norm.device)
    largest = _largest(plan, 1, norm.device)
    fill_norm_(norm, found_inf, largest, _squares_of(plan, largest), squared=squared)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What both launches go by. rows: the table has their addresses, so they live as long."""

    rows: Sequence[tuple[int, torch.Tensor]]
    table: tables.TileTable
    config: LaunchConfig


def _plan(quantities: Quantities, device: torch.device) -> _Plan | None:
    """`None` where there are no elements."""
    rows = [
        (index, tensor.contiguous())
        for index, tensors in enumerate(quantities)
        for tensor in tensors
        if tensor.numel()
    ]
    if not rows:
        return None
    config = config_for("l2_norm_", _case(rows), default_config(), device)
    keys = tuple(_key(index, tensor) for index, tensor in rows)
    return _Plan(rows, _tables.get(keys, config.block_bytes, device), config)


def _largest(plan: _Plan | None, num_norms: int, device: torch.device) -> torch.Tensor:
    largest = torch.zeros(num_norms, dtype=torch.int32, device=device)
    _launch(_largest_kernel, plan, largest)
    return largest


def _squares_of(plan: _Plan | None, largest: torch.Tensor) -> torch.Tensor:
    limbs = torch.zeros(len(largest), 2, dtype=torch.int64, device=largest.device)
    _launch(_squares_kernel, plan, largest, limbs)
    return limbs


def _launch(kernel, plan: _Plan | None, *results: torch.Tensor) -> None:
    if plan is None:
        return
    launch(
        kernel,
        plan.table.num_tiles,
        plan.table.entries,
        plan.table.tiles_at,
        *results,
        on=results[0],
        num_warps=plan.config.num_warps,
        TILE_BYTES=plan.config.block_bytes,
    )


@functools.cache
def default_config() -> LaunchConfig:
    """The block is of one tensor, so its elements follow from the dtype."""
    return LaunchConfig(TILE_BYTES, NUM_WARPS)


def _case(rows: Sequence[tuple[int, torch.Tensor]]) -> str:
    dtypes = {tensor.dtype for _, tensor in rows}
    return wire_format_of(dtypes.pop()).name if len(dtypes) == 1 else "mixed"


def _key(index: int, tensor: torch.Tensor) -> tables.TensorKey:
    address = tensor.data_ptr()
    code = tables.CODED_DTYPES.index(tensor.dtype)
    return address, tensor.numel(), index, code, address % ACCESS_BYTES == 0
