"""The definition of FP8 scaling in PyTorch: the GPU kernels' oracle, and the CPU path.

    amax       max |x| of a block, ignoring nothing
    scale      min(max_finite / amax, FLT_MAX), IEEE division; 1 where amax is 0, inf or NaN;
               with power_of_2 its mantissa is cut off
    codes      encode(x * scale)                  one product in FP32, then `codes.encode`
    scale_inv  1 / scale, IEEE division           what is stored
    x again    round(decode(code) * scale_inv)    one product in FP32, then out's rounding

A block is all of the tensor, a row, 128 elements of a row, or 128 x 128 elements of a matrix; the
last in a row or a column may be short. With a scale given, as delayed scaling does, amax only
serves the record of it. Delayed scaling's update, for each tensor:

    largest    max(history), or history[0] for "most_recent"
    scale      max_finite * 2^-margin / largest, 2^-126 at least, so that its inverse is finite, and
               FLT_MAX at most; kept where `largest` is 0, inf or NaN
    history    rolled by one, so that [0] becomes the last, then history[0] = 0
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..formats import codes as element_codes
from ..formats.table import E4M3, E4M3FNUZ, E5M2, FP32
from ..pack.reference import CHUNK_NUMEL
from .codec import scale_of

SQUARE = 128  # elements of a block, along a row and along a column
ELEMENTS = {element.name: element for element in (E4M3, E5M2)}
"""What trainings may ask for."""
CAST_ELEMENTS = {**ELEMENTS, E4M3FNUZ.name: E4M3FNUZ}
"""What tensors are cast to."""
BY_DTYPE = {element.dtype: element for element in CAST_ELEMENTS.values()}
MIN_SCALE = torch.finfo(torch.float32).tiny


def quantize_fp8_(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    scaling: str,
    power_of_2: bool,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    """Fill `codes` and `scale_inv`; `amax` takes the larger of its value and that of `x`."""
    element = BY_DTYPE[codes.dtype]
    blocks = _blocks(x, scaling)
    if amax is not None:
        amax.copy_(torch.maximum(amax.view(()), _amax_of(x.view(1, 1, 1, -1)).view(())))
    if scale is None:
        factors = scale_of(_amax_of(blocks), element, power_of_2)
    else:
        factors = scale.view(1, 1, 1, 1)
    scale_inv.copy_((torch.ones_like(factors) / factors).view(scale_inv.shape))
    factors = factors.expand(blocks.shape)
    made = torch.empty(blocks.shape, dtype=torch.uint8, device=x.device)
    for piece in _pieces(blocks):
        made[piece] = element_codes.encode(blocks[piece].float() * factors[piece], element)
    codes.view(torch.uint8).copy_(_unblocked(made, x.shape, scaling))


def dequantize_fp8_(
    out: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor, scaling: str
) -> None:
    """Fill `out` with the values of `codes` times their blocks' `scale_inv`."""
    element = BY_DTYPE[codes.dtype]
    blocks = _blocks(codes.view(torch.uint8), scaling)
    factors = scale_inv.reshape(blocks.shape[0], 1, blocks.shape[2], 1).expand(blocks.shape)
    made = torch.empty(blocks.shape, dtype=out.dtype, device=out.device)
    for piece in _pieces(blocks):
        made[piece] = element_codes.decode(blocks[piece], element) * factors[piece]
    out.copy_(_unblocked(made, codes.shape, scaling))


def update_fp8_scales_(
    amax_history: torch.Tensor,
    scales: torch.Tensor,
    element: str,
    margin: int,
    algorithm: str,
) -> None:
    """The next `scales` from the history, and the history's next step."""
    largest = amax_history[:, 0] if algorithm == "most_recent" else amax_history.amax(1)
    target = torch.full_like(largest, CAST_ELEMENTS[element].max_finite * 2.0**-margin)
    usable = largest.isfinite() & (largest > 0)
    scales.copy_(torch.where(usable, (target / largest).clamp_(MIN_SCALE, FP32.max_finite), scales))
    amax_history.copy_(amax_history.roll(-1, 1))
    amax_history[:, 0] = 0


def scale_shape(shape: torch.Size, scaling: str) -> torch.Size:
    """The shape of `scale_inv` for elements of `shape`: () for a tensor, else one a block."""
    if scaling == "tensor":
        return torch.Size(())
    if scaling == "row":
        return torch.Size((*shape[:-1], 1))
    columns = -(-shape[-1] // SQUARE)
    if scaling == "1x128":
        return torch.Size((*shape[:-1], columns))
    return torch.Size((*shape[:-2], -(-shape[-2] // SQUARE), columns))


def _blocks(x: torch.Tensor, scaling: str) -> torch.Tensor:
    """`x` as [rows of blocks, rows of a block, blocks of a row, columns of a block].

    Missing elements are zeros, which change no amax. A view where none are missing.
    """
    if scaling == "tensor":
        return x.view(1, 1, 1, -1)
    columns = x.shape[-1]
    if scaling == "row":
        return x.view(-1, 1, 1, columns)
    height = SQUARE if scaling == "128x128" else 1
    matrices = x.view(-1, x.shape[-2] if height > 1 else 1, columns)
    missing = (0, -columns % SQUARE, 0, -matrices.shape[1] % height)
    if any(missing):
        matrices = torch.nn.functional.pad(matrices, missing)
    return matrices.unflatten(2, (-1, SQUARE)).view(-1, height, matrices.shape[2] // SQUARE, SQUARE)


def _unblocked(blocks: torch.Tensor, shape: torch.Size, scaling: str) -> torch.Tensor:
    """The elements of `shape` out of `_blocks`."""
    if scaling in ("tensor", "row"):
        return blocks.view(shape)
    rows = shape[-2] if scaling == "128x128" else 1
    padded_rows = -(-rows // blocks.shape[1]) * blocks.shape[1]
    matrices = blocks.view(-1, padded_rows, blocks.shape[2] * SQUARE)
    return matrices[:, :rows, : shape[-1]].reshape(shape)


def _amax_of(blocks: torch.Tensor) -> torch.Tensor:
    """FP32 max |x| of every block, a NaN if there is one."""
    return blocks.abs().amax((1, 3), keepdim=True).float()


def _pieces(blocks: torch.Tensor) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Parts of the blocks whose temporaries fit in a cache."""
    every = slice(None)
    step = max(1, CHUNK_NUMEL // max(1, blocks[0].numel()))
    for row in range(0, blocks.shape[0], step):
        for column in range(0, blocks.shape[3], CHUNK_NUMEL):
            yield slice(row, row + step), every, every, slice(column, column + CHUNK_NUMEL)
