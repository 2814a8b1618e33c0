"""Messages for the sum over ranks: random ones with all that is special, and what they hold.

Headers and padding are poison, as nobody may look at them.
"""

import math

import torch

from sidestream.kernels.formats import codes
from sidestream.kernels.formats.table import E4M3, MESSAGES
from sidestream.kernels.fp8 import reference as reference_fp8
from sidestream.kernels.mx import reference as reference_mx
from sidestream.kernels.nvfp4 import reference as reference_nvfp4
from sidestream.kernels.pack import reference
from sidestream.kernels.wire.layout import layout_of_bytes, layout_of_numel
from sidestream.tests.kernels import oracle

FORMATS = tuple(MESSAGES)
SCALED = FORMATS[3:]
RAW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POISON = 0xAB
MODES = [(1.0, False), (0.3, False), (1.0, True), (0.3, True)]
MODE_IDS = ["sum", "scale", "accumulate", "scale-accumulate"]
# FP32 scales and amaxes beyond the usual: a block of each is in a message that is long enough.
SPECIAL_SCALES = (0.0, 1e-40, 3e38, 2.0**101, math.inf, -1.0, math.nan)
SPECIAL_E8M0 = (0, 1, 254, 255)
SPECIAL_E4M3 = (0x00, 0x01, 0x7E, 0x7F, 0x80)


def random_message(format, numel, row_numel, seed):
    """Any codes, NaNs too, with scales that are mostly usual; uint8 [num_bytes]."""
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    generator = torch.Generator().manual_seed(seed)
    message = torch.full((layout.num_bytes,), POISON, dtype=torch.uint8)
    if format in RAW:
        data = oracle.values(numel, RAW[format], seed).view(torch.uint8)
    else:
        data = torch.randint(0, 256, (layout.data_bytes,), generator=generator).byte()
    write(message, layout.data_at, data)
    if format in ("mxfp8", "mxfp4"):
        scales = torch.randint(110, 140, (layout.num_scales,), generator=generator).byte()
        write(message, layout.scales_at, strewn(scales, SPECIAL_E8M0, generator))
    elif format == "nvfp4":
        scales = torch.randint(0x20, 0x7F, (layout.num_scales,), generator=generator).byte()
        write(message, layout.scales_at, strewn(scales, SPECIAL_E4M3, generator))
    elif format == "fp8_1x128":
        write(message, layout.scales_at, fp32_scales(layout.num_scales, generator))
    write(message, layout.row_scales_at, fp32_scales(layout.num_rows, generator))
    return message


def fp32_scales(count, generator):
    scales = torch.rand(count, generator=generator) + 0.1
    scales *= torch.exp2(torch.randint(-12, 12, (count,), generator=generator).float())
    return strewn(scales, SPECIAL_SCALES, generator).view(torch.uint8)


def strewn(values, specials, generator):
    """`values` with one of each of `specials`, if they are a sixth of them or less."""
    if len(values) >= 6 * len(specials):
        places = torch.randperm(len(values), generator=generator)[: len(specials)]
        values[places] = torch.tensor(specials, dtype=values.dtype)
    return values


def write(message, at, data):
    message[at : at + len(data)] = data


def random_messages(format, world, numel, row_numel=1024, seed=0):
    rows = [random_message(format, numel, row_numel, seed + rank) for rank in range(world)]
    return torch.stack(rows)


def part(message, at, num_bytes, dtype):
    return message[at : at + num_bytes].clone().view(dtype)


def decoded(message, format, numel, row_numel):
    """FP32 [numel] by the references of the formats: all at once, NVFP4 row by row."""
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    if format in RAW:
        return part(message, layout.data_at, layout.data_bytes, RAW[format]).float()
    values = torch.full((numel,), math.nan)
    data = part(message, layout.data_at, layout.data_bytes, torch.uint8)
    row_scales = part(message, layout.row_scales_at, 4 * layout.num_rows, torch.float32)
    num_bytes = layout.scales_end - layout.scales_at
    scales = part(message, layout.scales_at, num_bytes, torch.uint8)
    if format in ("mxfp8", "mxfp4"):
        element = "e4m3" if format == "mxfp8" else "e2m1"
        reference_mx.dequantize_mx_(values, data, scales, element)
    elif format == "fp8_1x128":
        factors = scales.view(torch.float32)
        reference_fp8.dequantize_fp8_(values, data.view(E4M3.dtype), factors, "1x128")
    elif format == "fp8_row":
        rows, made = values.view(-1, row_numel), data.view(E4M3.dtype).view(-1, row_numel)
        reference_fp8.dequantize_fp8_(rows, made, row_scales.view(-1, 1), "row")
    else:
        rows = zip(
            values.view(-1, row_numel),
            data.view(-1, row_numel // 2),
            scales.view(-1, row_numel // 16),
            row_scales,
            strict=True,
        )
        for row, row_data, row_bytes, amax in rows:
            reference_nvfp4.dequantize_nvfp4_(row, row_data, row_bytes, amax)
    return values


def element_by_element(message, format, numel, row_numel):
    """FP32 [numel] from the layout: a scale for each element, where amaxes are usual."""
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    element = torch.arange(numel)
    if format in RAW:
        width = RAW[format].itemsize
        places = layout.data_at + element.unsqueeze(1) * width + torch.arange(width)
        return message[places].view(RAW[format]).view(-1).float()
    form = layout.format.element
    if form.name == "e2m1":
        code = (message[layout.data_at + element // 2] >> (element % 2 * 4).byte()) & 0xF
    else:
        code = message[layout.data_at + element]

    def fp32_at(start, index):
        return message[(start + 4 * index).unsqueeze(1) + torch.arange(4)].view(torch.float32)[:, 0]

    if format == "fp8_row":
        factor = fp32_at(layout.row_scales_at, element // row_numel)
    elif format == "fp8_1x128":
        factor = fp32_at(layout.scales_at, element // 128)
    elif format == "nvfp4":
        amax = fp32_at(layout.row_scales_at, element // row_numel)
        scale = codes.decode(message[layout.scales_at + element // 16], E4M3)
        factor = (scale * amax) * torch.tensor(1 / 2688)
    else:
        factor = codes.e8m0_to_fp32(message[layout.scales_at + element // 32])
    return codes.decode(code, form) * factor


def check(reduce_, messages, format, out_dtype, options, *, start=0, decode=decoded):
    """Reduce with `reduce_` and by decoding all, canaries around `out` and messages compared too.

    options: (scale, accumulate, row_numel). start: elements of `out` after an aligned address.
    """
    scale, accumulate, row_numel = options
    numel = layout_of_bytes(format, len(messages[0]), row_numel=row_numel).numel
    around = torch.full((start + numel + 130,), oracle.CANARY, dtype=out_dtype)
    out = around[start : start + numel]
    out.copy_(oracle.values(numel, out_dtype, seed=numel))
    expected = around.clone()
    parts = torch.stack([decode(message, format, numel, row_numel) for message in messages])
    reference.reduce_(expected[start : start + numel], parts, scale, accumulate)
    before = [message.clone() for message in messages]
    reduce_(out, messages, format, scale, accumulate, row_numel)
    oracle.assert_same_bits(around, expected)
    assert all(map(torch.equal, messages, before))
    return out


def unaligned(messages, late_bytes=1):
    """The same rows `late_bytes` after an aligned address: [world, num_bytes]."""
    memory = torch.full((messages.numel() + late_bytes,), POISON, dtype=torch.uint8)
    found = memory[late_bytes:].view(messages.shape)
    return found.copy_(messages)


def scattered(messages):
    """The rows as a list of tensors that begin at addresses of every kind."""
    return [unaligned(row, rank * 3 % 7) for rank, row in enumerate(messages)]
