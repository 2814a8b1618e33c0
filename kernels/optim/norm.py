"""Owns the L2 norm on the GPU: any number of tensors in two launches, with a non-finite flag.

The definition, chunk by chunk, is that of `reference`: every sum has one order, so the bits
depend on no launch configuration. Bytes moved: those of the elements, once, and 16 a chunk.

    _chunk_kernel    one program a chunk: FP32 sum of squares, whether all elements are finite
    _combine_kernel  one program: the chunks' sums in FP64, the root, one rounding

Squares of |x| above 1.8e19 overflow to an infinite norm, below 1e-23 they vanish, as those of
torch.linalg.vector_norm in FP32 do; the flag looks at the elements, not at their squares.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .. import tables
from ..formats.table import wire_format_of
from ..launch import ACCESS_BYTES, LaunchConfig, launch
from ..portable import to_fp32
from ..tuned import config_for
from .reference import CHUNK_BYTES, CHUNK_LANES, COMBINE_LANES

_ADDRESS, _NUMEL = tl.constexpr(tables.ADDRESS), tl.constexpr(tables.NUMEL)
_FIRST_TILE, _DTYPE = tl.constexpr(tables.FIRST_TILE), tl.constexpr(tables.DTYPE)
_ALIGNED, _ROW_FIELDS = tl.constexpr(tables.ALIGNED), tl.constexpr(tables.ROW_FIELDS)
_FP32, _BF16, _FP16 = (
    tl.constexpr(tables.CODED_DTYPES.index(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_LANES = tl.constexpr(CHUNK_LANES)
_LEVELS = tl.constexpr(CHUNK_LANES.bit_length() - 1)
_COMBINE_LANES = tl.constexpr(COMBINE_LANES)
_COMBINE_LEVELS = tl.constexpr(COMBINE_LANES.bit_length() - 1)
_NUM_WARPS, _COMBINE_WARPS = 8, 16

_tables = tables.TableCache()


@triton.jit
def pairwise_sum(x, LEVELS: tl.constexpr) -> tl.tensor:
    """The sum of 2 ** LEVELS lanes: adjacent lanes, then pairs of them, ...

    Two terms have one sum in any order, so that a reduction over two leaves the compiler no choice.
    """
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def _accumulate(total, largest, loaded):
    """Squares are added, and the largest magnitude kept as bits: NaN and infinity are largest."""
    x = to_fp32(loaded)
    bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    return total + x * x, tl.maximum(largest, bits)


@triton.jit
def _full_chunk(source, ROWS: tl.constexpr):
    """(sum of squares, largest magnitude's bits) of a chunk that is full and 16-byte aligned."""
    lanes = tl.arange(0, _LANES)
    total = tl.zeros((_LANES,), tl.float32)
    largest = tl.zeros((_LANES,), tl.int32)
    for row in tl.static_range(ROWS):
        loaded = tl.load(tl.multiple_of(source + row * _LANES + lanes, 16))
        total, largest = _accumulate(total, largest, loaded)
    return pairwise_sum(total, _LEVELS), tl.max(largest, axis=0)


@triton.jit
def _masked_chunk(source, count, ROWS: tl.constexpr):
    lanes = tl.arange(0, _LANES)
    total = tl.zeros((_LANES,), tl.float32)
    largest = tl.zeros((_LANES,), tl.int32)
    for row in range(ROWS):
        at = row * _LANES + lanes
        loaded = tl.load(source + at, mask=at < count, other=0.0)
        total, largest = _accumulate(total, largest, loaded)
    return pairwise_sum(total, _LEVELS), tl.max(largest, axis=0)


@triton.jit
def _chunk(source, first, numel, aligned, ROWS: tl.constexpr):
    source += first
    count = numel - first
    if aligned != 0 and count >= ROWS * _LANES:
        total, largest = _full_chunk(source, ROWS)
    else:
        total, largest = _masked_chunk(source, count, ROWS)
    return total, largest


@triton.jit(do_not_specialize=["tiles_at"], do_not_specialize_on_alignment=["table"])
def _chunk_kernel(table, tiles_at, sums, flags, CHUNK_BYTES: tl.constexpr):
    """One chunk of one tensor.

    Example with chunks of 16 bytes: FP32 tensors of 6 and 3 elements make the rows [.., 6, 0, 0,
    ..] and [.., 3, 0, 2, ..] and the tiles [0, 0, 1]. Program 1 has tensor 0, starts at
    (1 - 0) * 4 = 4 and has 2 elements left, whose squares it adds.
    """
    # A tensor may have more than 2**31 elements, so all that counts elements is int64.
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(table + tiles_at + program) * _ROW_FIELDS
    address = tl.load(row + _ADDRESS)
    numel = tl.load(row + _NUMEL)
    chunk = program - tl.load(row + _FIRST_TILE)
    dtype = tl.load(row + _DTYPE)
    aligned = tl.load(row + _ALIGNED)
    WIDE: tl.constexpr = CHUNK_BYTES // 4 // _LANES
    HALF: tl.constexpr = CHUNK_BYTES // 2 // _LANES
    total, largest = 0.0, 0
    if dtype == _FP32:
        wide = address.to(tl.pointer_type(tl.float32))
        total, largest = _chunk(wide, chunk * (WIDE * _LANES), numel, aligned, WIDE)
    elif dtype == _BF16:
        brain = address.to(tl.pointer_type(tl.bfloat16))
        total, largest = _chunk(brain, chunk * (HALF * _LANES), numel, aligned, HALF)
    elif dtype == _FP16:
        half = address.to(tl.pointer_type(tl.float16))
        total, largest = _chunk(half, chunk * (HALF * _LANES), numel, aligned, HALF)
    tl.store(sums + program, total)
    tl.store(flags + program, (largest >= _INFINITY).to(tl.int32))


@triton.jit(do_not_specialize=["num_chunks"])
def _combine_kernel(norm, found_inf, sums, flags, num_chunks, SQUARED: tl.constexpr):
    """The norm of all chunks. With 9000 of them, lane 0 has those at 0 and 8192, lane 1000 one."""
    lanes = tl.arange(0, _COMBINE_LANES)
    total = tl.zeros((_COMBINE_LANES,), tl.float64)
    flag = tl.zeros((_COMBINE_LANES,), tl.int32)
    first = 0
    while first < num_chunks:
        mask = first + lanes < num_chunks
        total += tl.load(sums + first + lanes, mask=mask, other=0.0).to(tl.float64)
        flag |= tl.load(flags + first + lanes, mask=mask, other=0)
        first += _COMBINE_LANES
    result = pairwise_sum(total, _COMBINE_LEVELS)
    if not SQUARED:
        result = tl.sqrt(result)
    tl.store(norm, result.to(norm.dtype.element_ty))
    if found_inf is not None:
        tl.store(found_inf, tl.max(flag, axis=0).to(found_inf.dtype.element_ty))


def l2_norm_(
    norm: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    *,
    found_inf: torch.Tensor | None,
    squared: bool,
) -> None:
    """`reference.l2_norm_` in two launches; tensors not contiguous are made so first."""
    rows = [tensor.contiguous() for tensor in tensors]
    keys = tuple(_key(row) for row in rows if row.numel())
    config = config_for("l2_norm_", _case(rows), default_config(), norm.device)
    table = _tables.get(keys, CHUNK_BYTES, norm.device) if keys else None
    num_chunks = table.num_tiles if table is not None else 0
    sums = torch.empty(max(num_chunks, 1), dtype=torch.float32, device=norm.device)
    flags = torch.empty_like(sums, dtype=torch.int32)
    if table is not None:
        launch(
            _chunk_kernel,
            num_chunks,
            table.entries,
            table.tiles_at,
            sums,
            flags,
            on=norm,
            num_warps=config.num_warps,
            CHUNK_BYTES=CHUNK_BYTES,
        )
    launch(
        _combine_kernel,
        1,
        norm,
        found_inf,
        sums,
        flags,
        num_chunks,
        on=norm,
        num_warps=_COMBINE_WARPS,
        SQUARED=squared,
    )


@functools.cache
def default_config() -> LaunchConfig:
    """The sums are of chunks of one size, so that only warps may be tuned."""
    return LaunchConfig(CHUNK_BYTES, _NUM_WARPS)


def _case(tensors: Sequence[torch.Tensor]) -> str:
    dtypes = {tensor.dtype for tensor in tensors}
    return wire_format_of(dtypes.pop()).name if len(dtypes) == 1 else "mixed"


def _key(tensor: torch.Tensor) -> tables.TensorKey:
    address = tensor.data_ptr()
    code = tables.CODED_DTYPES.index(tensor.dtype)
    return address, tensor.numel(), 0, code, address % ACCESS_BYTES == 0
