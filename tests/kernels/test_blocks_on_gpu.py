"""The compiled MX, NVFP4 and Hadamard kernels on a GPU against the CPU path, bit for bit."""

import pytest
import torch

from sidestream.kernels import (
    amax_nvfp4,
    dequantize_mx,
    dequantize_nvfp4,
    hadamard16,
    quantize_mx,
    quantize_nvfp4,
    swizzle_scales,
    unswizzle_scales,
)
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.nvfp4 import cases as nvfp4_cases
from sidestream.tests.kernels.oracle import assert_same

pytestmark = pytest.mark.gpu

# Whole tiles and a tail, rows of whole blocks, rows that end in a short one, nothing.
SHAPES = [(4 * 4096 + 41,), (256, 256), (130, 384), (5, 37), (3, 1, 33), (2, 0)]
NOISE = {"rounding": "stochastic", "seed": -(2**62) - 5, "first_index": 2**33}

# Each is a kernel of its own, so not every dtype with every option.
MX_OPTIONS = ({}, NOISE, {"swizzled": True}, {"rule": "floor"}, {"rule": "even"})
NVFP4_OPTIONS = (
    {},
    NOISE,
    {"variant": "torchao"},
    {"variant": "torchao", "nonfinite": "nan"},
    {"hadamard": True},
    {"hadamard": True, "nonfinite": "nan"},
    {"hadamard": True, "swizzled": True, **NOISE},
)


def inputs(shape, dtype):
    """Every magnitude, with NaN and infinities in a block of their own where there is room."""
    x = nvfp4_cases.spread(shape).view(-1)
    if x.numel() > 3000:
        x[2048:2052] = torch.tensor([float("nan"), float("inf"), 1.0, -float("inf")])
        x[2600:2610] = torch.tensor(oracle.SPECIAL[:10])
    return x.to(dtype).view(shape)


def shifted(x):
    """The same values on the GPU, where no 16-byte access is possible."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:]
    return memory.copy_(x.view(-1)).view(x.shape)


def check_mx(x, on_gpu, options):
    swizzled = options.get("swizzled", False)
    expected = quantize_mx(x, **options)
    found = quantize_mx(on_gpu, **options)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    back = {"element": options["element"], "swizzled": swizzled, "row_numel": x.shape[-1]}
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(
            dequantize_mx(*found, dtype=dtype, **back),
            dequantize_mx(*expected, dtype=dtype, **back),
        )


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_mx(element, dtype):
    for shape in SHAPES:
        x = inputs(shape, dtype)
        for options in MX_OPTIONS if dtype is torch.bfloat16 else ({},):
            check_mx(x, x.cuda(), {"element": element, **options})
        check_mx(x, shifted(x), {"element": element})


def check_nvfp4(x, on_gpu, options):
    variant, swizzled = options.get("variant", "te"), options.get("swizzled", False)
    of_amax = {key: options[key] for key in ("hadamard", "nonfinite") if key in options}
    amax = amax_nvfp4(x, **of_amax)
    assert_same(amax_nvfp4(on_gpu, **of_amax), amax)
    # Beside the tensor's own amax, one that leaves the other blocks their range.
    for global_amax in (amax, torch.tensor(16.0)):
        expected = quantize_nvfp4(x, global_amax=global_amax, **options)
        found = quantize_nvfp4(on_gpu, global_amax=global_amax.cuda(), **options)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        back = {"variant": variant, "swizzled": swizzled, "row_numel": x.shape[-1]}
        for dtype in (torch.float32, torch.bfloat16):
            assert_same(
                dequantize_nvfp4(*found, dtype=dtype, **back),
                dequantize_nvfp4(*expected, dtype=dtype, **back),
            )


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_nvfp4(dtype):
    for shape in SHAPES:
        x = inputs(shape, dtype)
        for options in NVFP4_OPTIONS if dtype is torch.bfloat16 else ({},):
            check_nvfp4(x, x.cuda(), options)
        check_nvfp4(x, shifted(x), {})


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_hadamard(inverse, dtype):
    for shape in SHAPES:
        x = inputs(shape, dtype)
        for on_gpu in (x.cuda(), shifted(x)):
            expected = hadamard16(x, inverse=inverse)
            assert_same(hadamard16(on_gpu, inverse=inverse), expected)
            assert_same(hadamard16(on_gpu, inverse=inverse, out=on_gpu), expected)


def test_swizzle():
    scales = torch.randint(0, 256, (150, 6), dtype=torch.uint8)
    swizzled = swizzle_scales(scales.cuda())
    assert_same(swizzled, swizzle_scales(scales))
    assert_same(unswizzle_scales(swizzled, 150, 6), scales)
