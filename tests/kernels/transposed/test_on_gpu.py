"""The compiled kernels of both orientations on a GPU against the CPU path, bit for bit."""

import pytest
import torch

from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.transposed import cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", cases.CASES)
def test_bits(name):
    expected = cases.results(name, *cases.inputs(name))
    found = cases.results(name, *cases.inputs(name, "cuda"))
    for one, other in zip(found, expected, strict=True):
        oracle.assert_same(one, other)


def shifted(x):
    """The same values on the GPU, where no 16-byte access is possible."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:]
    return memory.copy_(x.view(-1)).view(x.shape)


@pytest.mark.parametrize("shape", [(1024, 1536), (96, 4128)], ids=str)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_many_tiles(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    calls = (
        (cases.MX, {}),
        (cases.MX, {"element": "e2m1", "swizzled": True, **cases.NOISE}),
        (cases.NVFP4, {"square": True}),
        (cases.NVFP4, {"hadamard": True, "swizzled": True, **cases.NOISE}),
        (cases.FP8, {}),
    )
    for function, options in calls:
        expected = cases.flat(function(x, **options))
        for on_gpu in (x.cuda(), shifted(x)):
            found = cases.flat(function(on_gpu, **options))
            for one, other in zip(found, expected, strict=True):
                oracle.assert_same(one, other)
