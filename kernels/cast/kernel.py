"""The plain casts on the GPU: the kernels behind `cast` and `cast_back`.

Formula and rounding are those of `reference`. A block that is full and 16-byte aligned takes
the unmasked path, 16 bytes an access on its narrowest side; tails, unaligned memory and e2m1 rows
of odd length take the masked one. Noise depends on an element's index alone, so both give the same.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.noise import GROUP_NUMEL
from ..formats.table import E2M1
from ..launch import ACCESS_BYTES, THREADS_PER_WARP, LaunchConfig, is_aligned, launch
from ..portable import covered, round_to, to_fp32
from ..tuned import config_for
from ..wide import wide_lanes
from .reference import odd_row

NUM_WARPS = 4

_MAGNITUDE = tl.constexpr(0x7FFF_FFFF)
_INFINITY = tl.constexpr(0x7F80_0000)
_MIN_NORMAL = tl.constexpr(0x0080_0000)
_HALF_WAY_BELOW = tl.constexpr(0x0060_0000)  # 1.5 * 2^-127
_GROUP = tl.constexpr(GROUP_NUMEL)


@triton.jit
def _encode_e8m0(x):
    """`codes.encode(x, E8M0)`: the mantissa's upper half carries into the exponent field.

    Field 0 stands for 2^-127, a subnormal of FP32, so half way to 2^-126 is 1.5 * 2^-127.
    """
    magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    nearest = (magnitude + 0x0040_0000) >> 23
    below = (magnitude >= _HALF_WAY_BELOW).to(tl.int32)
    nearest = tl.where(magnitude < _MIN_NORMAL, below, nearest)
    return tl.where(magnitude < _INFINITY, tl.minimum(nearest, 254), 255).to(tl.uint8)


@triton.jit
def _encode(x, HARDWARE: tl.constexpr, TO: tl.constexpr):
    """FP32 `x` in the format TO to nearest, one code an element."""
    if TO == "bf16":
        return round_to(x, tl.bfloat16)
    elif TO == "fp16":
        return round_to(x, tl.float16)
    elif TO == "e8m0":
        return _encode_e8m0(x)
    else:
        return device.encode(x, TO, HARDWARE)


@triton.jit
def _encode_stochastic(x, bits, TO: tl.constexpr):
    """FP32 `x` in the format TO with the noise `bits`, one code an element."""
    if TO == "bf16":
        return device.round_bf16_stochastic(x, bits)
    else:
        return device.encode_stochastic(x, bits, TO)


@triton.jit
def _decode(codes, HARDWARE: tl.constexpr, FROM: tl.constexpr):
    """FP32 values of codes in the format FROM, one an element."""
    if FROM == "bf16" or FROM == "fp16":
        return to_fp32(codes)
    elif FROM == "e8m0":
        return device.decode_e8m0(codes)
    else:
        return device.decode(codes, FROM, HARDWARE)


@triton.jit
def _aligned(base, NUMEL: tl.constexpr):
    """Pointers from `base` on, 16-byte aligned, which the sums do not show: hence the hint."""
    return tl.multiple_of(base + wide_lanes(NUMEL), 16)


@triton.jit
def _cast_full_block(
    out,
    x,
    seed,
    first_index,
    TO: tl.constexpr,
    GROUPED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pointers and index are those of the block."""
    value = to_fp32(tl.load(_aligned(x, BLOCK)))
    if seed is not None:
        lanes = tl.arange(0, BLOCK)
        if GROUPED:
            bits = device.noise_of_block(seed, first_index // _GROUP, lanes)
        else:
            bits = device.noise_of(seed, first_index + lanes)
        code = _encode_stochastic(value, bits, TO)
    else:
        code = _encode(value, HARDWARE, TO)
    if TO == "e2m1":
        tl.store(_aligned(out, BLOCK // 2), device.pack_nibbles(code))
    else:
        tl.store(_aligned(out, BLOCK), code)


@triton.jit
def _cast_masked_block(
    out,
    x,
    start,
    count,
    columns,
    seed,
    first_index,
    TO: tl.constexpr,
    ODD_ROWS: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In four pieces, whose other shape keeps the compiler from giving both paths one layout.

    With ODD_ROWS places count an element more a row, the nibble that fills its last byte.
    """
    QUARTER: tl.constexpr = BLOCK // 4
    for first in range(0, covered(count, BLOCK), QUARTER):
        lanes = first + tl.arange(0, QUARTER)
        index = start + lanes
        mask = lanes < count
        if ODD_ROWS:
            row = index // (columns + 1)
            column = index - row * (columns + 1)
            index = row * columns + column
            mask = mask & (column < columns)
        value = to_fp32(tl.load(x + index, mask=mask, other=0.0))
        if seed is not None:
            code = _encode_stochastic(value, device.noise_of(seed, first_index + index), TO)
        else:
            code = _encode(value, HARDWARE, TO)
        if TO == "e2m1":
            places = tl.arange(0, QUARTER // 2)
            code = device.pack_nibbles(code)
            at = out + (start + first) // 2 + places
            tl.store(at, code, mask=first + 2 * places < count)
        else:
            tl.store(out + start + lanes, code, mask=mask)


@triton.jit(
    do_not_specialize=["numel", "columns", "seed", "first_index"],
    do_not_specialize_on_alignment=["out", "x"],
)
def _cast_kernel(
    out,
    x,
    numel,
    columns,
    seed,
    first_index,
    TO: tl.constexpr,
    GROUPED: tl.constexpr,
    ODD_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements, BLOCK // 2 bytes of e2m1; seed: None to round to nearest.

    Example, e2m1, ODD_ROWS, rows of 3, BLOCK 8: 2 rows are 8 places, so that program 0 has both.
    Place 3 fills the first row's second byte; place 4 is element 3, the first of row 1.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    count = numel - start
    columns = columns.to(tl.int64)
    first_index = first_index.to(tl.int64)
    if ALIGNED and count >= BLOCK:
        PER_CODE: tl.constexpr = 2 if TO == "e2m1" else 1
        _cast_full_block(
            out + start // PER_CODE, x + start, seed, first_index + start,
            TO, GROUPED, HARDWARE, BLOCK,
        )  # fmt: skip
    else:
        _cast_masked_block(
            out, x, start, count, columns, seed, first_index,
            TO, ODD_ROWS, HARDWARE, BLOCK,
        )  # fmt: skip


@triton.jit
def _cast_back_full_block(
    out, codes, FROM: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK elements from aligned memory to aligned memory."""
    if FROM == "e2m1":
        code = device.unpack_nibbles(tl.load(_aligned(codes, BLOCK // 2)))
    else:
        code = tl.load(_aligned(codes, BLOCK))
    value = round_to(_decode(code, HARDWARE, FROM), out.dtype.element_ty)
    tl.store(_aligned(out, BLOCK), value)


@triton.jit
def _cast_back_masked_block(
    out, codes, count, FROM: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr
):
    """In four pieces: see `_cast_masked_block`."""
    QUARTER: tl.constexpr = BLOCK // 4
    for first in range(0, covered(count, BLOCK), QUARTER):
        lanes = first + tl.arange(0, QUARTER)
        if FROM == "e2m1":
            places = first // 2 + tl.arange(0, QUARTER // 2)
            code = tl.load(codes + places, mask=2 * places < count, other=0)
            code = device.unpack_nibbles(code)
        else:
            code = tl.load(codes + lanes, mask=lanes < count, other=0)
        value = round_to(_decode(code, HARDWARE, FROM), out.dtype.element_ty)
        tl.store(out + lanes, value, mask=lanes < count)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["out", "codes"])
def _cast_back_kernel(
    out,
    codes,
    numel,
    FROM: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of `out`; of e2m1 `codes` has half as many bytes."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    count = numel - start
    out += start
    PER_CODE: tl.constexpr = 2 if FROM == "e2m1" else 1
    codes += start // PER_CODE
    if ALIGNED and count >= BLOCK:
        _cast_back_full_block(out, codes, FROM, HARDWARE, BLOCK)
    else:
        _cast_back_masked_block(out, codes, count, FROM, HARDWARE, BLOCK)


def block_numel(name: str) -> int:
    """Elements of a program: two accesses of 16 bytes a thread to codes, one to e2m1's pairs."""
    return default_config().block_bytes // _code_bytes(name)


@functools.cache
def default_config() -> LaunchConfig:
    """The block is of codes, an element of e2m1 counted as a byte."""
    return LaunchConfig(2 * NUM_WARPS * THREADS_PER_WARP * ACCESS_BYTES, NUM_WARPS)


def _code_bytes(name: str) -> int:
    return 2 if name in ("bf16", "fp16") else 1


def cast_(
    out: torch.Tensor, x: torch.Tensor, to: str, seed: int | None = None, first_index: int = 0
) -> None:
    """`reference.cast_` in one launch."""
    row = odd_row(x.shape) if to == E2M1.name else 0
    numel = x.numel() // row * (row + 1) if row else x.numel()
    case = to if seed is None else f"{to} stochastic"
    config = config_for("cast_", case, default_config(), x.device)
    block = config.block_bytes // _code_bytes(to)
    launch(
        _cast_kernel,
        triton.cdiv(numel, block),
        out.view(torch.uint8) if out.element_size() == 1 else out,
        x,
        numel,
        row,
        seed,
        first_index,
        on=x,
        num_warps=config.num_warps,
        TO=to,
        GROUPED=first_index % GROUP_NUMEL == 0,
        ODD_ROWS=row > 0,
        ALIGNED=row == 0 and is_aligned(x, out),
        BLOCK=block,
    )


def cast_back_(out: torch.Tensor, codes: torch.Tensor, from_: str) -> None:
    """`reference.cast_back_` in one launch."""
    config = config_for("cast_back_", from_, default_config(), codes.device)
    block = config.block_bytes // _code_bytes(from_)
    launch(
        _cast_back_kernel,
        triton.cdiv(out.numel(), block),
        out,
        codes.view(torch.uint8) if codes.element_size() == 1 else codes,
        out.numel(),
        on=codes,
        num_warps=config.num_warps,
        FROM=from_,
        ALIGNED=is_aligned(out, codes),
        BLOCK=block,
    )
