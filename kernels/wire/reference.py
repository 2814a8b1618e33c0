"""Owns the definition of wire messages in plain PyTorch: the GPU kernels' oracle, the CPU path.

    pack_message_    message = header | encode(v), v being 0, and float32(tensor) * scale in FP32
                     from each tensor's offset on
    unpack_message_  tensor  = round(decode(message)[o : o + n] * scale), or with `accumulate`
                               round(float32(tensor) + decode(message)[o : o + n] * scale)

| format           | encode, of v or of its rows of `row_numel` elements                        |
|------------------|----------------------------------------------------------------------------|
| fp32, bf16, fp16 | round(v), too large being infinity, as IEEE 754 has it                     |
| fp8_row          | `fp8.reference`, scaling "row"                                             |
| fp8_1x128        | `fp8.reference`, scaling "1x128"                                           |
| mxfp8, mxfp4     | `mx.reference`                                                             |
| nvfp4            | `nvfp4.reference`, variant "te", a row being a tensor with an amax for it  |

So a block knows nothing but itself, and for nvfp4 its row. NaN and infinity behave as those
modules say, in their block or row alone; what shares it with them, the gap after a tensor
included, is encoded as they say too. Stochastic rounding rounds elements, never scales: for FP8 it
is `codes.encode_stochastic(x * scale)`, for bf16 `codes.round_bf16_stochastic`; its noise is that
of `first_index` plus an element's place in its tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..formats import codes
from ..formats.noise import noise_bits
from ..formats.table import BF16, E4M3, MXFP4, MXFP8, NVFP4
from ..fp8 import reference as reference_fp8
from ..launch import ACCESS_BYTES, is_aligned
from ..mx import reference as reference_mx
from ..nvfp4 import reference as reference_nvfp4
from ..pack import reference
from .layout import DEFAULT_ROW_NUMEL, RAW_DTYPES, MessageLayout, layout_of_numel, write_header
from .reference_sum import decode_, sections


@dataclass(frozen=True, slots=True)
class MessageCast:
    """How tensors become a message, in the order in which the op takes it.

    rule: of MX's scales. power_of_2: of FP8's. With a `seed`, signed, of 64 bits, elements are
    rounded stochastically.
    """

    scale: float = 1.0
    row_numel: int = DEFAULT_ROW_NUMEL
    rule: str = "rceil"
    power_of_2: bool = False
    seed: int | None = None


def pack_message_(
    message: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    numel: int,
    offsets: Sequence[int],
    first_indices: Sequence[int],
    *options: Any,
) -> None:
    """Write every byte of `message`, of `numel` elements; `options` are those of `MessageCast`."""
    cast = MessageCast(*options)
    layout = layout_of_numel(format, numel, row_numel=cast.row_numel)
    made = aligned_memory(message)
    made.zero_()
    write_header(made, layout)
    if cast.seed is None and format in RAW_DTYPES:
        data = made[layout.data_at : layout.scales_at].view(RAW_DTYPES[format])
        reference.pack_(data, tensors, offsets, cast.scale)
    else:
        values = torch.zeros(numel, dtype=torch.float32, device=message.device)
        reference.pack_(values, tensors, offsets, cast.scale)
        for start, stop, first_index in _runs(numel, tensors, offsets, first_indices):
            for piece in _pieces(start, stop):
                index = first_index + piece.start - start
                _encode_(made, values[piece], layout, cast, piece.start, index)
    if made is not message:
        message.copy_(made)


def unpack_message_(
    tensors: Sequence[torch.Tensor],
    message: torch.Tensor,
    format: str,
    numel: int,
    offsets: Sequence[int],
    *options: Any,
) -> None:
    """Fill each of `tensors` from a message of `numel` elements, from its offset on.

    options: scale, accumulate, row_numel.
    """
    scale, accumulate, row_numel = options
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    values = torch.empty(numel, dtype=torch.float32, device=message.device)
    for piece in _pieces(0, numel):
        decode_(values[piece], message, layout, piece.start)
    reference.unpack_(tensors, values, offsets, scale, accumulate)


def aligned_memory(message: torch.Tensor) -> torch.Tensor:
    """`message`, if its sections can be accessed as what they hold, else as much new memory."""
    if is_aligned(message) and message.storage_offset() % ACCESS_BYTES == 0:
        return message
    return torch.empty_like(message)


def _runs(
    numel: int,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    first_indices: Sequence[int],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, index of the element at start): the vector, cut where indices do not go on."""
    filled = sorted(
        (offset, first_index)
        for tensor, offset, first_index in zip(tensors, offsets, first_indices, strict=True)
        if tensor.numel()
    )
    # What is before the first tensor is zeros, which no noise changes.
    start, index = 0, max(0, filled[0][1] - filled[0][0]) if filled else 0
    for offset, first_index in filled:
        if first_index != index + offset - start:
            if offset > start:
                yield start, offset, index
            start, index = offset, first_index
    yield start, numel, index


def _pieces(start: int, stop: int) -> Iterator[slice]:
    """Parts whose temporaries fit in a cache, of whole rows."""
    step = reference.CHUNK_NUMEL * torch.get_num_threads()
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _encode_(
    message: torch.Tensor,
    values: torch.Tensor,
    layout: MessageLayout,
    cast: MessageCast,
    start: int,
    first_index: int,
) -> None:
    """Write codes and scales of the FP32 `values`, the elements of the message from `start` on."""
    form, numel = layout.format, values.numel()
    data, scales, row_bytes = sections(message, layout, start, numel)
    rows = row_bytes.view(torch.float32)
    if form.name in (MXFP8.name, MXFP4.name):
        options = (form.element, cast.rule, cast.seed, first_index)
        reference_mx.quantize_mx_(data, scales, values, *options)
        return
    noise = None
    if cast.seed is not None:
        noise = noise_bits(cast.seed, first_index, numel, values.device)
    if form.name == BF16.name:
        assert noise is not None
        data.view(torch.bfloat16).copy_(codes.round_bf16_stochastic(values, noise))
    elif form.name == NVFP4.name:
        _encode_nvfp4_(data, scales, rows, values, noise)
    elif form.has_rows:
        _encode_fp8_(data, rows, values, noise, cast.power_of_2)
    else:
        _encode_fp8_(data, scales.view(torch.float32), values, noise, cast.power_of_2)


def _encode_fp8_(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    values: torch.Tensor,
    noise: torch.Tensor | None,
    power_of_2: bool,
) -> None:
    """A block of FP32 `values` for every element of `scale_inv`."""
    blocks = values.view(len(scale_inv), -1)
    scale = reference_fp8.scale_of(blocks.abs().amax(1), E4M3, power_of_2)
    scale_inv.copy_(torch.ones_like(scale) / scale)
    scaled = (blocks * scale.unsqueeze(1)).view(-1)
    if noise is None:
        data.copy_(codes.encode(scaled, E4M3))
    else:
        data.copy_(codes.encode_stochastic(scaled, E4M3, noise))


def _encode_nvfp4_(
    data: torch.Tensor,
    scales: torch.Tensor,
    row_amax: torch.Tensor,
    values: torch.Tensor,
    noise: torch.Tensor | None,
) -> None:
    """A row of FP32 `values` for every element of `row_amax`."""
    rows = values.view(len(row_amax), -1)
    row_amax.copy_(reference_nvfp4.magnitudes(rows).amax(1))
    made, made_scales = reference_nvfp4.quantize_piece(rows, row_amax.unsqueeze(1), noise, False)
    data.copy_(made.view(-1))
    scales.copy_(made_scales.view(-1))
