"""The interpreted norm kernels against the definition, bit for bit."""

import pytest
import torch

from sidestream.kernels.optim import norm
from sidestream.kernels.optim import reference as reference_optim
from sidestream.tests.kernels import oracle


def values(numel, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    result = torch.randn(numel, generator=generator)
    return (result * torch.exp2(torch.randint(-9, 3, (numel,), generator=generator))).to(dtype)


def check(tensors, *, norm_dtype=torch.float32, flag_dtype=torch.int32, squared=False):
    results = []
    for module in (norm, reference_optim):
        found, flag = torch.full((1,), 7.0, dtype=norm_dtype), torch.ones(1, dtype=flag_dtype)
        module.l2_norm_(found, tensors, found_inf=flag, squared=squared)
        results.append((found, flag))
    (actual, flag), (expected, expected_flag) = results
    assert actual.isnan() if expected.isnan() else actual == expected
    assert flag == expected_flag
    return flag


def test_full_chunks_tails_and_mixed_dtypes():
    """Chunks have 16384 FP32 elements or 32768 half-precision ones; lanes are 2048."""
    numels = [16384, 2 * 32768, 32768 + 5, 3, 0, 16384 + 2049, 130, 2048]
    assert not check([values(n, oracle.DTYPES[i % 3], i) for i, n in enumerate(numels)])


@pytest.mark.parametrize("squared", [False, True], ids=["root", "squared"])
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.float64], ids=str)
def test_results(norm_dtype, squared):
    check([values(5000, torch.float32, 1)], norm_dtype=norm_dtype, squared=squared)


FLAGS = [
    (float("nan"), torch.bool),
    (float("inf"), torch.int32),
    (-float("inf"), torch.float32),
    (1e30, torch.bool),
]


@pytest.mark.parametrize(("value", "flag_dtype"), FLAGS, ids=str)
def test_flag(value, flag_dtype):
    full, tail = values(16384, torch.float32, 1), values(700, torch.bfloat16, 2)
    for tensor in (full, tail):
        tensor[-1] = value
        assert bool(check([full, tail], flag_dtype=flag_dtype)) is (value != 1e30)
        tensor[-1] = 0.0


def test_memory_that_is_unaligned_or_strided():
    memory = values(16384 + 1, torch.float32, 1)
    check([memory[1:], memory[:-1].view(128, 128).t(), memory[::2]])


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)]], ids=["none", "empty"])
def test_nothing(tensors):
    assert not check(tensors)


def test_without_a_flag():
    found = torch.zeros(())
    norm.l2_norm_(found, [torch.full((4,), 3.0)], found_inf=None, squared=False)
    assert found == 6.0


def test_more_sums_than_lanes():
    sums = values(20_000, torch.float32, 4).abs()
    flags = torch.zeros(20_000, dtype=torch.int32)
    flags[19_999] = 1
    found, flag = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bool)
    norm._combine_kernel[1,](found, flag, sums, flags, 20_000, SQUARED=True)
    assert found == reference_optim._sum_of(sums.double(), reference_optim.COMBINE_LANES)
    assert flag
