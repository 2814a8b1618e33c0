"""Element codes: ml_dtypes as an independent oracle, golden ties, the rule for NaN, statistics."""

import math
import struct

import ml_dtypes
import numpy
import pytest
import torch

from sidestream.kernels.formats import codes, noise
from sidestream.kernels.formats.table import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E8M0,
    ELEMENT_FORMATS,
    SCALE_RULES,
)
from sidestream.tests.kernels.formats import code_cases
from sidestream.tests.kernels.oracle import assert_same_bits

ORACLES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
}
NAN, INF = math.nan, math.inf
EVERY = pytest.mark.parametrize("element", ELEMENT_FORMATS, ids=lambda found: found.name)
SIGNED = pytest.mark.parametrize("element", code_cases.SIGNED, ids=lambda found: found.name)
DRAWS = 1_000_000


def encode_list(values, element):
    return codes.encode(torch.tensor(values), element).tolist()


@EVERY
def test_decode_is_ml_dtypes(element):
    every = torch.arange(1 << element.bits, dtype=torch.uint8)
    expected = every.numpy().view(ORACLES[element.name]).astype(numpy.float32)
    assert_same_bits(codes.decode(every, element), torch.from_numpy(expected))


@EVERY
def test_encode_is_ml_dtypes_where_it_saturates_nothing(element):
    """Every BF16, every midpoint and its neighbours: up to the largest finite value.

    Excepted: E8M0 below 1.5 * 2^-127, where ml_dtypes rounds FP32's subnormals up, however near.
    """
    values = code_cases.inputs(element)
    values = values[values.abs() <= element.max_finite]
    if not element.has_sign:
        values = values[values >= 1.5 * 2.0**-127]
    expected = torch.from_numpy(values.numpy().astype(ORACLES[element.name]).view(numpy.uint8))
    assert len(values) > 30_000
    found = codes.encode(values, element)
    assert torch.equal(found, expected & ((1 << element.bits) - 1))


@EVERY
def test_every_finite_code_decodes_and_encodes_to_itself(element):
    finite = code_cases.finite_codes(element)
    expected = {"e4m3": 254, "e5m2": 248, "e2m1": 16, "e8m0": 255, "e4m3fnuz": 255}
    assert len(finite) == expected[element.name]
    assert torch.equal(codes.encode(codes.decode(finite, element), element), finite)


@pytest.mark.parametrize("element", (*code_cases.SIGNED, E4M3FNUZ), ids=lambda found: found.name)
@pytest.mark.parametrize("bits", [0, 1, -1, 2**31 - 1, -(2**31)], ids=hex)
def test_what_a_format_holds_never_moves(element, bits):
    finite = code_cases.finite_codes(element)
    values = codes.decode(finite, element)
    drawn = torch.full(values.shape, bits, dtype=torch.int32)
    assert torch.equal(codes.encode_stochastic(values, element, drawn), finite)


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        (E4M3, [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0xFE, 0x7E, 0x00, 0x80, 0x00, 0x80]),
        (E5M2, [0x7F, 0x7F, 0x7B, 0xFB, 0x7B, 0xFB, 0x61, 0x00, 0x80, 0x00, 0x80]),
        (E2M1, [7, 7, 7, 15, 7, 15, 7, 0, 8, 0, 8]),
        (E8M0, [255, 255, 255, 255, 254, 254, 136, 0, 0, 0, 0]),
        (E4M3FNUZ, [0x80, 0x80, 0x7F, 0xFF, 0x7F, 0xFF, 0x7F, 0x00, 0x00, 0x00, 0x00]),
    ],
    ids=["e4m3", "e5m2", "e2m1", "e8m0", "e4m3fnuz"],
)
def test_what_a_format_cannot_hold(element, expected):
    """NaN of either sign, infinities, too large, zeros, too small; 640 is within E5M2 and E8M0."""
    values = [NAN, -NAN, INF, -INF, 3e38, -3e38, 640.0, 0.0, -0.0, 1e-45, -1e-45]
    assert encode_list(values, element) == expected
    if element.has_sign:
        drawn = torch.full((len(values),), -1, dtype=torch.int32)
        found = codes.encode_stochastic(torch.tensor(values), element, drawn).tolist()
        assert found[:6] + found[7:] == expected[:6] + expected[7:]


def test_e4m3fnuz_is_torch_s():
    """Every code, and every BF16, FP16 and boundary up to where torch begins to make NaNs: 248."""
    every = torch.arange(256, dtype=torch.uint8)
    assert_same_bits(codes.decode(every, E4M3FNUZ), every.view(torch.float8_e4m3fnuz).float())
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    values = torch.cat((code_cases.inputs(E4M3FNUZ), halves))
    expected = values.to(torch.float8_e4m3fnuz).view(torch.uint8)
    too_large = values.abs() >= 248.0
    saturated = torch.where(values > 0, 0x7F, 0xFF).to(torch.uint8)
    assert expected[too_large].eq(0x80).all()
    assert torch.equal(codes.encode(values, E4M3FNUZ), torch.where(too_large, saturated, expected))


def test_golden_ties():
    """Half way, the even mantissa wins: strict and loose bounds tell this rounding from others."""
    e2m1 = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 5.0000005: 7, 0.25000003: 1}
    assert encode_list(list(e2m1), E2M1) == list(e2m1.values())
    # 2^-10 is half of the smallest subnormal; 17 and 19 lie between 16, 18 and 20, 432 between 416
    # and 448; 464 would be between 448 and 480, the NaN.
    e4m3 = {2.0**-10: 0, 3 * 2.0**-10: 2, 17.0: 0x58, 19.0: 0x5A, 432.0: 0x7E, 464.0: 0x7E}
    assert encode_list(list(e4m3), E4M3) == list(e4m3.values())
    e5m2 = {2.0**-17: 0, 3 * 2.0**-17: 2, 9.0: 0x48, 11.0: 0x4A, 61440.0: 0x7B}
    assert encode_list(list(e5m2), E5M2) == list(e5m2.values())
    # The even significand of a power of two is the next one's: 1.5 goes up, as to nearest even.
    assert encode_list([1.5, 1.4999999, 3.0, 1.5 * 2.0**-127], E8M0) == [128, 127, 129, 1]


def _points(element):
    """20 magnitudes: subnormal, in every binade, next to a code, far from the middle, near max."""
    step = element.min_subnormal
    fractions = [0.01, 0.5, 0.77, 1.003, 1.25, 1.9999, 2.5, 3.3]
    points = [step * fraction for fraction in fractions]
    points += [element.min_normal * factor for factor in (1.0 + 1e-6, 1.1, 1.3, 1.77, 1.999)]
    points += [
        element.max_finite * factor for factor in (0.26, 0.35, 0.52, 0.61, 0.74, 0.93, 0.999)
    ]
    assert len(points) == 20
    return torch.tensor(points)


def _assert_unbiased(value, rounded):
    """Two neighbours at most, and the mean within 4 sigma of the value."""
    seen = rounded.double().unique()
    assert len(seen) <= 2
    assert seen.min() <= value <= seen.max() or len(seen) == 1
    low, high = seen.min().item(), seen.max().item()
    share = (value - low) / (high - low) if high > low else 0.0
    sigma = (high - low) * math.sqrt(max(share * (1 - share), 0.0) / DRAWS)
    if len(seen) == 1:
        pytest.fail(f"{value} never moved in {DRAWS} draws")
    assert abs(rounded.double().mean().item() - value) <= 4 * sigma
    return low, high


@SIGNED
def test_stochastic_rounding_is_unbiased_between_two_neighbours(element):
    drawn = noise.noise_bits(code_cases.SEED, 2**33, DRAWS)
    held = codes.decode(code_cases.finite_codes(element), element).double().unique()
    for index, point in enumerate(_points(element)):
        value = -point if index % 2 else point
        found = codes.encode_stochastic(value.expand(DRAWS).contiguous(), element, drawn)
        low, high = _assert_unbiased(value.item(), codes.decode(found, element))
        assert not ((held > low) & (held < high)).any(), "not neighbours"


def test_stochastic_bf16_is_unbiased_between_two_neighbours():
    drawn = noise.noise_bits(code_cases.SEED, 2**33, DRAWS)
    steps = [0.01, 0.3, 0.5, 0.7, 0.99]
    points = [2.0**power * (1 + step * 2.0**-7) for power in (-120, -3, 40, 127) for step in steps]
    for index, point in enumerate(points):
        value = torch.tensor(-point if index % 2 else point)
        found = codes.round_bf16_stochastic(value.expand(DRAWS).contiguous(), drawn).float()
        low, high = _assert_unbiased(value.item(), found)
        assert torch.tensor(low).bfloat16().view(torch.int16) - torch.tensor(high).bfloat16().view(
            torch.int16
        ) in (-1, 1)


def test_bf16_rule():
    values = torch.cat((code_cases.specials(), torch.tensor([3.3895314e38, -3.3961775e38])))
    for bits in (0, -1):
        found = codes.round_bf16_stochastic(values, torch.full(values.shape, bits).int())
        assert found[values.isnan()].view(torch.int16).eq(0x7FC0).all()
        infinite = values.isinf()
        assert torch.equal(found[infinite].float(), values[infinite])
        assert found[values.isfinite()].isfinite().all()
    held = code_cases.every_bf16()
    held = held[~held.isnan()]
    moved = codes.round_bf16_stochastic(held, torch.full(held.shape, -1).int())
    assert_same_bits(moved.float(), held)


@SIGNED
@pytest.mark.parametrize("size", [1, 33, 128, 1000], ids="shards of {}".format)
def test_any_sharding_gives_the_same_bits(element, size):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    whole = codes.encode_stochastic(values, element, noise.noise_bits(9, 0, 1000))
    for start in range(0, 1000, size):
        shard = values[start : start + size]
        drawn = noise.noise_bits(9, start, len(shard))
        found = codes.encode_stochastic(shard, element, drawn)
        assert torch.equal(found, whole[start : start + size])


def test_nibbles():
    """Code 2 * i is in the low nibble of byte i; an odd count leaves the last high nibble 0."""
    assert codes.pack_nibbles(torch.tensor([1, 2, 15], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    rows = torch.randint(0, 16, (3, 64)).to(torch.uint8)
    packed = codes.pack_nibbles(rows)
    assert packed.shape == (3, 32)
    assert torch.equal(codes.unpack_nibbles(packed), rows)
    assert torch.equal(codes.unpack_nibbles(packed, 63), rows[:, :63])
    assert codes.pack_nibbles(torch.empty(2, 0, dtype=torch.uint8)).shape == (2, 0)


def test_scales_and_their_reciprocals():
    every = torch.arange(256, dtype=torch.uint8)
    scales, reciprocals = codes.e8m0_to_fp32(every), codes.reciprocal_e8m0(every)
    exponents = torch.arange(255, dtype=torch.float64) - 127
    assert torch.equal(scales[:255].double(), torch.exp2(exponents))
    assert torch.equal(reciprocals[:255].double(), torch.exp2(-exponents))
    assert scales[255].isnan()
    assert reciprocals[255].isnan()


def _expected_byte(rule, amax, element):
    """The rule in exact arithmetic on Python floats, which hold every FP32 and their products."""
    if not math.isfinite(amax):
        return 255
    if amax == 0:
        return 0
    if rule == "rceil":
        reciprocal = struct.unpack("f", struct.pack("f", 1 / element.max_finite))[0]
        product = struct.unpack("f", struct.pack("f", amax * reciprocal))[0]
        if product == 0:
            return 0
        mantissa, exponent = math.frexp(product)
        return max(exponent - (mantissa == 0.5), -127) + 127
    if amax < 2.0**-126:
        return 0  # the exponent of a subnormal is below every byte's by emax at least
    mantissa, exponent = math.frexp(amax)
    mantissa, exponent = 2 * mantissa, exponent - 1
    if rule == "ceil":
        exponent += mantissa > 1
    elif rule == "even":
        exponent += mantissa + 0.5 * 2.0**-element.mantissa_bits >= 2
    return max(exponent - element.emax, -127) + 127


@SIGNED
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_scale_rules(rule, element):
    amaxes = code_cases.amaxes()
    found = codes.scale_byte(amaxes, element, SCALE_RULES[rule])
    expected = [_expected_byte(rule, amax, element) for amax in amaxes.tolist()]
    wrong = (found != torch.tensor(expected, dtype=torch.uint8)).nonzero().view(-1)
    assert len(wrong) == 0, [(amaxes[i].item(), found[i].item(), expected[i]) for i in wrong[:8]]


@SIGNED
def test_rules_differ_as_told(element):
    """RCEIL and CEIL never saturate the largest; FLOOR does by a bit less than the significand."""
    amaxes = torch.rand(4096, generator=torch.Generator().manual_seed(2)) * 100 + 1e-3
    for name, rule in SCALE_RULES.items():
        largest = amaxes * codes.reciprocal_e8m0(codes.scale_byte(amaxes, element, rule))
        assert (largest.max() <= element.max_finite) == (name in ("rceil", "ceil")), name
        assert largest.max() < 2.0 ** (element.emax + 1)


def test_nothing_depends_on_flushing_subnormals():
    every, amaxes = torch.arange(256, dtype=torch.uint8), code_cases.amaxes()
    inputs = {element: code_cases.inputs(element) for element in code_cases.SIGNED}

    def everything():
        results = [codes.decode(every, E8M0), codes.reciprocal_e8m0(every)]
        for element, values in inputs.items():
            drawn = noise.noise_bits(1, 0, len(values))
            results.append(codes.encode(values, element))
            results.append(codes.encode_stochastic(values, element, drawn))
            results += [codes.scale_byte(amaxes, element, rule) for rule in SCALE_RULES.values()]
        return results

    expected = everything()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        found = everything()
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_bad_arguments_say_what_is_expected():
    floats, ints = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"values: expected torch\.float32, got torch\.bfloat16"):
        codes.encode(floats.bfloat16(), E4M3)
    with pytest.raises(ValueError, match=r"noise: expected torch\.int32 of shape \(4,\), got .*64"):
        codes.encode_stochastic(floats, E4M3, ints.long())
    with pytest.raises(ValueError, match=r"noise: .* got torch\.int32 of \(3,\)"):
        codes.round_bf16_stochastic(floats, ints[:3])
    with pytest.raises(ValueError, match=r"element: expected a format with a sign, got e8m0"):
        codes.encode_stochastic(floats, E8M0, ints)
    with pytest.raises(ValueError, match=r"codes: expected torch\.uint8, got torch\.float8_e4m3fn"):
        codes.decode(floats.to(torch.float8_e4m3fn), E4M3)
    with pytest.raises(ValueError, match=r"amax: expected torch\.float32, got torch\.float64"):
        codes.scale_byte_floor(floats.double(), E4M3)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_a_nan_of_either_sign_makes_the_scale_nan(rule):
    nans = torch.tensor([0x7FC00000, -0x00400000], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert codes.scale_byte(nans, E4M3, SCALE_RULES[rule]).tolist() == [255, 255]
