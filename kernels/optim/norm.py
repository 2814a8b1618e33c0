"""L2 norms on the GPU: any number of tensors of any number of norms, in two launches.

Formula, limbs and bits are those of `norm_reference`. Bytes moved: those of the elements, twice.

    _largest_kernel   the largest magnitude of each norm, as bits: an atomic maximum a piece
    _squares_kernel   the block sums of each norm, as limbs: two atomic sums a piece

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
from ..device_tables import NUM_CODES, fields_of, numel_of, pointer_of, row_of
from ..formats.table import wire_format_of
from ..launch import ACCESS_BYTES, LaunchConfig, launch
from ..paths import for_tile, load
from ..portable import quotient, quotient_terms, to_fp32
from ..table_cache import TableCache
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

_INFINITY, _NAN = tl.constexpr(INFINITY_BITS), tl.constexpr(NAN_BITS)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_BLOCK, _PIECE = tl.constexpr(BLOCK_NUMEL), tl.constexpr(16)
_HIGH_SCALE, _LOW_SCALE = tl.constexpr(HIGH_SCALE), tl.constexpr(LOW_SCALE)

_tables = TableCache()


@triton.jit
def _largest_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    """largest = max(largest, |x|) as bits: infinity is above all numbers, NaN above infinity."""
    source, largest = arguments
    magnitudes = to_fp32(load(source, place, FULL, NUMEL)).to(tl.int32, bitcast=True) & _MAGNITUDE
    tl.atomic_max(largest, tl.minimum(tl.max(magnitudes, axis=0), _NAN), sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["table", "largest"])
def _largest_kernel(table, num_rows, largest, STEPS: tl.constexpr, TILE_BYTES: tl.constexpr):
    """largest[norm] = max(.., the tile's largest magnitude), int32; a row's offset is its norm."""
    row, tile = row_of(table, num_rows, STEPS)
    address, numel, norm, dtype, aligned = fields_of(row)
    for code in tl.static_range(NUM_CODES):
        if dtype == code:
            source = pointer_of(address, code)
            NUMEL: tl.constexpr = numel_of(source.dtype.element_ty, TILE_BYTES)
            start = tile.to(tl.int64) * NUMEL
            arguments = (source + start, largest + norm)
            for_tile(_largest_part, arguments, numel - start, aligned, NUMEL)


@triton.jit
def _squares(source, places, count, PART: tl.constexpr, terms, FULL: tl.constexpr):
    """Of the quotients of the elements that are PART times 16 after these places, [n, 16]."""
    places += PART * _PIECE
    if FULL:
        # The hint must sit on the sum it is about.
        loaded = tl.load(tl.multiple_of(source + places, [1, 16]))
    else:
        loaded = tl.load(source + places, mask=places < count, other=0.0)
    x = quotient(to_fp32(loaded), terms)
    return x * x


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
def _squares_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    p, limbs, terms = arguments
    first, n = place
    at = first + (wide_lanes(NUMEL // _BLOCK) * _BLOCK)[:, None] + wide_lanes(_PIECE)[None, :]
    a = _squares(p, at, n, 0, terms, FULL) + _squares(p, at, n, 4, terms, FULL)
    b = _squares(p, at, n, 1, terms, FULL) + _squares(p, at, n, 5, terms, FULL)
    c = _squares(p, at, n, 2, terms, FULL) + _squares(p, at, n, 6, terms, FULL)
    d = _squares(p, at, n, 3, terms, FULL) + _squares(p, at, n, 7, terms, FULL)
    high, low = _limbs_of((a + c) + (b + d))
    tl.atomic_add(limbs, high, sem="relaxed")
    tl.atomic_add(limbs + 1, low, sem="relaxed")


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["table", "largest", "limbs"]
)
def _squares_kernel(table, num_rows, largest, limbs, STEPS: tl.constexpr, TILE_BYTES: tl.constexpr):
    """limbs[norm] += those of the tile's blocks, int64; none where `largest` is not finite."""
    row, tile = row_of(table, num_rows, STEPS)
    address, numel, norm, dtype, aligned = fields_of(row)
    bits = tl.load(largest + norm)
    if bits < _INFINITY:
        terms = quotient_terms(bits)
        for code in tl.static_range(NUM_CODES):
            if dtype == code:
                source = pointer_of(address, code)
                NUMEL: tl.constexpr = numel_of(source.dtype.element_ty, TILE_BYTES)
                start = tile.to(tl.int64) * NUMEL
                arguments = (source + start, limbs + 2 * norm, terms)
                for_tile(_squares_part, arguments, numel - start, aligned, NUMEL)


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
        plan.table.num_rows,
        *results,
        on=results[0],
        num_warps=plan.config.num_warps,
        STEPS=plan.table.search_steps,
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
