"""E2M1 by instructions of NVIDIA's GPUs: PTX of words of eight codes, put in by Triton as it is.

| text            | from -> to             | GPUs                    | instructions a code |
|-----------------|------------------------|-------------------------|---------------------|
| TO_WORD         | eight FP32 -> one word | `launch.FP4`, Blackwell | 0.5                 |
| OF_WORD         | one word -> eight FP32 | the same                | 1.5                 |
| OF_WORD_BY_PRMT | the same               | all                     | 2.9                 |

The first code of a word is its lowest four bits. What TO_WORD makes of a number is in "PTX ISA"
9.0, cvt: nearest even; beyond +-6, and of infinity, +-6; of a NaN, whatever its sign, +6; zeros
keep their sign. Two codes become two FP16, which have all values of E2M1, and these FP32.
"""

from __future__ import annotations

from collections.abc import Sequence


def _asm(*lines: str) -> str:
    return "\n".join(("{", *(f"    {line};" for line in lines), "}"))


def _in_fp32(codes: Sequence[tuple[int, int]]) -> list[str]:
    """The halves of pair<i>, two FP16, are `codes[i]` of the word."""
    lines = [".reg .b16 low<4>, high<4>"]
    for at, (low, high) in enumerate(codes):
        lines += [
            f"mov.b32 {{low{at}, high{at}}}, pair{at}",
            f"cvt.f32.f16 ${low}, low{at}",
            f"cvt.f32.f16 ${high}, high{at}",
        ]
    return lines


def _by_prmt() -> list[str]:
    """A permutation of bytes reads four from a table of eight, by four bits each: three of a code.

    The table has the upper bytes of FP16, the lower ones of which are 0, as is a table's byte above
    bit 7: a selector with its fourth bit set spreads that bit.
    """
    lines = [
        ".reg .b32 magnitude<2>, upper<2>, sign<4>, pair<4>",
        "and.b32 magnitude0, $8, 0x77777777",
        "shr.u32 magnitude1, magnitude0, 16",
        "prmt.b32 upper0, 0x3E3C3800, 0x46444240, magnitude0",
        "prmt.b32 upper1, 0x3E3C3800, 0x46444240, magnitude1",
    ]
    for at in range(4):
        selector = at << 4 | (at + 4) << 12 | (at + 8) * 0x0101
        lines += [
            f"prmt.b32 pair{at}, upper0, upper1, {selector:#06x}",
            f"shl.b32 sign{at}, $8, {12 - 4 * at}",
            f"and.b32 sign{at}, sign{at}, 0x80008000",
            f"or.b32 pair{at}, pair{at}, sign{at}",
        ]
    return lines


TO_WORD = _asm(
    ".reg .b8 byte<4>",
    # Of two operands the first has the byte's upper half.
    *(f"cvt.rn.satfinite.e2m1x2.f32 byte{at}, ${2 * at + 2}, ${2 * at + 1}" for at in range(4)),
    "mov.b32 $0, {byte0, byte1, byte2, byte3}",
)
OF_WORD = _asm(
    ".reg .b8 byte<4>",
    ".reg .b32 pair<4>",
    "mov.b32 {byte0, byte1, byte2, byte3}, $8",
    *(f"cvt.rn.f16x2.e2m1x2 pair{at}, byte{at}" for at in range(4)),
    *_in_fp32([(0, 1), (2, 3), (4, 5), (6, 7)]),
)
OF_WORD_BY_PRMT = _asm(*_by_prmt(), *_in_fp32([(0, 4), (1, 5), (2, 6), (3, 7)]))
