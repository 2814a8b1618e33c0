"""What the flat optimizers share: a shard's segments, their scalars and tiles, and how a tile's
compute shard is written.

    segment   [starts[i], starts[i + 1]) of the shard: its own factor on lr, its own weight decay
    scalars   three FP32 numbers of each segment, made from FP64 ones by a launch before the step's
    tile      `block` elements of one segment, for one program

    program p -> row -> segment, start and numel of it -> tile of it

The table is that of `tables`, with the segment's index where a tensor's address stands.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .. import tables
from ..device_tables import fields_of, row_of
from ..formats.device_codes import code_of, raise_amax
from ..formats.device_table import element_constant
from ..formats.table import E4M3, wire_format_of
from ..launch import (
    ACCESS_BYTES,
    THREADS_PER_WARP,
    LaunchConfig,
    is_aligned,
    is_capturing,
    launch,
)
from ..paths import store
from ..portable import round_to, to_fp32
from ..tuned import config_for
from .reference import BASE, DIGITS, Shared, bias_powers, halves

NUM_WARPS = 4
POWERS_NUMEL = DIGITS * BASE  # of one beta
SEGMENT_MULTIPLE = 16  # elements: 16 bytes of the narrowest side, one byte an element
NUM_SCALARS = 3  # of a segment
SEGMENTS_A_PROGRAM = 128  # whose scalars it makes

_FP32_CODE = tables.CODED_DTYPES.index(torch.float32)
_BASE, _DIGITS = tl.constexpr(BASE), tl.constexpr(DIGITS)
_E4M3 = element_constant(E4M3)
_NUM_SCALARS, _SEGMENTS = tl.constexpr(NUM_SCALARS), tl.constexpr(SEGMENTS_A_PROGRAM)


@triton.jit
def segments_of(num_segments) -> tuple:
    """(Segments of this program, which of them exist), where scalars are made."""
    segments = tl.program_id(0) * _SEGMENTS + tl.arange(0, _SEGMENTS)
    return segments, segments < num_segments


@triton.jit
def rates_of(lr, lr_scales, segments, exist) -> tl.tensor:
    """lr times the segments' factors, in FP64."""
    rates = tl.load(lr).to(tl.float64)
    if lr_scales is not None:
        rates = rates * tl.load(lr_scales + segments, mask=exist, other=0.0).to(tl.float64)
    return rates


@triton.jit
def decays_of(high, low, weight_decays, segments, exist) -> tl.tensor:
    """The segments' weight decays in FP64; what all share comes in two halves of FP32."""
    if weight_decays is not None:
        return tl.load(weight_decays + segments, mask=exist, other=0.0).to(tl.float64)
    else:
        return tl.cast(high, tl.float64) + tl.cast(low, tl.float64)


@triton.jit
def store_scalars(scalars, segments, exist, first, second, third) -> None:
    """One each, or one for all segments."""
    places = scalars + segments * _NUM_SCALARS
    tl.store(places, first, mask=exist)
    tl.store(places + 1, second, mask=exist)
    tl.store(places + 2, third, mask=exist)


@triton.jit
def scalars_of(scalars, segment) -> tuple:
    """Those of one segment, as `store_scalars` took them."""
    places = scalars + segment * _NUM_SCALARS
    return tl.load(places), tl.load(places + 1), tl.load(places + 2)


@triton.jit
def tile_of(table, num_rows, numel, STEPS: tl.constexpr, BLOCK: tl.constexpr) -> tuple:
    """(segment, first element, elements left in the segment) of this program.

    Without a table the shard is one segment.

    Example, BLOCK 4: segments of 6 and 3 elements make the rows [0, 6, 0, ..] and [1, 3, 6, ..] and
    the first tiles 0 and 2. Program 1 starts at 0 + (1 - 0) * 4 = 4, with 2 left.
    """
    if table is not None:
        row, tile = row_of(table, num_rows, STEPS)
        segment, segment_numel, start, _, _ = fields_of(row)
        begin = tile.to(tl.int64) * BLOCK
        return segment, start + begin, segment_numel - begin
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    return begin * 0, begin, numel - begin


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

    outputs: (compute shard, its scale, amax), each may be None; amax = max(amax, largest |param|).
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
        raise_amax(amax, param)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a shard is cut into tiles: `table` has no entries where it is one segment."""

    block: int
    num_warps: int
    table: tables.TileTable
    aligned: bool

    def launch(
        self,
        kernel: Any,
        shards: Sequence[torch.Tensor | None],
        scalars: torch.Tensor,
        options: Shared,
        *numbers: float,
        **constants: Any,
    ) -> None:
        """The step itself; numbers, constants: those of one optimizer."""
        on, amax = shards[0], options.amax
        assert on is not None
        launch(
            kernel,
            self.table.num_tiles,
            *shards,
            scalars,
            options.factor,
            options.found_inf,
            self.table.entries,
            options.compute,
            options.compute_scale,
            None if amax is None else amax.view(torch.int32),
            on.numel(),
            self.table.num_rows,
            *numbers,
            on=on,
            num_warps=self.num_warps,
            MAXIMIZE=options.maximize,
            STEPS=self.table.search_steps,
            ALIGNED=self.aligned,
            BLOCK=self.block,
            **constants,
        )


def made_scalars(kernel: Any, options: Shared, *read: torch.Tensor | None) -> torch.Tensor:
    """The scalars of every segment, FP32 [segments, 3], by a launch of `kernel`."""
    lr, num_segments = read[0], max(len(options.starts), 1)
    assert lr is not None
    scalars = torch.empty(num_segments, NUM_SCALARS, dtype=torch.float32, device=lr.device)
    launch(
        kernel,
        triton.cdiv(num_segments, SEGMENTS_A_PROGRAM),
        scalars,
        *read,
        options.found_inf,
        options.lr_scales,
        options.weight_decays,
        num_segments,
        *halves(options.weight_decay),
        on=scalars,
        num_warps=SEGMENTS_A_PROGRAM // THREADS_PER_WARP,
    )
    return scalars


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
        table = tables.TileTable(None, 0, triton.cdiv(numel, block), 1)
    else:
        table = segment_tiles(tuple(starts), numel, block, device)
    return Plan(block, config.num_warps, table, aligned)


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
    table = tables.tensor_table(keys, block * torch.float32.itemsize)
    return dataclasses.replace(table, entries=table.entries.to(device))


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
