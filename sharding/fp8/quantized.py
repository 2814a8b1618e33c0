"""Quantised tensors, whole or a stretch of their elements at a time, and what is one of another.

A matrix [rows, columns], all dimensions but the last being rows, is cut into blocks of height h and
width w; a rank has elements [start, stop) of it, in row-major order, and so parts of blocks:

    amaxes    FP32 [ceil(rows / h), ceil(columns / w)], the largest |x| of what is there of a block
    reduced   by maximum over the ranks, where one block lies on several
    scales    `kernels`' codec of the format says which: no formula is here
    codes     cast(x * factor of its block), one product in FP32, to nearest

So each code depends on its element and on the amax of its whole block alone: a tensor has the same
bits whoever quantises which part. They are those of `kernels.quantize_fp8`, `quantize_mx` and
`quantize_nvfp4` where all is finite. An element that is not spoils its block, as in messages: scale
and all values are NaN, whatever rank has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels import MXFP8, NVFP4, cast, cast_back, quantize_fp8
from ...kernels.arguments import check_source
from ...kernels.checks import check_like, check_result_dtype
from ...kernels.formats.table import named
from .recipes import Blocks


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Codes and scales of a tensor of `shape`, in memory that may be a view of anybody's.

    codes: of the elements' dtype and the tensor's shape, or uint8 [..., columns / 2] of e2m1, the
    even element in the low nibble. scales: as the kernels have them; with one block, [] FP32, what
    codes are multiplied by; with tiles [ceil(rows / 128), ceil(columns / 128)]; else [...,
    ceil(columns / width)]. amax: FP32 [], of NVFP4 alone. All contiguous.

    Raises:
        TypeError, ValueError: memory that is not as said.
    """

    blocks: Blocks
    shape: torch.Size
    codes: Tensor
    scales: Tensor
    amax: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        for name, (shape, dtype) in _memory(self.shape, self.blocks).items():
            check_like(name, getattr(self, name), shape, dtype, self.codes.device)

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], blocks: Blocks, device: torch.device | str | None = None
    ) -> QuantizedTensor:
        """Memory for one, its contents being anything.

        Raises:
            ValueError: rows of an odd number of elements, of which e2m1 has two a byte.
        """
        wanted = _memory(torch.Size(shape), blocks).items()
        memory = {
            name: torch.empty(one, dtype=dtype, device=device) for name, (one, dtype) in wanted
        }
        return cls(blocks, torch.Size(shape), **memory)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [shape], code times scale in FP32, rounded once to FP32, BF16 or FP16.

        Raises:
            ValueError: another dtype.
        """
        check_result_dtype(dtype)
        values = cast_back(self.codes, self.blocks.form.element.name)
        if not values.numel():
            return values.to(dtype)
        if self.blocks.width is None:
            return (values * self.scales).to(dtype)
        bits = self.scales if self.scales.dtype == torch.float32 else self.scales.view(torch.uint8)
        row_scales = None if self.amax is None else self.amax.view(1, 1)
        factors = codec_function(self.blocks, "factors_of")(bits.reshape(1, -1), row_scales)
        found = _scaled(values.view(-1), 0, self, factors.view(grid_of(self.shape, self.blocks)))
        return found.view(self.shape).to(dtype)

    def transposed(self) -> QuantizedTensor:
        """The transposed matrix, code by code.

        Raises:
            ValueError: it is no matrix, or blocks run along its rows.
        """
        if not self.blocks.is_symmetric or len(self.shape) != 2:  # noqa: PLR2004
            raise ValueError(
                f"transposed: expected a matrix in square blocks, got shape {tuple(self.shape)} in "
                f"blocks of {self.blocks.height} x {self.blocks.width}; quantise it transposed"
            )
        scales = self.scales.t().contiguous() if self.scales.dim() else self.scales
        shape = torch.Size(reversed(self.shape))
        return QuantizedTensor(self.blocks, shape, self.codes.t().contiguous(), scales)


def _memory(shape: torch.Size, blocks: Blocks) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of each part of a tensor of `shape`.

    Raises:
        ValueError: rows that are no whole number of bytes.
    """
    form, packed, scales = blocks.form, tuple(shape), tuple[int, ...]()
    a_byte = form.element.codes_per_byte
    if a_byte > 1:
        if not shape or shape[-1] % a_byte:
            raise ValueError(
                f"shape: expected rows of a multiple of {a_byte} elements for {form.name}, got "
                f"{tuple(shape)}; pad the last dimension"
            )
        packed = (*shape[:-1], shape[-1] // a_byte)
    if blocks.width is not None:
        down, across = grid_of(shape, blocks)
        scales = (down, across) if blocks.height > 1 else (*shape[:-1], across)
    found = {"codes": (packed, form.element.dtype), "scales": (scales, form.scale_dtype)}
    return found | ({"amax": ((), torch.float32)} if form.tensor_scale else {})


def columns_of(shape: torch.Size) -> int:
    """The elements of a row of a tensor, all of whose dimensions but the last are rows."""
    return shape[-1] if shape else 1


def grid_of(shape: torch.Size, blocks: Blocks) -> tuple[int, int]:
    """How many blocks lie below and beside each other."""
    if blocks.width is None:
        return 1, 1
    return -(-math.prod(shape[:-1]) // blocks.height), -(-columns_of(shape) // blocks.width)


def block_amaxes(elements: Tensor, start: int, shape: torch.Size, blocks: Blocks) -> Tensor:
    """FP32 [grid], of elements [n] that lie at `start` in a tensor of `shape`: 0 where there are
    none, NaN or infinity where one is that.
    """
    amaxes = torch.zeros(grid_of(shape, blocks), dtype=torch.float32, device=elements.device)
    if not elements.numel():
        return amaxes
    if blocks.width is None:
        return amaxes.copy_(elements.abs().amax())
    rows = _rows_of(elements, start, columns_of(shape), blocks.width)
    row_amaxes = rows.abs().amax(2)
    first, height = start // columns_of(shape), blocks.height
    missing = (0, 0, first % height, -(first + len(rows)) % height)
    found = functional.pad(row_amaxes, missing).view(-1, height, amaxes.shape[1]).amax(1)
    amaxes[first // height : first // height + len(found)] = found
    return amaxes


def tensor_amax(amaxes: Tensor) -> Tensor:
    """FP32 []: the largest of those that are finite, which is what a tensor's scale looks at."""
    finite = torch.where(amaxes.isfinite(), amaxes, 0.0).view(-1)
    return functional.pad(finite, (0, 1)).amax()  # one more, where there is no block at all


def fill_stretch(
    target: QuantizedTensor,
    elements: Tensor,
    start: int,
    amaxes: Tensor,
    *,
    scale: Tensor | None = None,
    largest: Tensor | None = None,
) -> None:
    """Write the codes of `elements` [n] that lie at `start`, and scales.

    amaxes: of all blocks, whose scales are then written. largest: FP32 [], the amax of the whole
    tensor, or [0] where the format needs none; then `amaxes` are complete for the blocks of these
    elements alone, and only their scales are written. scale: of one block, FP32 [], to take in
    place of the codec's.
    """
    blocks, form = target.blocks, target.blocks.form
    a_byte = form.element.codes_per_byte
    codes = target.codes.view(-1)[start // a_byte : -(-(start + elements.numel()) // a_byte)]
    if blocks.width is None:
        if scale is None:
            scale = codec_function(blocks, "scales_of")(amaxes, form, blocks.rule)[0]
        quantize_fp8(elements, element=form.element.name, scale=scale, out=(codes, target.scales))
        return
    whole = tensor_amax(amaxes) if largest is None else largest
    # The amax of the tensor goes along as one more block, since the codec looks at all there are.
    every = torch.cat((amaxes.view(-1), whole.view(-1))).view(1, -1)
    factors, scales, _ = codec_function(blocks, "scales_of")(every, form, blocks.rule)
    written = slice(None)
    if largest is not None:
        written = slice(start // blocks.width, -(-(start + elements.numel()) // blocks.width))
    stored = scales[0, : amaxes.numel()].view(target.scales.dtype)
    target.scales.view(-1)[written] = stored[written]
    if target.amax is not None:
        target.amax.copy_(whole)
    if elements.numel():
        grid = factors[0, : amaxes.numel()].view(amaxes.shape)
        cast(_scaled(elements, start, target, grid), form.element.name, out=codes)


def quantize(x: Tensor, blocks: Blocks, *, scale: Tensor | None = None) -> QuantizedTensor:
    """`x` [any shape], FP32, BF16 or FP16, contiguous. scale: see `fill_stretch`.

    Raises:
        TypeError, ValueError: an `x` that is no such tensor, a scale where there are several.
    """
    check_source("x", x)
    if scale is not None and blocks.width is not None:
        raise ValueError(
            f"scale: expected none for blocks of {blocks.height} x {blocks.width}, which have one "
            "each, got one; leave it out"
        )
    target = QuantizedTensor.empty(tuple(x.shape), blocks, x.device)
    elements = x.detach().view(-1)
    fill_stretch(target, elements, 0, block_amaxes(elements, 0, x.shape, blocks), scale=scale)
    return target


_THEIRS = {
    "Float8Tensor": "fp8",
    "Float8BlockwiseQTensor": "fp8",
    "MXFP8Tensor": MXFP8.name,
    "NVFP4Tensor": NVFP4.name,
    "QuantizedTensor": "another",
}
"""Formats of TransformerEngine's tensors by class, the base of all last."""


def _format_of(tensor: object) -> str | None:
    if isinstance(tensor, QuantizedTensor):
        form = tensor.blocks.form
        is_fp8 = form.element.bits == 8 and form.name != MXFP8.name  # noqa: PLR2004
        return "fp8" if is_fp8 else form.name
    for kind in type(tensor).__mro__:
        if kind.__module__.partition(".")[0] == "transformer_engine" and kind.__name__ in _THEIRS:
            return _THEIRS[kind.__name__]
    return None


def is_transformer_engine_tensor(tensor: object) -> bool:
    """Whether it is a quantised tensor of TransformerEngine's. That package is not imported: if
    nobody else has, nothing can be one.
    """
    return not isinstance(tensor, QuantizedTensor) and _format_of(tensor) is not None


def is_float8_tensor(tensor: object) -> bool:
    """Whether it is a `QuantizedTensor`, or TransformerEngine's, with elements of eight bits."""
    return _format_of(tensor) in ("fp8", MXFP8.name)


def is_mxfp8_tensor(tensor: object) -> bool:
    """Whether it is a `QuantizedTensor`, or TransformerEngine's, in MXFP8."""
    return _format_of(tensor) == MXFP8.name


def is_nvfp4_tensor(tensor: object) -> bool:
    """Whether it is a `QuantizedTensor`, or TransformerEngine's, in NVFP4."""
    return _format_of(tensor) == NVFP4.name


def codec_function(blocks: Blocks, name: str) -> Any:
    """A function of the format's codec: see `table.Codec`."""
    codec = blocks.form.codec
    assert codec is not None, blocks
    return named(codec.definition, name)


def _rows_of(elements: Tensor, start: int, columns: int, width: int) -> Tensor:
    """FP32 [rows, blocks, width] of the rows that elements [n] at `start` touch, zeros between."""
    before = start % columns
    behind = -(before + elements.numel()) % columns
    rows = functional.pad(elements.float(), (before, behind)).view(-1, columns)
    return functional.pad(rows, (0, -columns % width)).view(len(rows), -1, width)


def _scaled(elements: Tensor, start: int, target: QuantizedTensor, grid: Tensor) -> Tensor:
    """FP32 [n]: elements times the factors [grid] of their blocks."""
    blocks = target.blocks
    assert blocks.width is not None
    columns = columns_of(target.shape)
    rows = _rows_of(elements, start, columns, blocks.width)
    first = start // columns
    factors = grid[first // blocks.height :].repeat_interleave(blocks.height, 0)
    factors = factors[first % blocks.height :][: len(rows)].unsqueeze(2)
    values = (rows * factors).view(len(rows), -1)[:, :columns].reshape(-1)
    return values[start % columns :][: elements.numel()].contiguous()
