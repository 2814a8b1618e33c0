"""The conversions and the noise made fast for a CPU have the bits of their definitions."""

import pytest
import torch

from sidestream.kernels.formats import codes, cpu_codes
from sidestream.kernels.formats.cpu_noise import Noise
from sidestream.kernels.formats.noise import MAX_INDEX, noise_bits
from sidestream.kernels.formats.table import BF16, E2M1, E4M3, E5M2, E8M0
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire.toy import E3M2

ELEMENTS = {element.name: element for element in (E4M3, E2M1, E3M2, E5M2)}
ELEMENT = pytest.mark.parametrize("name", ELEMENTS)
ALIGN = 128
SEEDS = (0, 3, -1, -(2**63), 2**64 - 1)


@pytest.fixture(params=[False, True], ids=["subnormals", "flushed"])
def flushed(request):
    """With and without a processor that takes subnormals for zeros."""
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this processor always has subnormals")
    yield
    torch.set_flush_denormal(False)


def every_kind():
    """FP32 of each sign and exponent, mantissas of all upper bits and some below."""
    upper = torch.arange(2 << 8 + 7, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper.unsqueeze(1) + lower).view(-1)
    return bits.to(torch.int32).view(torch.float32)


def found(values, element, noise=None):
    scratch = cpu_codes.Scratch(values.numel())
    stored = torch.empty(values.numel() * element.stored_bits // 8, dtype=torch.uint8)
    given = None if noise is None else noise.clone()
    cpu_codes.store_(stored, values.clone(), element, given, scratch)
    return stored


@ELEMENT
def test_codes_to_nearest(name, flushed):
    values, element = every_kind(), ELEMENTS[name]
    assert torch.equal(found(values, element), codes.stored(values, element))


@ELEMENT
def test_codes_next_to_every_tie(name):
    """The values of a format, halves and quarters between them, and what is next to each."""
    element = ELEMENTS[name]
    every = codes.decode(torch.arange(1 << element.bits, dtype=torch.uint8), element)
    finite = every[every.isfinite()].sort().values
    points = torch.cat([finite[:-1] + finite.diff() * part for part in (0.0, 0.25, 0.5, 0.75)])
    points = torch.cat((points, finite[-1:], finite[-1:] * 1.25, -finite[-1:] * 1.25))
    bits = points.view(torch.int32).unsqueeze(1) + torch.arange(-2, 3, dtype=torch.int32)
    values = torch.nn.functional.pad(bits.view(-1), (0, -bits.numel() % ALIGN)).view(torch.float32)
    assert torch.equal(found(values, element), codes.stored(values, element))


@pytest.mark.parametrize("name", [*ELEMENTS, "bf16"])
@pytest.mark.parametrize("noise", ["none", "all", "random"])
def test_codes_by_noise(name, noise, flushed):
    values, element = every_kind(), (ELEMENTS | {"bf16": BF16})[name]
    if name == "bf16":
        values = torch.where(values.isfinite(), values, 3e38)
    bits = {"none": torch.zeros_like, "all": lambda like: torch.full_like(like, -1)}
    shape = values.view(torch.int32)
    made = bits[noise](shape) if noise in bits else noise_bits(7, 5, values.numel())
    expected = codes.stored(values, element, made).view(torch.uint8)
    assert torch.equal(found(values, element, made), expected)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")], ids=str)
def test_bf16_with_something_not_finite(bad):
    values, noise = torch.randn(256), noise_bits(7, 5, 256)
    values[77] = bad
    expected = codes.stored(values, BF16, noise).view(torch.uint8)
    assert torch.equal(found(values, BF16, noise), expected)


@ELEMENT
@pytest.mark.parametrize("has_nan", [True, False], ids=["every byte", "no NaN"])
def test_values_of_codes(name, has_nan):
    element = ELEMENTS[name]
    stored = torch.arange(256, dtype=torch.uint8)
    if not has_nan:
        stored[codes.loaded(stored, element).view(256, -1).isnan().any(1)] = 0
    expected = codes.loaded(stored, element)
    values = torch.empty_like(expected)
    cpu_codes.load_(values, stored, element, cpu_codes.Scratch(values.numel()))
    oracle.assert_same_bits(values, expected)


def test_e4m3_straight_to_bf16():
    """All codes but NaNs with each scale that it takes; of what it does not it says so."""
    block, largest = torch.arange(256, dtype=torch.uint8), 134
    block[codes.decode(block, E4M3).isnan()] = 0
    scales = torch.arange(largest + 1, dtype=torch.uint8)
    stored = block.repeat(len(scales))
    values = torch.full((len(scales), 256), torch.nan, dtype=torch.bfloat16)
    scratch = cpu_codes.Scratch(stored.numel())
    assert cpu_codes.load_bf16_(values, stored, scales, E4M3, scratch)
    factors = codes.decode(scales, E8M0).unsqueeze(1)
    expected = (codes.decode(block, E4M3) * factors).to(torch.bfloat16)
    assert torch.equal(values.view(torch.int16), expected.view(torch.int16))

    with_nan, too_large = stored.clone(), scales.clone()
    with_nan[-1], too_large[-1] = 0xFF, largest + 1
    for given in (with_nan, scales, E4M3), (stored, too_large, E4M3), (stored, scales, E5M2):
        assert not cpu_codes.load_bf16_(values, *given, scratch)


def test_e4m3_is_not_straight_bf16_where_subnormals_are_flushed(flushed):
    stored, scales = torch.ones(32, dtype=torch.uint8), torch.full((1,), 127, dtype=torch.uint8)
    values = torch.empty(1, 32, dtype=torch.bfloat16)
    if cpu_codes.load_bf16_(values, stored, scales, E4M3, cpu_codes.Scratch(ALIGN)):
        assert values.eq(2.0**-9).all()


@pytest.mark.parametrize("width", [16, 32, 128, 1024])
def test_amax(width):
    blocks = every_kind()[torch.randperm(len(every_kind()))].view(3, -1, width)
    found = cpu_codes.amax_of(blocks, cpu_codes.Scratch(blocks.numel()))
    assert torch.equal(found.view(torch.int32), codes.amax_of(blocks).view(torch.int32))


@pytest.mark.parametrize("seed", SEEDS, ids=hex)
@pytest.mark.parametrize("numel", [1, 16, 37, 4096])
def test_noise(seed, numel):
    """Whole groups and parts of them, and groups whose number exceeds 32 bits within the draw."""
    noise = Noise(seed)
    for first in (0, 16, 5, 2**36 - 32, 2**36 - 5, 2**40 + 7, MAX_INDEX - numel):
        drawn = torch.empty(numel, dtype=torch.int32)
        noise.draw_(drawn, first)
        assert torch.equal(drawn, noise_bits(seed, first, numel)), first
