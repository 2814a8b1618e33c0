"""A format from outside: rows, the one function that is new in two languages, and a naive loop.

e3m2, a byte each, in blocks of 16 with E8M0 scales, by a rule of its own: nobody but this file
knows them. What they are to be is written out here in Python's numbers, element by element.
"""

import contextlib
import math
import struct

import torch
import triton
import triton.language as tl

from sidestream import kernels as k
from sidestream.kernels.formats import codes, device_scales
from sidestream.kernels.formats.noise import noise_bits
from sidestream.kernels.formats.registration import registered
from sidestream.kernels.formats.table import E8M0, MXFP8, BlockFormat, ElementFormat, ScaleRule

BLOCK, EMAX, LARGEST = 16, 4, 28.0
E3M2 = ElementFormat("e3m2", 3, 2, 3, 0x1F, None, torch.uint8)
TOY = BlockFormat("toy", E3M2, BLOCK, E8M0.dtype, codec=MXFP8.codec)
GENEROUS = ScaleRule("generous", (__name__, "scale_byte"), (__name__, "device_scale_byte"))


def scale_byte(amax, element):
    """One more than `floor`, so that nothing saturates and a bit is lost."""
    return codes.scale_byte_floor(2 * amax, element)


@triton.jit
def device_scale_byte(amax, ELEMENT: tl.constexpr):
    """`scale_byte` inside a kernel."""
    return device_scales.scale_byte_floor(2 * amax, ELEMENT)


@contextlib.contextmanager
def formats():
    """Within the block the tables have the rows."""
    with registered(E3M2, TOY, GENEROUS):
        yield


def fp32(value):
    """Rounded to FP32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def value_of(code):
    """Of a code of e3m2: sign, three bits of exponent, two of mantissa."""
    field, mantissa = code >> 2 & 7, code & 3
    magnitude = mantissa / 16 if field == 0 else (1 + mantissa / 4) * 2.0 ** (field - 3)
    return -magnitude if code & 0x20 else magnitude


def code_of(value):
    """The nearest code, the even one of two as near; the largest for what is too large."""
    magnitude = min(abs(value), LARGEST)
    nearest = min(range(32), key=lambda code: (abs(value_of(code) - magnitude), code & 1))
    return nearest | 0x20 * (math.copysign(1.0, value) < 0)


def byte_of(amax, rule):
    """2^(byte - 127) for a block."""
    if amax == 0:
        return 0
    if rule == "rceil":
        mantissa, exponent = math.frexp(fp32(amax * fp32(1 / LARGEST)))
        return max(exponent - (mantissa == 0.5), -127) + 127
    assert rule == "generous"
    return max(math.frexp(2 * amax)[1] - 1 - EMAX, -127) + 127


def packed(vector, rule, numel=BLOCK):
    """(Codes, scale bytes) of a list whose length is a multiple of the block's `numel`."""
    made, scales = [], []
    for start in range(0, len(vector), numel):
        block = vector[start : start + numel]
        scales.append(byte_of(max(map(abs, block)), rule))
        made += [code_of(value * 2.0 ** (127 - scales[-1])) for value in block]
    return made, scales


def unpacked(made, scales, numel=BLOCK):
    """The list again."""
    return [value_of(code) * 2.0 ** (scales[i // numel] - 127) for i, code in enumerate(made)]


def tensors():
    """FP32 and BF16, of many magnitudes, none a NaN; the second is short."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(4700, generator=generator)
    values *= torch.exp2(torch.randint(-9, 9, values.shape, generator=generator).float())
    values[64:80] = 0.0
    return [values[:4600].clone(), values[4600:].bfloat16()]


def message_of(given, rule, **options):
    layout = k.message_layout("toy", [tensor.numel() for tensor in given])
    message = torch.full((layout.num_bytes,), 0xAB, dtype=torch.uint8)
    k.pack_message_(message, given, "toy", rule=rule, **options)
    return message, layout


def check_messages(rule):
    """The three acts on messages, against the loop."""
    given = tensors()
    message, layout = message_of(given, rule)
    assert k.read_header(message) == ("toy", layout.numel)
    vector = [0.0] * layout.numel
    for tensor, offset in zip(given, layout.offsets, strict=True):
        vector[offset : offset + tensor.numel()] = tensor.double().tolist()
    made, scales = packed(vector, rule)
    assert message[layout.data_at : layout.scales_at].tolist() == made
    assert message[layout.scales_at : layout.scales_end].tolist() == scales
    values = unpacked(made, scales)
    out = [torch.full_like(tensor, 7.0) for tensor in given]
    k.unpack_message_(out, message, "toy")
    for tensor, offset in zip(out, layout.offsets, strict=True):
        expected = torch.tensor(values[offset : offset + tensor.numel()], dtype=torch.float64)
        assert torch.equal(tensor, expected.to(tensor.dtype))
    total = torch.full((layout.numel,), 7.0)
    other, _ = message_of([-2 * tensor for tensor in given], rule)
    k.reduce_messages_(total, torch.stack([message, other]), "toy", scale=0.5)
    assert total.tolist() == [fp32(fp32(value - 2 * value) * 0.5) for value in values]


def check_stochastic():
    """Codes are those of `codes.encode_stochastic`, an element's noise being its index's."""
    given = tensors()
    message, layout = message_of(given, "rceil", rounding="stochastic", seed=11)
    vector = torch.zeros(layout.numel)
    for tensor, offset in zip(given, layout.offsets, strict=True):
        vector[offset : offset + tensor.numel()] = tensor.float()
    scales = message[layout.scales_at : layout.scales_end]
    factors = codes.reciprocal_e8m0(scales).repeat_interleave(BLOCK)
    noise = noise_bits(11, 0, layout.numel)
    expected = codes.encode_stochastic(vector * factors, E3M2, noise)
    assert torch.equal(message[layout.data_at : layout.scales_at], expected)


def check_cast():
    """An element alone, and back."""
    (x, _) = tensors()
    found = k.cast(x, "e3m2")
    expected = [code_of(value) for value in x.tolist()]
    assert found.tolist() == expected
    assert k.cast_back(found, "e3m2").tolist() == [value_of(code) for code in expected]


def check_mx():
    """A tensor's rows in MX's blocks of 32, one of them short, plain and swizzled."""
    x = tensors()[0][:4560].view(30, 152)
    rows = torch.nn.functional.pad(x, (0, 8)).tolist()
    made = [packed(row, "generous", 32) for row in rows]
    for swizzled in (False, True):
        options = {"element": "e3m2", "swizzled": swizzled}
        data, scales = k.quantize_mx(x, rule="generous", **options)
        assert data.tolist() == [codes[:152] for codes, _ in made]
        plain = k.unswizzle_scales(scales, 30, 5) if swizzled else scales
        assert plain.view(torch.uint8).tolist() == [scale_bytes for _, scale_bytes in made]
        expected = [unpacked(*row, 32)[:152] for row in made]
        assert k.dequantize_mx(data, scales, **options).tolist() == expected


CHECKS = {
    "rceil": lambda: check_messages("rceil"),
    "its own rule": lambda: check_messages("generous"),
    "stochastic": check_stochastic,
    "cast": check_cast,
    "mx": check_mx,
}
