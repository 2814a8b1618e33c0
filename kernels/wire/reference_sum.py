"""Owns the definition of the sum of wire messages in plain PyTorch: the GPU kernels' oracle.

It is the CPU path as well. A message is what `layout` describes, `decode` is what the
references of the formats define, in FP32, and all sums are in FP32, one after the other, in rank
order:

    acc    ((decode(message 0) + decode(message 1)) + decode(message 2)) + ...
    out    round(acc * scale), or with `accumulate` round(float32(out) + acc * scale)

| format           | decode                                                    | defined by        |
|------------------|-----------------------------------------------------------|-------------------|
| fp32, bf16, fp16 | the element                                               | IEEE 754          |
| fp8_row          | code * scale of its row                                   | `fp8.reference`   |
| fp8_1x128        | code * scale of its 128 elements                          | `fp8.reference`   |
| mxfp8, mxfp4     | code * 2^(byte - 127) of its 32 elements                  | `mx.reference`    |
| nvfp4            | code * ((scale of its 16 * amax of its row) * (1 / 2688)) | `nvfp4.reference` |

A scale that is NaN, byte 255 of E8M0 or 0x7F of E4M3, makes its own block NaN and no other element.
Everything is elementwise but for the scales, so no result depends on how the work is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..formats.table import BITS_PER_BYTE, E4M3, FP8_1X128, FP8_ROW, NVFP4
from ..fp8 import reference as reference_fp8
from ..mx import reference as reference_mx
from ..nvfp4 import reference as reference_nvfp4
from ..pack import reference
from .layout import DEFAULT_ROW_NUMEL, RAW_DTYPES, MessageLayout, layout_of_numel

_MX = ("mxfp8", "mxfp4")
_FP32_BITS = torch.float32.itemsize * BITS_PER_BYTE


def reduce_messages_(
    out: torch.Tensor,
    messages: torch.Tensor,
    format: str,
    scale: float = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """Sum the rows of `messages` [world, bytes] into `out`, which shares no memory with them."""
    reduce_peer_messages_(out, messages.unbind(), format, scale, accumulate, row_numel)


def reduce_peer_messages_(
    out: torch.Tensor,
    messages: Sequence[torch.Tensor],
    format: str,
    scale: float = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """Sum `messages`, each 1-D bytes, in their order into `out`."""
    numel = out.numel()
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    chunk = reference.CHUNK_NUMEL * torch.get_num_threads()
    for start in range(0, numel, chunk):
        piece = out[start : start + chunk]
        total = torch.empty_like(piece, dtype=torch.float32)
        decode_(total, messages[0], layout, start)
        values = torch.empty_like(total)
        for message in messages[1:]:
            decode_(values, message, layout, start)
            total.add_(values)
        reference.reduce_(piece, total.unsqueeze(0), scale, accumulate)


def decode_(values: torch.Tensor, message: torch.Tensor, layout: MessageLayout, start: int) -> None:
    """Fill the FP32 `values` with the elements of a message from `start` on.

    Values begin and end where a row of the message does.
    """
    form, row_numel = layout.format, layout.row_numel
    data, scales, row_bytes = sections(message, layout, start, values.numel())
    row_scales = _elements(row_bytes, torch.float32).view(-1, 1)
    if form.name in RAW_DTYPES:
        values.copy_(_elements(data, RAW_DTYPES[form.name]))
    elif form.name in _MX:
        reference_mx.dequantize_mx_(values, data, scales, form.element)
    elif form.name == FP8_1X128.name:
        factors = _elements(scales, torch.float32)
        reference_fp8.dequantize_fp8_(values, data.view(E4M3.dtype), factors, "1x128")
    elif form.name == FP8_ROW.name:
        rows = values.view(-1, row_numel)
        codes = data.view(E4M3.dtype).view(-1, row_numel)
        reference_fp8.dequantize_fp8_(rows, codes, row_scales, "row")
    else:
        assert form.name == NVFP4.name, form
        rows = values.view(-1, row_numel)
        reference_nvfp4.dequantize_nvfp4_(rows, data.view(len(rows), -1), scales, row_scales)


def sections(
    message: torch.Tensor, layout: MessageLayout, start: int, numel: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of the codes, scales and row scales of `numel` elements from `start` on.

    Both begin and end where a row does; of what the format has not there are no bytes.
    """
    form = layout.format
    data = _section(message, layout.data_at, start * form.element_bits, numel * form.element_bits)
    scales, row_scales = data[:0], data[:0]
    if form.block_numel:
        bits = form.scale_bytes * BITS_PER_BYTE
        first, count = start // form.block_numel, numel // form.block_numel
        scales = _section(message, layout.scales_at, first * bits, count * bits)
    if form.has_rows:
        first, count = start // layout.row_numel, numel // layout.row_numel
        row_scales = _section(message, layout.row_scales_at, first * _FP32_BITS, count * _FP32_BITS)
    return data, scales, row_scales


def _section(message: torch.Tensor, at: int, first_bit: int, num_bits: int) -> torch.Tensor:
    """The bytes of a part of the section that begins at byte `at`."""
    return message[at + first_bit // BITS_PER_BYTE :][: num_bits // BITS_PER_BYTE]


def _elements(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers, by way of a copy where they do not lie as such numbers may."""
    if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype)
