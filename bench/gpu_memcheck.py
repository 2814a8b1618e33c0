"""Runs each kernel once on tensors of awkward sizes; made to be run under compute-sanitizer."""

from __future__ import annotations

import torch

from ..kernels import pack_, reduce_, unpack_

SIZES = (1, 127, 2048, 4097, 9000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(device: torch.device) -> None:
    """Aligned and unaligned, full tiles and tails, every dtype, accumulating and not."""
    for shift in (0, 1):
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    run(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
