"""What the flat optimizers share: a shard's segments, their tiles, and how a tile's scalars and
compute shard are read and written.

    segment   [starts[i], starts[i + 1]) of the shard: its own factor on lr, its own weight decay
    tile      `block` elements of one segment, for one program

    program p -> row i = entries[tiles_at + p] -> segment, start and numel of it -> tile of it

The table is that of `tables`, with the segment's index where a tensor's address stands.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .. import tables
from ..device_tables import fields_of, row_of
from ..formats.device_codes import code_of
from ..formats.device_table import element_constant
from ..formats.table import E4M3, wire_format_of
from ..launch import ACCESS_BYTES, THREADS_PER_WARP, LaunchConfig, is_aligned, is_capturing
from ..paths import store
from ..portable import round_to, to_fp32
from ..tuned import config_for
from .reference import BASE, DIGITS, Shared, bias_powers, halves

NUM_WARPS = 4
POWERS_NUMEL = DIGITS * BASE  # of one beta
SEGMENT_MULTIPLE = 16  # elements: 16 bytes of the narrowest side, one byte an element

_FP32_CODE = tables.CODED_DTYPES.index(torch.float32)
_BASE, _DIGITS = tl.constexpr(BASE), tl.constexpr(DIGITS)
_E4M3 = element_constant(E4M3)


@triton.jit
def tile_of(table, tiles_at, numel, BLOCK: tl.constexpr) -> tuple:
    """(segment, first element, elements left in the segment) of this program.

    Without a table the shard is one segment.

    Example, BLOCK 4: segments of 6 and 3 elements make the tiles [0, 0, 1] and the rows
    [0, 6, 0, 0, ..] and [1, 3, 6, 2, ..]. Program 1 starts at 0 + (1 - 0) * 4 = 4, with 2 left.
    """
    if table is not None:
        row, tile = row_of(table, tiles_at)
        segment, segment_numel, start, _, _ = fields_of(row)
        return segment, start + tile * BLOCK, segment_numel - tile * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    return start * 0, start, numel - start


@triton.jit
def rate_of(lr, lr_scales, segment) -> tl.tensor:
    """lr times the segment's factor, in FP64."""
    rate = tl.load(lr).to(tl.float64)
    if lr_scales is not None:
        rate = rate * tl.load(lr_scales + segment).to(tl.float64)
    return rate


@triton.jit
def decay_of(high, low, weight_decays, segment) -> tl.tensor:
    """The segment's weight decay in FP64; what all share comes in two halves of FP32."""
    if weight_decays is not None:
        return tl.load(weight_decays + segment).to(tl.float64)
    return tl.cast(high, tl.float64) + tl.cast(low, tl.float64)


@triton.jit
def may_not_step(found_inf) -> tl.tensor:
    """Whether the flag is set: anything but 0."""
    if found_inf is None:
        return False
    else:  # Triton compiles what follows a return, but not a branch that is not taken
        return tl.load(found_inf) != 0


@triton.jit
def power_of(powers, step) -> tl.tensor:
    """beta ** step in FP64: the product of one table entry a digit of `step`, lowest first."""
    power = tl.load(powers + step % _BASE)
    for _ in tl.static_range(1, _DIGITS):
        powers += _BASE
        step = step // _BASE
        power = power * tl.load(powers + step % _BASE)
    return power


@triton.jit
def gradient(loaded, factor, MAXIMIZE: tl.constexpr) -> tl.tensor:
    """A gradient in FP32, times the factor if there is one, turned round to maximize."""
    g = to_fp32(loaded)
    if factor is not None:
        g = g * tl.load(factor)
    if MAXIMIZE:
        g = -g
    return g


@triton.jit
def store_computed(
    param, outputs, place, HARDWARE: tl.constexpr, FULL: tl.constexpr, NUMEL: tl.constexpr
) -> None:
    """To the compute shard FP32 `param`: BF16, FP16, or E4M3 codes of param * scale.

    outputs: (compute shard, its scale, amax), each may be None. amax = max(amax, largest |param|),
    as integers: NaN is above infinity and so is kept.
    """
    compute, scale, amax = outputs
    if compute is not None:
        if compute.dtype.element_ty == tl.uint8:
            made = code_of(param * tl.load(scale), None, _E4M3, HARDWARE)
        else:
            made = round_to(param, compute.dtype.element_ty)
        store(compute, made, place, FULL, NUMEL)
    if amax is not None:
        if not FULL:
            param = tl.where(place[0] + tl.arange(0, NUMEL) < place[1], param, 0.0)
        bits = param.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(amax, tl.max(bits, axis=0), sem="relaxed")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a shard is cut into tiles: `table` is None where it is one segment."""

    block: int
    num_warps: int
    num_tiles: int
    tiles_at: int
    table: torch.Tensor | None
    aligned: bool

    def arguments(self, options: Shared, numel: int) -> tuple[Any, ...]:
        """Those of both kernels, in their order, from `factor` to `decay_low`."""
        return (
            options.factor,
            options.found_inf,
            self.table,
            options.lr_scales,
            options.weight_decays,
            options.compute,
            options.compute_scale,
            None if options.amax is None else options.amax.view(torch.int32),
            numel,
            self.tiles_at,
            *halves(options.weight_decay),
        )


def plan(op: str, shards: Sequence[torch.Tensor | None], starts: Sequence[int]) -> Plan:
    """The plan for `shards` of one length: the parameter, the gradient, ..., the compute shard."""
    given = [shard for shard in shards if shard is not None]
    numel, device = given[0].numel(), given[0].device
    narrowest = min(shard.element_size() for shard in given)
    case = f"{_name_of(shards[1])} -> {_name_of(shards[-1])}"
    config = config_for(op, case, default_config(), device)
    block = config.block_bytes // narrowest
    aligned = is_aligned(*given) and not any(start % SEGMENT_MULTIPLE for start in starts)
    if not starts or numel == 0:
        num_tiles = triton.cdiv(numel, block)
        return Plan(block, config.num_warps, num_tiles, 0, None, aligned)
    made = segment_tiles(tuple(starts), numel, block, device)
    return Plan(block, config.num_warps, made.num_tiles, made.tiles_at, made.entries, aligned)


def _name_of(shard: torch.Tensor | None) -> str:
    if shard is None:
        return "none"
    coded = shard.dtype in tables.CODED_DTYPES
    return wire_format_of(shard.dtype).name if coded else E4M3.name


@functools.cache
def default_config() -> LaunchConfig:
    """The block is of the narrowest of the shards."""
    return LaunchConfig(NUM_WARPS * THREADS_PER_WARP * ACCESS_BYTES, NUM_WARPS)


# Never dropped: a captured CUDA graph may read its tables for as long as the process lives.
@functools.cache
def segment_tiles(
    starts: tuple[int, ...], numel: int, block: int, device: torch.device
) -> tables.TileTable:
    """The table of the segments' tiles, on `device`; empty segments have none."""
    _refuse_capture(device)
    ends = (*starts[1:], numel)
    keys = [
        (index, end - start, start, _FP32_CODE, True)
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]
    entries, num_tiles = tables.table_entries(keys, block * torch.float32.itemsize)
    return tables.TileTable(entries.to(device), len(keys) * tables.ROW_FIELDS, num_tiles)


@functools.cache
def device_powers(beta1: float, beta2: float, device: torch.device) -> torch.Tensor:
    """The powers of both betas that steps are put together from, FP64 [2, digits * base]."""
    _refuse_capture(device)
    return torch.stack([bias_powers(beta1), bias_powers(beta2)]).to(device)


def _refuse_capture(device: torch.device) -> None:
    if is_capturing(device):
        raise RuntimeError(
            "flat optimizer: expected its tables to be on the device before a CUDA graph is "
            "captured, got the first call inside one; make one step before capturing"
        )
