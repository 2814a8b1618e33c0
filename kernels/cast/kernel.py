"""The plain casts on the GPU: the kernels behind `cast` and `cast_back`.

Formula and rounding are those of `reference`. A block that is full and 16-byte aligned takes
the unmasked path, 16 bytes an access on its narrowest side; tails, unaligned memory and rows of odd
length whose codes lie two a byte take the masked one. Noise depends on an element's index alone, so
both give the same.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.device_table import element_of
from ..formats.noise import GROUP_NUMEL, Seed
from ..formats.table import BITS_PER_BYTE, CASTS
from ..launch import ACCESS_BYTES, THREADS_PER_WARP, LaunchConfig, is_aligned, launch
from ..paths import for_tile, load, store
from ..portable import round_to, to_fp32
from ..tuned import config_for
from .reference import odd_row

NUM_WARPS = 4

_GROUP = tl.constexpr(GROUP_NUMEL)


@triton.constexpr_function
def _codes_of(element) -> int:
    """Codes of the least that is stored: two in a byte, or one."""
    return max(1, BITS_PER_BYTE // element.form.stored_bits)


@triton.jit
def _place_of(place, CODES: tl.constexpr):
    """Where elements of this place, of `paths`, are stored, CODES together."""
    return place[0] // CODES, (place[1] + (CODES - 1)) // CODES


@triton.jit
def _cast_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    out, x, start, seed, first_index, columns = arguments[:6]
    ELEMENT: tl.constexpr = arguments[6]
    GROUPED: tl.constexpr = arguments[7]
    ODD_ROWS: tl.constexpr = arguments[8]
    HARDWARE: tl.constexpr = arguments[9]
    CODES: tl.constexpr = _codes_of(ELEMENT)
    lanes = place[0] + tl.arange(0, NUMEL)
    index = start + lanes
    if FULL or not ODD_ROWS:
        value = to_fp32(load(x + start, place, FULL, NUMEL))
    else:
        row = index // (columns + 1)
        column = index - row * (columns + 1)
        index = row * columns + column
        mask = (lanes < place[1]) & (column < columns)
        value = to_fp32(tl.load(x + index, mask=mask, other=0.0))
    bits = None
    if seed is not None:
        if FULL and GROUPED:
            bits = device.noise_of_block(seed, (first_index + start) // _GROUP, lanes)
        else:
            bits = device.noise_of(seed, first_index + index)
    if FULL and ELEMENT.pack is not None:
        if bits is not None:
            bits = tl.reshape(bits, [NUMEL // 8, 8])
        words = ELEMENT.pack(tl.reshape(value, [NUMEL // 8, 8]), bits, HARDWARE)
        base = (out + start // CODES).to(tl.pointer_type(tl.uint32), bitcast=True)
        store(base, tl.reshape(words, [NUMEL // 8]), place, FULL, NUMEL // 8)
    else:
        code = device.code_of(value, bits, ELEMENT, HARDWARE)
        if CODES > 1:
            code = device.pack_nibbles(code)
        store(out + start // CODES, code, _place_of(place, CODES), FULL, NUMEL // CODES)


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
    ELEMENT: tl.constexpr,
    GROUPED: tl.constexpr,
    ODD_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements, BLOCK // 2 bytes where codes lie two a byte; seed: None to nearest.

    With ODD_ROWS places count an element more a row, the nibble that fills its last byte. Example,
    e2m1, rows of 3, BLOCK 8: 2 rows are 8 places, so that program 0 has both. Place 3 fills the
    first row's second byte; place 4 is element 3, the first of row 1.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    columns = columns.to(tl.int64)
    for_tile(
        _cast_part,
        (out, x, start, seed, first_index, columns, ELEMENT, GROUPED, ODD_ROWS, HARDWARE),
        numel - start,
        ALIGNED,
        BLOCK,
    )


@triton.jit
def _cast_back_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    out, codes = arguments[:2]
    ELEMENT: tl.constexpr = arguments[2]
    HARDWARE: tl.constexpr = arguments[3]
    CODES: tl.constexpr = _codes_of(ELEMENT)
    if FULL and ELEMENT.unpack is not None:
        words = load(codes.to(tl.pointer_type(tl.uint32), bitcast=True), place, FULL, NUMEL // 8)
        value = tl.reshape(ELEMENT.unpack(words[:, None], HARDWARE), [NUMEL])
    else:
        kept = load(codes, _place_of(place, CODES), FULL, NUMEL // CODES)
        value = device.values_of(kept, ELEMENT, HARDWARE)
    store(out, round_to(value, out.dtype.element_ty), place, FULL, NUMEL)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["out", "codes"])
def _cast_back_kernel(
    out,
    codes,
    numel,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of `out`; `codes` has half as many bytes where they lie two a byte."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    codes += start // _codes_of(ELEMENT)
    for_tile(
        _cast_back_part, (out + start, codes, ELEMENT, HARDWARE), numel - start, ALIGNED, BLOCK
    )


@functools.cache
def default_config() -> LaunchConfig:
    """Two accesses of 16 bytes a thread to codes, one to pairs: an element counts as a byte."""
    return LaunchConfig(2 * NUM_WARPS * THREADS_PER_WARP * ACCESS_BYTES, NUM_WARPS)


def block_numel(name: str, config: LaunchConfig) -> int:
    """Elements of a program, for the format called `name`."""
    return config.block_bytes // max(1, CASTS[name].stored_bits // BITS_PER_BYTE)


def cast_(
    out: torch.Tensor, x: torch.Tensor, to: str, seed: Seed | None = None, first_index: int = 0
) -> None:
    """`reference.cast_` in one launch."""
    row = odd_row(x.shape, to)
    numel = x.numel() // row * (row + 1) if row else x.numel()
    case = to if seed is None else f"{to} stochastic"
    config = config_for("cast_", case, default_config(), x.device)
    block = block_numel(to, config)
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
        ELEMENT=element_of(CASTS[to]),
        GROUPED=first_index % GROUP_NUMEL == 0,
        ODD_ROWS=row > 0,
        ALIGNED=row == 0 and is_aligned(x, out),
        BLOCK=block,
    )


def cast_back_(out: torch.Tensor, codes: torch.Tensor, from_: str) -> None:
    """`reference.cast_back_` in one launch."""
    config = config_for("cast_back_", from_, default_config(), codes.device)
    block = block_numel(from_, config)
    launch(
        _cast_back_kernel,
        triton.cdiv(out.numel(), block),
        out,
        codes.view(torch.uint8) if codes.element_size() == 1 else codes,
        out.numel(),
        on=codes,
        num_warps=config.num_warps,
        ELEMENT=element_of(CASTS[from_]),
        ALIGNED=is_aligned(out, codes),
        BLOCK=block,
    )
