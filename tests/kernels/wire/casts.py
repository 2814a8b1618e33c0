"""What messages are to have, and to be decoded as, by the casts that have a format alone."""

import torch

from sidestream.kernels.formats import codes
from sidestream.kernels.formats.noise import noise_bits
from sidestream.kernels.formats.table import E4M3, E8M0
from sidestream.kernels.fp8.op import dequantize_fp8, quantize_fp8
from sidestream.kernels.mx.op import dequantize_mx, quantize_mx
from sidestream.kernels.nvfp4.op import dequantize_nvfp4, quantize_nvfp4
from sidestream.tests.kernels.wire import cases

ELEMENTS = {"mxfp8": "e4m3", "mxfp4": "e2m1"}


def encoded(vector, name, row_numel, **options):
    """(Data, scales, row scales) of the padded FP32 vector: bytes, but for row scales.

    A block with a NaN or infinity is NaNs, and zeros to the others.
    """
    if name in cases.RAW_DTYPES:
        return _by_casts(vector, name, row_numel, **options)
    numel = cases.block_numel(name, row_numel)
    blocks = vector.view(len(vector) // numel, numel)
    is_bad = ~blocks.isfinite().all(1)
    clean = blocks.masked_fill(is_bad.unsqueeze(1), 0.0).view(-1)
    data, scales, rows = _by_casts(clean, name, row_numel, **options)
    data.view(len(blocks), -1 if len(blocks) else 0)[is_bad] = cases.NAN_DATA[name]
    nan = cases.NAN_SCALES[name]
    if name == "fp8_row":
        rows[is_bad] = nan.view(torch.float32)
    else:
        scales.view(len(blocks), len(nan))[is_bad] = nan
    return data, scales, rows


def _by_casts(vector, name, row_numel, seed=None, rule="rceil", power_of_2=False):
    """`encoded` of a vector with finite elements. No cast is stochastic FP8, spelled out here."""
    options = {} if seed is None else {"rounding": "stochastic", "seed": seed}
    nothing = torch.empty(0)
    if name == "bf16" and seed is not None:
        made = codes.round_bf16_stochastic(vector, noise_bits(seed, 0, len(vector)))
        return made.view(torch.uint8), nothing, nothing
    if name in cases.RAW_DTYPES:
        return vector.to(cases.RAW_DTYPES[name]).view(torch.uint8), nothing, nothing
    if name in ELEMENTS:
        data, scales = quantize_mx(vector, element=ELEMENTS[name], rule=rule, **options)
        return data.view(torch.uint8), scales.view(torch.uint8), nothing
    if name == "nvfp4":
        rows = [
            quantize_nvfp4(row, first_index=index * row_numel, **options)
            for index, row in enumerate(vector.view(-1, row_numel))
        ]
        parts = zip(*rows, strict=True) if rows else ([nothing],) * 3
        data, scales, amaxes = (torch.stack(list(part)) for part in parts)
        return data.view(torch.uint8).view(-1), scales.view(torch.uint8).view(-1), amaxes.view(-1)
    rows = vector.view(-1, row_numel if name == "fp8_row" else 128)
    scaling = "row" if name == "fp8_row" else "1x128"
    data, inverses = quantize_fp8(rows, scaling=scaling, power_of_2=power_of_2)
    if seed is not None:
        amax = rows.abs().amax(1, keepdim=True)
        scale = torch.full_like(amax, 448.0) / amax
        scale = torch.where(amax > 0, scale, 1.0)
        bits = noise_bits(seed, 0, len(vector)).view(rows.shape)
        data = codes.encode_stochastic(rows * scale, E4M3, bits)
    bytes_of = data.view(torch.uint8).view(-1)
    if name == "fp8_row":
        return bytes_of, nothing, inverses.view(-1)
    return bytes_of, inverses.view(torch.uint8).view(-1), nothing


def decoded(message, layout):
    """The padded FP32 vector of a message, by the dequantisers that have a format alone."""
    name, row_numel = layout.format.name, layout.row_numel
    data, scales, rows, _ = (part.clone() for part in cases.sections(message, layout))
    if name in cases.RAW_DTYPES:
        return data.view(cases.RAW_DTYPES[name]).float()
    if name == "mxfp8":
        return dequantize_mx(data.view(E4M3.dtype), scales.view(E8M0.dtype))
    if name == "mxfp4":
        return dequantize_mx(data, scales.view(E8M0.dtype), element="e2m1")
    if name == "nvfp4":
        by_row = data.view(layout.num_rows, -1), scales.view(E4M3.dtype).view(layout.num_rows, -1)
        made = [dequantize_nvfp4(*parts) for parts in zip(*by_row, rows, strict=True)]
        return torch.cat(made)
    if name == "fp8_1x128":
        factors = scales.view(torch.float32)
        return dequantize_fp8(data.view(E4M3.dtype), factors, scaling="1x128")
    codes_by_row = data.view(E4M3.dtype).view(-1, row_numel)
    return dequantize_fp8(codes_by_row, rows.view(-1, 1), scaling="row").view(-1)
