"""MX casts against torchao's on a CPU, bit for bit wherever the two define the same."""

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from sidestream.kernels.formats.table import E2M1, ELEMENTS
from sidestream.kernels.mx.op import quantize_mx
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.mx import cases as mx_cases

MODES = {rule: ScaleCalculationMode[rule.upper()] for rule in ("floor", "ceil", "even", "rceil")}
COMBINATIONS = pytest.mark.parametrize(("element", "rule"), mx_cases.COMBINATIONS, ids=str)


def both(x, element, rule):
    """(Our scale bytes, our data, torchao's scale bytes, its data), as bytes, a row a block."""
    data, scales = quantize_mx(x, element=element, rule=rule)
    dtype = torch.float4_e2m1fn_x2 if element == E2M1.name else ELEMENTS[element].dtype
    other_scales, other_data = to_mx(x, dtype, 32, MODES[rule])
    return [
        made.view(torch.uint8).view(x.numel() // 32, -1)
        for made in (scales, data, other_scales, other_data)
    ]


def is_near_power(amax, element):
    """Where amax / max is a power of two but for a few of FP32's ulps, which log2 cannot see."""
    significand, _ = torch.frexp(amax.double() / ELEMENTS[element].max_finite)
    off = torch.minimum(significand - 0.5, 1 - significand)
    return off <= 16 * 2.0**-24


@COMBINATIONS
def test_normal_values(element, rule):
    """Gaussian, heavy-tailed, of every magnitude: nothing excepted but what log2 rounds."""
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    powers = torch.randint(-60, 60, (256, 1), generator=torch.Generator().manual_seed(2))
    x[:256] *= torch.exp2(powers.float())
    x[256:384] = mx_cases.heavy_tailed(128 * 256).view(128, 256)
    for source in (x, x.bfloat16()):
        scales, data, other_scales, other_data = both(source, element, rule)
        near = torch.zeros(len(scales), dtype=torch.bool)
        if rule == "rceil":
            near = is_near_power(source.float().view(-1, 32).abs().amax(1), element)
            assert near.sum() < 0.02 * len(near)
        assert torch.equal(scales[~near], other_scales[~near])
        assert torch.equal(data[~near], other_data[~near])


@COMBINATIONS
def test_boundaries(element, rule):
    """Amaxes of every power of two, an ulp to each side, and what the rules turn on.

    Excepted, besides what log2 rounds: NaN and infinity, whose blocks torchao scales by 254 or 255
    and whose elements it encodes in its own way; the codes of byte 0, where it scales by 2^-126 or
    1 for 2^-127; under RCEIL subnormals, of which it takes FP32's log2.
    """
    x = mx_cases.blocks_of_amaxes()
    amax = x.abs().amax(1)
    kept = amax.isfinite()
    if rule == "rceil":
        kept &= ~is_near_power(amax, element) & (amax >= 2.0**-100)
    x = x[kept].contiguous()
    assert len(x) > 1000
    scales, data, other_scales, other_data = both(x, element, rule)
    assert torch.equal(scales, other_scales)
    normal = scales.view(-1) > 0
    assert normal.sum() > 1000
    assert torch.equal(data[normal], other_data[normal])


def test_the_exceptions_are_what_they_are_said_to_be():
    """Should torchao change, this tells."""
    inf = torch.zeros(1, 32)
    inf[0, 3] = float("inf")
    for rule, byte in {"rceil": 254, "floor": 247}.items():
        scales, _, other_scales, _ = both(inf, "e4m3", rule)
        assert scales.item() == 255
        assert other_scales.item() == byte
    nan = torch.full((1, 32), float("nan"))
    scales, data, other_scales, other_data = both(nan, "e2m1", "floor")
    assert scales.item() == other_scales.item() == 255
    assert data.eq(0x77).all()
    assert not other_data.eq(0x77).any()
    tiny = oracle.values(32, torch.float32, 1).view(1, 32).clamp(-1, 1) * 2.0**-126
    scales, data, other_scales, other_data = both(tiny, "e4m3", "rceil")
    assert scales.item() == other_scales.item() == 0
    assert not torch.equal(data, other_data)
