"""Loads of aligned memory that give a thread eight or sixteen consecutive elements.

A compiler gives a thread the elements of one access, 16 bytes: four FP32. The next thread has the
next four, and both find what is found once a block, or once for sixteen elements' noise. Joined
from several accesses, as here, the elements are one thread's whatever their dtype.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from .portable import to_fp32


@triton.jit
def aligned_eights(source, places) -> tl.tensor:
    """FP32 [n, 8]: the elements from each of the places, int64 [n], on; 16-byte aligned all."""
    pointers = source + places
    if source.dtype.element_ty == tl.float32:
        return side_by_side(one_access(pointers, 4), one_access(pointers + 4, 4))
    elif source.dtype.element_ty == tl.bfloat16:
        # The halves of a word in FP32 are an instruction each. By way of 16 bits they are three.
        words = one_access(pointers.to(tl.pointer_type(tl.uint32), bitcast=True), 4)
        pairs = tl.join(words << 16, words & 0xFFFF_0000).to(tl.float32, bitcast=True)
        return tl.reshape(pairs, [places.numel, 8])
    else:
        return to_fp32(one_access(pointers, 8))


@triton.jit
def aligned_blocks(source, places, NUMEL: tl.constexpr) -> tl.tensor:
    """FP32 [n, NUMEL], a multiple of 32, sixteen a thread: as `aligned_eights`."""
    PARTS: tl.constexpr = NUMEL // 16
    at = tl.reshape(places[:, None] + (tl.arange(0, PARTS) * 16)[None, :], [places.numel * PARTS])
    x = side_by_side(aligned_eights(source, at), aligned_eights(source, at + 8))
    return tl.reshape(x, [places.numel, NUMEL])


@triton.jit
def aligned_pointers(base, places, NUMEL: tl.constexpr) -> tl.tensor:
    """Pointers [n, NUMEL] to NUMEL elements from each of the places on, 16-byte aligned all.

    The hint must sit on the sum it is about.
    """
    return tl.multiple_of(base + (places[:, None] + tl.arange(0, NUMEL)[None, :]), [1, 16])


@triton.jit
def one_access(pointers, NUMEL: tl.constexpr) -> tl.tensor:
    """[n, NUMEL], 16 bytes a row, from each of the pointers on."""
    # The hint must sit on the sum it is about.
    return tl.load(tl.multiple_of(pointers[:, None] + wide_lanes(NUMEL)[None, :], [1, 16]))


@triton.jit
def wide_lanes(NUMEL: tl.constexpr) -> tl.tensor:
    """0 to NUMEL, int64: of 32-bit offsets AMD's compiler makes other sums, without the hints."""
    return tl.arange(0, NUMEL).to(tl.int64)


@triton.jit
def side_by_side(a, b) -> tl.tensor:
    """[n, m] twice -> [n, 2 * m]: rows of `a`, each continued by that of `b`."""
    pairs = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(pairs, [a.shape[0], 2 * a.shape[1]])
