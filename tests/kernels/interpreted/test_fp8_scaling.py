"""The interpreted FP8 kernels against `fp8.reference`, bit for bit, canaries included."""

import math

import pytest
import torch

from sidestream.kernels.fp8 import kernel, reference, two_pass
from sidestream.tests.kernels.oracle import assert_same_bits

POISON = 0xAB
ELEMENTS = pytest.mark.parametrize("element", reference.CAST_ELEMENTS)
# Short and full lines, several programs, tails, rows that are and are not a multiple of 16.
SHAPES = {
    "tensor": [(), (9000,), (3, 4096), (1,)],
    "row": [(7,), (5, 3), (2, 3, 100), (9, 512), (300, 16), (2, 5000), (2, 20_000), (3, 16_500)],
    "1x128": [(9001,), (128,), (70, 128), (5, 200), (2, 3, 144), (40, 256), (3, 1)],
    "128x128": [(130, 200), (2, 129, 144), (1, 7), (128, 128), (2, 2, 3, 130)],
}
CASES = [(scaling, shape) for scaling, shapes in SHAPES.items() for shape in shapes]
IDS = [f"{scaling}-{shape}" for scaling, shape in CASES]


def made(shape, dtype=torch.float32, seed=0):
    """Random values whose size changes from row to row and along it, with what is special."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1)[: len(shape)], generator=generator))
    flat = x.view(-1)
    specials = [math.nan, math.inf, -math.inf, 1e-45, -1e-40, -0.0, 3e38]
    for index, special in enumerate(specials):
        if flat.numel() > 40 * len(specials):
            flat[flat.numel() * (index + 1) // (len(specials) + 1)] = special
    if flat.numel() > 400:
        flat[:150] = 0.0
    return x.to(dtype)


def poisoned(shape, dtype, start):
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.full((size + start + 64,), POISON, dtype=torch.uint8)
    return memory[start : start + size].view(dtype).view(shape), memory


def check(x, scaling, element, power_of_2=False, scale=None, start=16):
    results = []
    for module in (kernel, reference):
        dtype = reference.CAST_ELEMENTS[element].dtype
        codes, memory = poisoned(x.shape, dtype, start)
        shape = reference.scale_shape(x.shape, scaling)
        scale_inv, scale_memory = poisoned(shape, torch.float32, 16)
        amax = None if scale is None else torch.tensor([0.25])
        module.quantize_fp8_(codes, scale_inv, x, scaling, power_of_2, scale, amax)
        results.append((codes, scale_inv, memory, scale_memory, amax))
    for found, expected in zip(results[0][2:4], results[1][2:4], strict=True):
        assert torch.equal(found, expected)
    if scale is not None:
        assert_same_bits(results[0][4], results[1][4])
    return results[0][:2]


def check_back(codes, scale_inv, scaling, dtype, start=16):
    results = []
    for module in (kernel, reference):
        out, memory = poisoned(codes.shape, dtype, start)
        module.dequantize_fp8_(out, codes, scale_inv, scaling)
        results.append((out.clone(), memory))
        out.zero_()
    assert_same_bits(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("scaling", "shape"), CASES, ids=IDS)
def test_every_shape_and_back(scaling, shape):
    codes, scale_inv = check(made(shape), scaling, "e4m3")
    check_back(codes, scale_inv, scaling, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scaling", SHAPES)
def test_e5m2_powers_of_two_and_narrow_sources(scaling, dtype):
    codes, scale_inv = check(made((130, 160), dtype), scaling, "e5m2", power_of_2=True)
    check_back(codes, scale_inv, scaling, dtype)


@pytest.mark.parametrize("scaling", SHAPES)
def test_unaligned_memory(scaling):
    x = made((129 * 256 + 1,))[1:].view(129, 256)
    assert x.data_ptr() % 16
    codes, scale_inv = check(x, scaling, "e4m3", start=17)
    check_back(codes, scale_inv, scaling, torch.float32, start=20)


@ELEMENTS
@pytest.mark.parametrize("power_of_2", [False, True], ids=["fp32", "power of 2"])
def test_extreme_blocks(power_of_2, element):
    """One block a row: subnormal, tiny, huge, zero, infinite, NaN: each its own scale."""
    amaxes = [1e-45, 1e-40, 1.3e-36, 1.4e-36, 1e-30, 447.9, 448.0, 3.4028235e38, 0.0]
    amaxes += [math.inf, -math.inf, math.nan]
    x = torch.linspace(-0.9, 0.9, 128).repeat(len(amaxes), 1)
    x *= torch.tensor([min(abs(a), 3e38) if a == a else 1.0 for a in amaxes])[:, None]
    x[:, 77] = torch.tensor(amaxes)
    check(x, "1x128", element, power_of_2)
    check(x, "row", element, power_of_2)


@pytest.mark.parametrize("special", [0.0, math.nan, -math.inf], ids=str)
def test_delayed_scaling_records_amax(special):
    x = torch.randn(9000, generator=torch.Generator().manual_seed(1))
    x[4500] = special
    check(x, "tensor", "e5m2", scale=torch.tensor([3.7]))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 3), (2, 3), (7, 3), (1024, 3), (7, 100)])
def test_update_scales(length, margin, algorithm):
    history = torch.rand(12, length, generator=torch.Generator().manual_seed(1))
    history[1], history[2, -1], history[3, 0] = 0.0, math.inf, math.nan
    history[4, 0], history[5] = 0.0, 1e-45
    if margin > 3:
        history[6], history[7] = 3e38, 2.0**33
    scales = torch.arange(12.0)
    expected_history, expected = history.clone(), scales.clone()
    two_pass.update_fp8_scales_(history, scales, "e4m3", margin, algorithm)
    reference.update_fp8_scales_(expected_history, expected, "e4m3", margin, algorithm)
    assert (scales[6] == 2.0**-126) == (margin > 3)
    assert_same_bits(history, expected_history)
    assert_same_bits(scales, expected)
    assert not scales.equal(torch.arange(12.0))
