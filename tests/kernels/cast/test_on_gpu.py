"""The compiled conversions and FP8 kernels on a GPU against the CPU path, bit for bit."""

import pytest
import torch

from sidestream.kernels.cast.op import cast, cast_back
from sidestream.kernels.formats.table import CASTS
from sidestream.kernels.fp8.op import dequantize_fp8, quantize_fp8, update_fp8_scales_
from sidestream.tests.kernels.formats import code_cases
from sidestream.tests.kernels.oracle import assert_same as same

pytestmark = pytest.mark.gpu

MODES = [(to, None) for to in CASTS]
MODES += [(to, code_cases.SEED) for to, form in CASTS.items() if form.has_stochastic]
# Each is a set of kernels of its own, so not every dtype with every element.
FP8 = [
    (torch.float32, "e4m3", False),
    (torch.bfloat16, "e5m2", True),
    (torch.float16, "e4m3", True),
]
SHAPES = [(9001,), (130, 200), (70, 384), (3, 129, 144), (2, 20_000), (64, 4096), (2, 3)]


@pytest.mark.parametrize(("to", "seed"), MODES, ids=str)
def test_cast_and_back(to, seed):
    rounding = "nearest" if seed is None else "stochastic"
    x = torch.cat([code_cases.inputs(element) for element in code_cases.SIGNED])
    for source in (x, x[1:], x[:4096], x.bfloat16(), x.half(), x[:9999].view(99, 101)):
        expected = cast(source, to, rounding=rounding, seed=seed)
        memory = source.cuda()
        if source.storage_offset():
            memory = torch.cat((torch.zeros(1), source)).cuda()[1:]
        same(cast(memory, to, rounding=rounding, seed=seed), expected)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            same(cast_back(expected.cuda(), to, dtype), cast_back(expected, to, dtype))


@pytest.mark.parametrize(("dtype", "element", "power_of_2"), FP8, ids=str)
@pytest.mark.parametrize("scaling", ["tensor", "row", "1x128", "128x128"])
def test_fp8(scaling, dtype, element, power_of_2):
    options = {"scaling": scaling, "element": element, "power_of_2": power_of_2}
    for shape in SHAPES:
        if len(shape) < 2 and scaling == "128x128":
            continue
        rows = torch.exp2(torch.randint(-130, 120, (*shape[:-1], 1)).float())
        x = (torch.randn(shape) * rows).to(dtype)
        x.view(-1)[1] = float("nan")
        codes, scale_inv = quantize_fp8(x, **options)
        found, found_inverse = quantize_fp8(x.cuda(), **options)
        same(found, codes)
        same(found_inverse, scale_inv)
        back = dequantize_fp8(found, found_inverse, scaling=scaling, dtype=dtype)
        same(back, dequantize_fp8(codes, scale_inv, scaling=scaling, dtype=dtype))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3, 1024, 16384])
def test_delayed_scaling(length, algorithm):
    history, scales = torch.rand(300, length), torch.ones(300)
    history[7], history[8, 0] = 0.0, float("inf")
    x = torch.randn(9001)
    on_gpu, scales_on_gpu = history.cuda(), scales.cuda()
    for _ in range(3):
        quantize_fp8(x, scale=scales[5], amax=history[5, 0])
        quantize_fp8(x.cuda(), scale=scales_on_gpu[5], amax=on_gpu[5, 0])
        update_fp8_scales_(history, scales, algorithm=algorithm)
        update_fp8_scales_(on_gpu, scales_on_gpu, algorithm=algorithm)
        same(on_gpu, history)
        same(scales_on_gpu, scales)
