"""Runs each kernel once on tensors of awkward sizes; made to be run under compute-sanitizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..kernels import (
    Segments,
    amax_nvfp4,
    cast,
    cast_back,
    dequantize_fp8,
    dequantize_mx,
    dequantize_nvfp4,
    flat_adamw_,
    flat_sgd_,
    hadamard16,
    l2_norm_,
    message_layout,
    pack_,
    pack_message_,
    quantize_fp8,
    quantize_mx,
    quantize_nvfp4,
    reduce_,
    reduce_messages_,
    reduce_peer_messages_,
    unpack_,
    unpack_message_,
    update_fp8_scales_,
)

SIZES = (1, 127, 2048, 4097, 9000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows of whole blocks and not; more and fewer than a program has.
SHAPES = ((4, 2048), (3, 1030), (2, 37))
NOISE: dict[str, Any] = {"rounding": "stochastic", "seed": 3}


def run(device: torch.device) -> None:
    """Aligned and unaligned, full tiles and tails, accumulating and not."""
    for shift in (0, 1):
        _many_tensors(device, shift)
        _messages(device, shift)
        for x in _matrices(device, shift):
            _casts(x)
            _blocks(x)
        _optimizers(device, shift)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _many_tensors(device: torch.device, shift: int) -> None:
    tensors = [
        torch.ones(numel + shift, dtype=dtype, device=device)[shift:]
        for dtype in DTYPES
        for numel in SIZES
    ]
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end + shift)
        end += -(-(tensor.numel() + shift) // 128) * 128
    flat = torch.zeros(end, device=device)
    for accumulate in (False, True):
        pack_(flat, tensors, offsets, scale=0.5, accumulate=accumulate)
        unpack_(tensors, flat, offsets, accumulate=accumulate)
    for dtype in DTYPES:
        parts = torch.ones(3 * 4099 + shift, dtype=dtype, device=device)[shift:].view(3, 4099)
        reduce_(torch.zeros(4099, device=device), parts, accumulate=True)
    norm = torch.zeros((), device=device)
    l2_norm_(norm, tensors, found_inf=torch.zeros((), device=device))


def _messages(device: torch.device, shift: int) -> None:
    tensors = [torch.ones(numel + shift, device=device)[shift:] for numel in SIZES]
    for name in ("bf16", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4"):
        layout = message_layout(name, SIZES, row_numel=128)
        memory = torch.empty(2 * layout.num_bytes + shift, dtype=torch.uint8, device=device)
        messages = memory[shift:].view(2, layout.num_bytes)
        for message in messages:
            pack_message_(message, tensors, name, row_numel=128)
        unpack_message_(tensors, messages[0], name, row_numel=128, accumulate=True)
        out = torch.zeros(layout.numel + shift, device=device)[shift:]
        reduce_messages_(out, messages, name, row_numel=128, accumulate=True)
        reduce_peer_messages_(out, list(messages), name, row_numel=128)


def _matrices(device: torch.device, shift: int) -> Iterator[torch.Tensor]:
    for rows, columns in SHAPES:
        memory = torch.ones(rows * columns + shift, dtype=torch.bfloat16, device=device)
        yield memory[shift:].view(rows, columns)


def _casts(x: torch.Tensor) -> None:
    for to in ("bf16", "fp16", "e4m3", "e2m1", "e8m0"):
        cast_back(cast(x, to), to)
    cast(x, "e2m1", **NOISE)
    cast(x, "bf16", **NOISE)
    for scaling in ("tensor", "row", "1x128", "128x128"):
        dequantize_fp8(*quantize_fp8(x, scaling=scaling), scaling=scaling)
    history, scales = torch.ones(3, 5, device=x.device), torch.ones(3, device=x.device)
    quantize_fp8(x, scale=scales[1], amax=history[1, 0])
    update_fp8_scales_(history, scales)


def _blocks(x: torch.Tensor) -> None:
    row_numel = x.shape[-1]
    for swizzled in (False, True):
        for element in ("e4m3", "e2m1"):
            made = quantize_mx(x, element=element, swizzled=swizzled)
            dequantize_mx(*made, element=element, swizzled=swizzled, row_numel=row_numel)
        parts = quantize_nvfp4(x, swizzled=swizzled, hadamard=swizzled)
        dequantize_nvfp4(*parts, swizzled=swizzled, row_numel=row_numel)
    quantize_mx(x, element="e2m1", **NOISE)
    quantize_nvfp4(x, variant="torchao", **NOISE)
    amax_nvfp4(x)
    hadamard16(x, inverse=True)


def _optimizers(device: torch.device, shift: int) -> None:
    numel = 9000
    param, grad, first, second = (
        torch.ones(numel + shift, device=device)[shift:] for _ in range(4)
    )
    codes = torch.zeros(numel + shift, dtype=torch.uint8, device=device)[shift:]
    one, step = torch.ones((), device=device), torch.ones((), device=device)
    segments = Segments([0, 4100, 8999], *(torch.ones(3, device=device) for _ in range(2)))
    flat_adamw_(param, grad, first, second, one, step, segments=segments)
    flat_adamw_(
        param,
        grad,
        first,
        second,
        one,
        step,
        compute=codes,
        compute_scale=one,
        amax=torch.zeros((), device=device),
    )
    flat_sgd_(param, grad.bfloat16(), first, one, step, momentum=0.9, compute=codes.bfloat16())


if __name__ == "__main__":
    run(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
