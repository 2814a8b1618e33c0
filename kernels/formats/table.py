"""The number formats gradients and parameters travel in: a row each, from which all else follows.

A row has the numbers of a format and names the functions that are its own, in PyTorch and in
Triton, which are imported when they are first needed. Kernels, messages, references and cases take
what they know from the row: a new format is a row and, where its arithmetic is new, one file.

| name | element bits | max finite             | block | scale |
|------|--------------|------------------------|-------|-------|
| fp32 | 32           | (2 - 2^-23) * 2^127    | 1     | none  |
| bf16 | 16           | (2 - 2^-7) * 2^127     | 1     | none  |
| fp16 | 16           | (2 - 2^-10) * 2^15     | 1     | none  |

A block is the elements that share one scale; formats without scales have blocks of one element.
Elements narrower than 16 bits, sign / exponent / mantissa bits; E8M0 is only ever a scale:

| name     | s/e/m | bias | max finite | min normal | min subnormal | inf  | NaN           |
|----------|-------|------|------------|------------|---------------|------|---------------|
| e4m3     | 1/4/3 | 7    | 448        | 2^-6       | 2^-9          | none | 0x7F          |
| e5m2     | 1/5/2 | 15   | 57344      | 2^-14      | 2^-16         | 0x7C | 0x7D to 0x7F  |
| e2m1     | 1/2/1 | 1    | 6          | 1          | 0.5           | none | none          |
| e8m0     | 0/8/0 | 127  | 2^127      | 2^-127     | none          | none | 0xFF          |
| e4m3fnuz | 1/4/3 | 8    | 240        | 2^-7       | 2^-10         | none | 0x80          |

E4M3FNUZ, gfx942's, has one zero, and NaN where the other would be.
Block formats, scales included in their byte counts:

| name       | element | block    | scale of a block | scale of the tensor |
|------------|---------|----------|------------------|---------------------|
| fp8_tensor | e4m3    | all      | fp32             | none                |
| fp8_row    | e4m3    | a row    | fp32             | none                |
| fp8_1x128  | e4m3    | 128      | fp32             | none                |
| mxfp8      | e4m3    | 32       | e8m0             | none                |
| mxfp4      | e2m1    | 32       | e8m0             | none                |
| nvfp4      | e2m1    | 16       | e4m3             | fp32                |
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..checks import check_choice, check_integer

BITS_PER_BYTE = 8
ALIGN_NUMEL = 128
"""What tensors' places in flat buffers and messages are multiples of: no block straddles two."""

_DEVICE_CODES = ".formats.device_codes"


@functools.cache
def named(module: str, name: str) -> Any:
    """What `name` is in a module, ours if it begins with a dot; imported when first asked for."""
    return getattr(importlib.import_module(module, __package__.rpartition(".")[0]), name)


@dataclass(frozen=True, slots=True)
class WireFormat:
    """One number format, as it lies in memory or on the wire: elements without scales.

    ``scale_dtype`` is ``None`` for formats whose elements need no scale. ``has_stochastic``:
    elements may be rounded stochastically.
    """

    name: str
    dtype: torch.dtype
    element_bits: int
    max_finite: float
    block_numel: int = 1
    scale_dtype: torch.dtype | None = None
    has_stochastic: bool = False

    device: ClassVar[tuple[str, str]] = (_DEVICE_CODES, "PLAIN")
    codec: ClassVar[None] = None  # and none of what follows from one
    has_rows: ClassVar[bool] = False
    has_rule: ClassVar[bool] = False
    pack_tiles: ClassVar[int] = 1
    has_power_of_2: ClassVar[bool] = False

    def __hash__(self) -> int:
        """Cheap, since every launch looks a format up; equal ones have one name."""
        return hash(self.name)

    def __post_init__(self) -> None:
        assert self.element_bits > 0, self
        assert self.max_finite > 0, self
        assert self.block_numel > 0, self
        assert (self.block_numel * self.element_bits) % BITS_PER_BYTE == 0, self

    def num_bytes(self, numel: int) -> int:
        """Bytes that `numel` elements take, the scales of their blocks included.

        Raises `ValueError` for a negative `numel`.
        """
        check_integer("numel", numel, 0)
        element_bytes = -(-numel * self.element_bits // BITS_PER_BYTE)
        if self.scale_dtype is None:
            return element_bytes
        return element_bytes + -(-numel // self.block_numel) * self.scale_dtype.itemsize

    @property
    def element(self) -> WireFormat:
        """What elements are: themselves."""
        return self

    @property
    def stored_bits(self) -> int:
        """Bits that an element takes."""
        return self.element_bits


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A floating-point format of at most eight bits: what an element, or a block's scale, may be.

    A code is an element's bits: sign, exponent field, mantissa field, from the top down.
    ``max_code`` is the code of ``max_finite``. ``nan_code`` is the one code that encoding makes of
    a NaN of either sign, ``None`` where the format has none. ``dtype`` is the public tensors', with
    two codes a byte for e2m1. The value of a code with exponent field E > 0 and mantissa field M is
    2^(E - bias) * (1 + M / 2^mantissa_bits); with E = 0 it is a multiple of ``min_subnormal``.
    ``device``: the module and name of the `device_codes.Conversions` that its kernels use; by
    default arithmetic from the numbers here, for any format with a sign.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int | None
    dtype: torch.dtype
    has_sign: bool = True
    infinity_code: int | None = None
    device: tuple[str, str] = (_DEVICE_CODES, "ARITHMETIC")

    @property
    def bits(self) -> int:
        """Bits of a code, the sign included."""
        return int(self.has_sign) + self.exponent_bits + self.mantissa_bits

    @property
    def codes_per_byte(self) -> int:
        """Codes that lie in one byte: two of e2m1, one of all others."""
        return BITS_PER_BYTE // self.bits

    @property
    def stored_bits(self) -> int:
        """Bits that a code takes where codes lie one after the other."""
        return BITS_PER_BYTE // self.codes_per_byte

    @property
    def has_stochastic(self) -> bool:
        """Whether elements may be rounded stochastically, which no scale is."""
        return self.has_sign

    @property
    def has_negative_zero(self) -> bool:
        """Whether zero has a sign; where it has none, the sign alone is the code of NaN."""
        return self.has_sign and self.nan_code != self.sign_code

    @property
    def sign_code(self) -> int:
        """The sign bit of a code: 0 where there is none."""
        return 1 << (self.bits - 1) if self.has_sign else 0

    @property
    def max_finite(self) -> float:
        """The largest finite value."""
        significand = 1 + (self.max_code % (1 << self.mantissa_bits)) / (1 << self.mantissa_bits)
        return significand * 2.0**self.emax

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def min_normal(self) -> float:
        """The smallest value whose significand has all its bits; E8M0 has no other."""
        return 2.0 ** (1 - self.bias) if self.has_sign else 2.0**-self.bias

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value."""
        return self.min_normal * 2.0**-self.mantissa_bits


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How the largest magnitude of a block becomes an E8M0 byte: one function, in two languages.

    ``definition`` and ``device`` are modules and names. The one takes amax, FP32 >= 0, and the
    `ElementFormat`, and returns uint8 of amax's shape. The other is a JIT function of amax and the
    `device_table.Element`, which does the same.
    """

    name: str
    definition: tuple[str, str]
    device: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Codec:
    """How blocks get their scales, and codes their values: two functions, in two languages.

    ``definition``: a module with, in PyTorch, of the amax of blocks, FP32 [rows, blocks]

        scales_of(amax, form, rule) -> (what they are multiplied by [rows, blocks], their scales
                                        [rows, blocks] or None, scales of rows [rows, 1] or None)
        factors_of(scales, row_scales) -> what codes are multiplied by, FP32 [rows, blocks]

    ``device``: a module with the same as JIT functions, where n blocks make rows of ROW elements

        scaled(x, CODEC, ROW, HARDWARE) -> (x times that, scales [n], row scales)
        factors(scales, row_scales, CODEC, HARDWARE) -> FP32 of the shape of either

    A block with an element that is NaN or infinite is multiplied by a NaN and its scale is one, so
    that all of it is decoded as NaN; no other block, nor its row's scale, depends on it.

    x is FP32 [n, elements of a block], or with ``in_halves`` two of them, [n, half of a block], so
    that a thread has all of a block. Of the two kinds of scales, one that the format has not may be
    anything that is returned, and is None where it is passed. `CODEC` is the `device_table.Codec`.
    One module may be both. The rest is what the functions are for: scales of ``scale_dtype``, which
    are those of whole rows only if they are FP32; blocks of ``block_numel``, ``None`` if of any;
    and whether there is a ``tensor_scale``.
    """

    definition: str
    device: str
    scale_dtype: torch.dtype
    in_halves: bool = False
    block_numel: int | None = None
    tensor_scale: bool = False


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Elements in blocks of consecutive elements of a row, one scale a block.

    ``block_numel`` is ``None`` where a whole row, or the whole tensor, is one block.
    ``tensor_scale`` says whether there is one FP32 scale for the whole tensor besides; in a message
    every row is a tensor. ``codec``: ``None`` where messages do not have the format.
    ``pack_tiles``: tiles of messages that a program packs to nearest; more than one where an
    element is so cheap that what a program finds in its table shows.
    """

    name: str
    element: ElementFormat
    block_numel: int | None
    scale_dtype: torch.dtype
    tensor_scale: bool = False
    codec: Codec | None = None
    pack_tiles: int = 1

    def __hash__(self) -> int:
        """Cheap, since every launch looks a format up; equal ones have one name."""
        return hash(self.name)

    def __post_init__(self) -> None:
        assert self.block_numel is None or self.block_numel > 0, self

    @property
    def has_rows(self) -> bool:
        """Whether every row of a message has an FP32 scale."""
        return self.tensor_scale or self.block_numel is None

    @property
    def has_rule(self) -> bool:
        """Whether scales are powers of two, which a `ScaleRule` makes."""
        return self.scale_dtype is E8M0.dtype

    @property
    def has_power_of_2(self) -> bool:
        """Whether scales are FP32, and may be rounded down to powers of two."""
        return self.scale_dtype is torch.float32

    @property
    def has_stochastic(self) -> bool:
        """Whether elements may be rounded stochastically."""
        return self.element.has_stochastic

    def num_blocks(self, numel: int) -> int:
        """Blocks, and so scales, of a row of `numel` elements; the last one may be short."""
        check_integer("numel", numel, 0)
        if self.block_numel is None:
            return min(numel, 1)
        return -(-numel // self.block_numel)

    def data_bytes(self, numel: int) -> int:
        """Bytes of the codes of a row of `numel` elements, two a byte for e2m1."""
        check_integer("numel", numel, 0)
        return -(-numel * self.element.stored_bits // BITS_PER_BYTE)

    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales of the blocks of a row of `numel` elements."""
        return self.num_blocks(numel) * self.scale_dtype.itemsize

    def num_bytes(self, numel: int) -> int:
        """Bytes of a row of `numel` elements: codes, scales, and the tensor's scale if it has one.

        Raises `ValueError` for a negative `numel`.
        """
        tensor_bytes = torch.float32.itemsize if self.tensor_scale and numel else 0
        return self.data_bytes(numel) + self.scale_bytes(numel) + tensor_bytes


# IEEE 754-2019, table 3.5: binary32 has p = 24, emax = 127.
FP32 = WireFormat("fp32", torch.float32, 32, (2.0 - 2.0**-23) * 2.0**127)
# The upper 16 bits of a binary32 (p = 8, emax = 127): Intel, "BFLOAT16 - Hardware Numerics
# Definition", 2018, section 1.
BF16 = WireFormat("bf16", torch.bfloat16, 16, (2.0 - 2.0**-7) * 2.0**127, has_stochastic=True)
# IEEE 754-2019, table 3.5: binary16 has p = 11, emax = 15.
FP16 = WireFormat("fp16", torch.float16, 16, (2.0 - 2.0**-10) * 2.0**15)

WIRE_FORMATS: tuple[WireFormat, ...] = (FP32, BF16, FP16)

# OCP, "8-bit Floating Point Specification (OFP8)", revision 1.0, 2023, tables 1 and 2.
E4M3 = ElementFormat("e4m3", 4, 3, 7, 0x7E, 0x7F, torch.float8_e4m3fn)
E5M2 = ElementFormat(
    "e5m2", 5, 2, 15, 0x7B, 0x7F, torch.float8_e5m2,
    infinity_code=0x7C, device=(_DEVICE_CODES, "OF_E5M2"),
)  # fmt: skip
# OCP, "Microscaling Formats (MX) Specification", version 1.0, 2023, sections 5.3.3 and 5.4.1.
E2M1 = ElementFormat(
    "e2m1", 2, 1, 1, 0x7, None, torch.uint8, device=(".formats.device_e2m1", "OF_E2M1")
)
E8M0 = ElementFormat(
    "e8m0", 8, 0, 127, 0xFE, 0xFF, torch.float8_e8m0fnu,
    has_sign=False, device=(_DEVICE_CODES, "OF_E8M0"),
)  # fmt: skip
# Noune et al., "8-bit Numerical Formats for Deep Neural Networks", 2022; AMD's CDNA3 ISA, 2023.
E4M3FNUZ = ElementFormat("e4m3fnuz", 4, 3, 8, 0x7F, 0x80, torch.float8_e4m3fnuz)

ELEMENT_FORMATS: tuple[ElementFormat, ...] = (E4M3, E5M2, E2M1, E8M0, E4M3FNUZ)

_CODES, _DEVICE_SCALES = ".formats.codes", ".formats.device_scales"
SCALE_RULES = {
    name: ScaleRule(name, (_CODES, f"scale_byte_{name}"), (_DEVICE_SCALES, f"scale_byte_{name}"))
    for name in ("rceil", "floor", "ceil", "even")
}

_FP8 = Codec(".fp8.codec", ".fp8.device_codec", torch.float32)
_MX = Codec(".mx.codec", ".mx.device_codec", E8M0.dtype)
_NVFP4 = Codec(
    ".nvfp4.codec", ".nvfp4.device_codec", E4M3.dtype,
    in_halves=True, block_numel=16, tensor_scale=True,
)  # fmt: skip

FP8_TENSOR = BlockFormat("fp8_tensor", E4M3, None, torch.float32)
FP8_ROW = BlockFormat("fp8_row", E4M3, None, torch.float32, codec=_FP8)
# DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2: tiles of 1 x 128.
FP8_1X128 = BlockFormat("fp8_1x128", E4M3, 128, torch.float32, codec=_FP8)
# OCP, "Microscaling Formats (MX) Specification", version 1.0, 2023, table 1.
MXFP8 = BlockFormat("mxfp8", E4M3, 32, E8M0.dtype, codec=_MX, pack_tiles=2)
MXFP4 = BlockFormat("mxfp4", E2M1, 32, E8M0.dtype, codec=_MX)
# NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, section 2.
NVFP4 = BlockFormat("nvfp4", E2M1, 16, E4M3.dtype, tensor_scale=True, codec=_NVFP4)

BLOCK_FORMATS: tuple[BlockFormat, ...] = (FP8_TENSOR, FP8_ROW, FP8_1X128, MXFP8, MXFP4, NVFP4)

MessageFormat = WireFormat | BlockFormat

ELEMENTS: dict[str, ElementFormat] = {form.name: form for form in ELEMENT_FORMATS}
CASTS: dict[str, ElementFormat | WireFormat] = {"bf16": BF16, "fp16": FP16, **ELEMENTS}
"""What `cast` knows."""
MESSAGES: dict[str, MessageFormat] = {
    **{form.name: form for form in WIRE_FORMATS},
    **{form.name: form for form in BLOCK_FORMATS if form.codec is not None},
}
"""The formats of wire messages; a format's place here stands for it in their headers."""


def rule_of(form: MessageFormat, rule: str, power_of_2: bool) -> ScaleRule | bool | None:
    """What the options say about the scales of this format: `None` where they say nothing."""
    if form.has_rule:
        return SCALE_RULES[rule]
    return power_of_2 if form.has_power_of_2 else None


_BY_DTYPE = {wire_format.dtype: wire_format for wire_format in WIRE_FORMATS}
_BY_NAME = {wire_format.name: wire_format for wire_format in WIRE_FORMATS}


def wire_format_of(dtype: torch.dtype) -> WireFormat:
    """The format whose elements have `dtype`; `ValueError` when the kernels know none."""
    found = _BY_DTYPE.get(dtype) if isinstance(dtype, torch.dtype) else None
    if found is None:
        known = ", ".join(str(known_dtype) for known_dtype in _BY_DTYPE)
        raise ValueError(f"dtype: expected one of {known}, got {dtype}; cast the tensor first")
    return found


def wire_format_named(name: str) -> WireFormat:
    """The format called `name`; `ValueError` when there is none."""
    check_choice("name", name, _BY_NAME)
    return _BY_NAME[name]
