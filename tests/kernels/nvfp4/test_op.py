"""NVFP4: golden vectors, independent oracles, error bounds, noise, special values."""

import math
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

from sidestream.kernels.formats import codes, swizzle
from sidestream.kernels.formats.table import E2M1, NVFP4
from sidestream.kernels.nvfp4.op import amax_nvfp4, dequantize_nvfp4, hadamard16, quantize_nvfp4
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.nvfp4 import cases as nvfp4_cases

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.prototype.mx_formats import nvfp4_tensor

UNIT = torch.tensor(2688.0)  # an amax that makes the tensor's scale 1
DTYPES = pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
VARIANTS = pytest.mark.parametrize("variant", ["te", "torchao"])


def codes_of(data, row_numel):
    return codes.unpack_nibbles(data, row_numel)


def bytes_of(scales):
    return scales.view(torch.uint8)


# With amax 2688 and a block's amax of 6, scale and factor are 1: the codes are those of x itself.
TIES = [
    (6.0, 7),  # the block's amax
    (0.25, 0),  # half of 0 and 0.5: code 0 is even
    (0.25000003, 1),
    (0.75, 2),  # of 0.5 and 1: code 2 is even
    (1.25, 2),  # of 1 and 1.5
    (1.75, 4),  # of 1.5 and 2
    (2.5, 4),  # of 2 and 3
    (3.5, 6),  # of 3 and 4
    (5.0, 6),  # of 4 and 6: code 6 is even
    (5.0000005, 7),
    (-5.0, 14),
    (-0.25, 8),  # the sign is kept where the value is not
    (-0.0, 8),
    (0.7499999, 1),
    (-1.0, 10),
    (0.0, 0),
]


@VARIANTS
def test_golden_elements(variant):
    x = torch.tensor([value for value, _ in TIES])
    data, scales, amax = quantize_nvfp4(x, global_amax=UNIT, variant=variant)
    assert amax is UNIT
    assert bytes_of(scales).tolist() == [0x38]
    assert codes_of(data, 16).tolist() == [code for _, code in TIES]
    assert data[0] == 7 | 0 << 4
    assert data[1] == 1 | 2 << 4  # the even element in the low nibble


SCALES = [
    (6.375, 0x38, 0x38),  # 1.0625, half of 1 and 1.125: mantissa 0 is even
    (7.125, 0x3A, 0x3A),  # 1.1875, half of 1.125 and 1.25: mantissa 2 is even
    (2688.0, 0x7E, 0x7E),  # the largest: 448
    (5000.0, 0x7E, 0x7E),  # beyond the amax that was given: saturates
    (6 * 2.0**-6, 0x08, 0x08),  # the smallest normal
    (6 * 2.0**-9, 0x01, 0x08),  # the smallest subnormal; torchao stops at 2^-6
    (6 * 2.0**-10, 0x00, 0x08),  # half of it: to even, 0
    (0.0, 0x00, 0x08),
]


@pytest.mark.parametrize(("block_amax", "te", "torchao"), SCALES)
def test_golden_scales(block_amax, te, torchao):
    x = torch.zeros(16)
    x[5] = -block_amax
    for variant, byte in (("te", te), ("torchao", torchao)):
        _, scales, _ = quantize_nvfp4(x, global_amax=UNIT, variant=variant)
        assert bytes_of(scales).tolist() == [byte], variant


def test_block_without_a_scale_decodes_to_zeros():
    """Its codes are +-6, as the factor is FLT_MAX, not the 0 / 0 of a scale of 0."""
    x = torch.tensor([1e-4, -1e-4] + [0.0] * 14)
    data, scales, amax = quantize_nvfp4(x, global_amax=UNIT)
    assert bytes_of(scales).tolist() == [0]
    assert codes_of(data, 16).tolist() == [7, 15] + [0] * 14
    assert dequantize_nvfp4(data, scales, amax).eq(0).all()


def test_order_of_products():
    """a * (E * (1/6)), not (a * (1/6)) * E: next to a tie of E4M3 the two may differ."""
    one, six = np.float32(1), np.float32(6)
    amax = np.random.default_rng(1).uniform(1, 2, (500, 1)).astype(np.float32)
    ties = 1 + (np.arange(8) + 0.5) / 8
    nearest = (ties * 6 * amax / 2688).astype(np.float32)
    block_amax = np.stack([np.nextafter(nearest, np.float32(to)) for to in (0, 9)] + [nearest])
    encode = np.float32(2688) / amax
    right, wrong = block_amax * (encode * (one / six)), (block_amax * (one / six)) * encode
    right, wrong = (product.astype(ml_dtypes.float8_e4m3fn) for product in (right, wrong))
    differ = np.argwhere(right != wrong)
    assert len(differ) > 10
    for place in map(tuple, differ[:100]):
        x = torch.zeros(16)
        x[0] = float(block_amax[place])
        _, scales, _ = quantize_nvfp4(x, global_amax=torch.tensor(float(amax[place[1], 0])))
        assert scales.float().item() == float(right[place])


def naive(x, amax):
    """TransformerEngine's steps in numpy, casts by ml_dtypes: (scales, codes, decoded)."""
    with np.errstate(all="ignore"):
        one, largest = np.float32(1), np.finfo(np.float32).max
        encode = np.minimum(np.float32(2688) / np.float32(amax), largest)
        blocks = x.float().numpy().reshape(-1, 16)
        wanted = np.abs(blocks).max(1) * (encode * (one / np.float32(6)))
        scales = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        factors = np.minimum(one / (scales.astype(np.float32) * (one / encode)), largest)
        scaled = np.clip(blocks * factors[:, None], -6, 6)
        elements = scaled.astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
        final = (scales.astype(np.float32) * np.float32(amax)) * (one / np.float32(2688))
        decoded = elements.astype(np.float32) * final[:, None]
    return scales.view(np.uint8), elements.view(np.uint8) & 15, decoded


@DTYPES
def test_against_numpy_and_ml_dtypes(dtype):
    for x in (nvfp4_cases.spread((64, 160), dtype), torch.randn(50, 16).to(dtype)):
        data, scales, amax = quantize_nvfp4(x)
        assert amax == x.float().abs().max()
        expected_scales, expected_codes, expected = naive(x, amax.item())
        assert np.array_equal(bytes_of(scales).numpy().ravel(), expected_scales)
        assert np.array_equal(codes_of(data, x.shape[-1]).numpy().reshape(-1, 16), expected_codes)
        decoded = dequantize_nvfp4(data, scales, amax)
        assert np.array_equal(decoded.numpy().reshape(-1, 16), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("power", [-90, -20, 0, 60])
def test_against_torchao(dtype, power):
    for x in (nvfp4_cases.spread((64, 160), dtype), torch.randn(50, 64).to(dtype)):
        x = x * 2.0**power
        data, scales, amax = quantize_nvfp4(x, variant="torchao")
        scale = nvfp4_tensor.per_tensor_amax_to_scale(amax)
        expected_scales, expected = nvfp4_tensor.nvfp4_quantize(x, 16, scale)
        assert torch.equal(bytes_of(scales).flatten(), bytes_of(expected_scales).flatten())
        assert torch.equal(data, expected)
        theirs = nvfp4_tensor.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
        found = dequantize_nvfp4(data, scales, amax, variant="torchao")
        assert torch.equal(found, theirs.dequantize(torch.float32))


def sqnr(x, **options):
    data, scales, amax = quantize_nvfp4(x, **options)
    found = dequantize_nvfp4(data, scales, amax, variant=options.get("variant", "te"))
    if options.get("hadamard"):
        found = hadamard16(found, inverse=True)
    noise = (found - x.float()).double().square().sum()
    return 10 * math.log10(x.double().square().sum() / noise)


def heavy_tailed(numel):
    """Student's t with 3 degrees of freedom: its fourth moment is infinite."""
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(4, numel, generator=generator)
    return normal[0] / normal[1:].square().mean(0).sqrt()


@pytest.mark.parametrize(
    ("options", "normal", "heavy"),
    [
        ({}, 20.3, 20.7),
        ({"variant": "torchao"}, 20.3, 20.7),
        ({"hadamard": True}, 20.3, 20.0),
        ({"rounding": "stochastic", "seed": 1}, 17.1, 17.3),
    ],
    ids=["te", "torchao", "hadamard", "stochastic"],
)
def test_signal_to_noise(options, normal, heavy):
    """dB, on N(0, 1) and on a heavy tail, bounds 0.1 or so below what was measured."""
    found = sqnr(torch.randn(2**18, generator=torch.Generator().manual_seed(4)), **options)
    found_heavy = sqnr(heavy_tailed(2**18), **options)
    print(f"SQNR {options}: {found:.2f} dB normal, {found_heavy:.2f} dB heavy-tailed")
    assert normal <= found <= normal + 0.5
    assert found_heavy >= heavy


# Twenty, of both signs: in every binade, next to a code, in the middle, far from it.
POINTS = [0.01, -0.1, 0.25, -0.4, 0.499, 0.7, -0.999, 1.1, -1.25, 1.501]
POINTS += [-1.6, 1.9, -2.001, 2.3, -2.75, 3.1, -3.9, 4.2, 5.3, -5.99]


@pytest.mark.parametrize("points", [POINTS[:10], POINTS[10:]], ids=["below 1.6", "from 1.6 on"])
def test_stochastic_rounding_is_unbiased(points):
    """1e6 draws of each; only the two neighbours; within 4 sigma of the mean."""
    draws = 1_000_000
    x = torch.full((draws, 16), 6.0)
    x[:, 1 : 1 + len(points)] = torch.tensor(points)
    data, scales, amax = quantize_nvfp4(x, global_amax=UNIT, rounding="stochastic", seed=11)
    decoded = dequantize_nvfp4(data, scales, amax)
    assert decoded[:, 0].eq(6.0).all()
    grid = codes.decode(torch.arange(8, dtype=torch.uint8), E2M1).double()
    for lane, point in enumerate(x[0, 1 : 1 + len(points)].double().tolist(), 1):
        drawn = decoded[:, lane].double() * math.copysign(1.0, point)
        low, high = grid[grid <= abs(point)].max().item(), grid[grid > abs(point)].min().item()
        assert set(drawn.unique().tolist()) == {low, high}
        share = (abs(point) - low) / (high - low)
        # Neighbouring lanes share a word, but draws of one lane do not.
        sigma = (high - low) * math.sqrt(share * (1 - share) / draws)
        assert abs(drawn.mean().item() - abs(point)) <= 4 * sigma, point


def test_noise_depends_on_seed_and_index_alone():
    x = nvfp4_cases.spread((8, 37))
    amax = amax_nvfp4(x)
    options = {"global_amax": amax, "rounding": "stochastic"}
    data, scales, _ = quantize_nvfp4(x, seed=2**64 - 3, first_index=100, **options)
    again, _, _ = quantize_nvfp4(x, seed=-3, first_index=100, **options)
    assert torch.equal(data, again)  # the same 64 bits
    for row in range(8):
        part, part_scales, _ = quantize_nvfp4(
            x[row : row + 1], seed=-3, first_index=100 + 37 * row, **options
        )
        assert torch.equal(part[0], data[row])
        assert torch.equal(bytes_of(part_scales)[0], bytes_of(scales)[row])
    other, _, _ = quantize_nvfp4(x, seed=-4, first_index=100, **options)
    assert not torch.equal(other, data)
    other, _, _ = quantize_nvfp4(x, seed=-3, first_index=101, **options)
    assert not torch.equal(other, data)


@pytest.mark.parametrize("transformed", [False, True], ids=["plain", "hadamard"])
def test_large_tensors_are_worked_on_in_pieces(transformed):
    """More than a piece of 128 Ki elements, as one row and as short ones: the bits of the parts."""
    for shape in ((3 * 2**17 + 48,), (9000, 33)):
        x = nvfp4_cases.spread(shape)
        options = {"global_amax": amax_nvfp4(x, hadamard=transformed), "hadamard": transformed}
        data, scales, _ = quantize_nvfp4(x, rounding="stochastic", seed=3, **options)
        cut = shape[0] // 32 * 16
        start = cut * (1 if len(shape) == 1 else shape[1])
        tail, tail_scales, _ = quantize_nvfp4(
            x[cut:], rounding="stochastic", seed=3, first_index=start, **options
        )
        assert torch.equal(data.flatten()[-tail.numel() :], tail.flatten())
        assert torch.equal(
            bytes_of(scales).flatten()[-tail_scales.numel() :], bytes_of(tail_scales).flatten()
        )


@DTYPES
def test_fused_transform_is_that_of_the_transformed(dtype):
    x = nvfp4_cases.spread((6, 100), dtype)
    found = quantize_nvfp4(x, hadamard=True)
    expected = quantize_nvfp4(hadamard16(x))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(bytes_of(found[1]), bytes_of(expected[1]))
    assert torch.equal(found[2], expected[2])
    assert not torch.equal(found[0], quantize_nvfp4(x)[0])


@VARIANTS
@pytest.mark.parametrize("row_numel", [1, 2, 15, 16, 17, 31, 33])
def test_short_last_blocks(row_numel, variant):
    """As if zeros followed; the unused nibble is 0."""
    x = nvfp4_cases.spread((3, row_numel)) + 1.0
    data, scales, amax = quantize_nvfp4(x, variant=variant)
    padded = torch.nn.functional.pad(x, (0, -row_numel % 16))
    expected, expected_scales, expected_amax = quantize_nvfp4(padded, variant=variant)
    assert data.shape == (3, -(-row_numel // 2))
    assert scales.shape == (3, NVFP4.num_blocks(row_numel))
    assert torch.equal(amax, expected_amax)
    assert torch.equal(bytes_of(scales), bytes_of(expected_scales))
    assert torch.equal(data, expected[:, : data.shape[1]])
    found = dequantize_nvfp4(data, scales, amax, row_numel=row_numel, variant=variant)
    whole = dequantize_nvfp4(expected, expected_scales, amax, variant=variant)
    assert torch.equal(found, whole[:, :row_numel])


@VARIANTS
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
def test_special_values_leave_other_blocks_alone(value, variant):
    x = nvfp4_cases.spread((4, 48))
    options = {"global_amax": torch.tensor(60.0), "variant": variant}
    data, scales, _ = quantize_nvfp4(x, **options)
    spoiled = x.clone()
    spoiled[2, 20] = value
    found, found_scales, _ = quantize_nvfp4(spoiled, **options)
    code = codes_of(found, 48)[2, 20].item()
    assert code == (15 if value == -math.inf else 7)
    assert bytes_of(found_scales)[2, 1] == (0x7E if math.isinf(value) else bytes_of(scales)[2, 1])
    others = torch.ones(4, 3, dtype=torch.bool)
    others[2, 1] = False
    assert torch.equal(bytes_of(found_scales)[others], bytes_of(scales)[others])
    assert torch.equal(found.view(4, 3, 8)[others], data.view(4, 3, 8)[others])


@VARIANTS
def test_infinite_amax_keeps_finite_values_finite(variant):
    x = torch.ones(48)
    x[3], x[20] = math.inf, math.nan
    data, scales, amax = quantize_nvfp4(x, variant=variant)
    assert amax == math.inf
    decoded = dequantize_nvfp4(data, scales, amax, variant=variant)
    assert decoded[3] == 6 * 448
    assert decoded[20] == decoded[21:32].max()
    assert decoded.isfinite().all()
    assert (decoded[32:] - 1).abs().max() <= 2.0**-3


@VARIANTS
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
def test_blocks_that_are_not_finite_as_nan(value, hadamard, variant):
    """Such a block is NaN; all others, of a row with a short block, are as beside zeros."""
    zeroed = nvfp4_cases.spread((4, 43))
    spoiled = zeroed.clone()
    for row, column in ((0, 3), (2, 20), (3, 42)):
        spoiled[row, column] = value
        zeroed[row, column // 16 * 16 :][:16] = 0.0
    options = {"variant": variant, "hadamard": hadamard, "nonfinite": "nan"}
    found, expected = quantize_nvfp4(spoiled, **options), quantize_nvfp4(zeroed, **options)
    assert torch.equal(found[2], expected[2])
    assert torch.equal(found[2], amax_nvfp4(spoiled, hadamard=hadamard, nonfinite="nan"))
    is_bad = torch.zeros(4, 3, dtype=torch.bool)
    is_bad[[0, 2, 3], [0, 1, 2]] = True
    assert torch.equal(bytes_of(found[1]), bytes_of(expected[1]).masked_fill(is_bad, 0x7F))
    touched = is_bad.repeat_interleave(16, 1)[:, :43]
    codes_expected = codes_of(expected[0], 43).masked_fill(touched, 7)
    assert torch.equal(codes_of(found[0], 43), codes_expected)
    decoded = dequantize_nvfp4(*found, row_numel=43, variant=variant)
    assert torch.equal(~decoded.isfinite(), touched)
    assert decoded[touched].isnan().all()
    finite = quantize_nvfp4(zeroed, variant=variant, hadamard=hadamard)
    assert all(map(torch.equal, map(bytes_of, expected[:2]), map(bytes_of, finite[:2])))


@VARIANTS
@pytest.mark.parametrize("scale", [1e-45, 1e-37, 1e-30, 1e30, 1e38])
def test_any_magnitude(scale, variant):
    """FP32's whole range: within a quarter of the block's amax and the tensor's smallest scale."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(6)).clamp(-3, 3) * scale
    data, scales, amax = quantize_nvfp4(x, variant=variant)
    decoded = dequantize_nvfp4(data, scales, amax, variant=variant)
    assert decoded.isfinite().all()
    block_amax = x.double().abs().view(8, 4, 16).amax(-1, keepdim=True)
    error = (decoded.double() - x.double()).abs().view(8, 4, 16)
    floor = 2.0**-126 if variant == "torchao" else 2.0**-128
    assert (error <= block_amax / 4 + floor).all()


@pytest.mark.parametrize("shape", [(3, 16), (130, 40), (2, 65, 100), (0, 16)], ids=str)
def test_swizzled_scales(shape):
    x = nvfp4_cases.spread(shape)
    data, scales, amax = quantize_nvfp4(x)
    same, swizzled, _ = quantize_nvfp4(x, swizzled=True)
    assert torch.equal(data, same)
    assert torch.equal(bytes_of(swizzled), bytes_of(swizzle.swizzle_scales(scales)))
    found = dequantize_nvfp4(data, swizzled, amax, swizzled=True)
    assert torch.equal(found, dequantize_nvfp4(data, scales, amax))


@DTYPES
def test_decoding_rounds_once(dtype):
    data, scales, amax = quantize_nvfp4(nvfp4_cases.spread((8, 64)))
    found = dequantize_nvfp4(data, scales, amax, dtype=dtype)
    oracle.assert_same_bits(found, dequantize_nvfp4(data, scales, amax).to(dtype))


def test_amax():
    x = nvfp4_cases.special()
    assert amax_nvfp4(x) == math.inf
    assert amax_nvfp4(x[:48]) == x[:48].nan_to_num(0.0).abs().max()
    assert amax_nvfp4(torch.full((20,), math.nan)) == 0
    finite = x.view(-1, 16)[x.view(-1, 16).isfinite().all(1)]
    assert amax_nvfp4(x, nonfinite="nan") == finite.abs().max()
    assert amax_nvfp4(torch.full((20,), math.inf), nonfinite="nan") == 0
    assert amax_nvfp4(torch.empty(3, 0)) == 0
