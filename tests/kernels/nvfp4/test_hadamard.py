"""The Hadamard transform: its matrix, the order of its additions, its inverse, its limits."""

import math

import pytest
import torch

from sidestream.kernels.nvfp4 import reference
from sidestream.kernels.nvfp4.op import hadamard16
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.nvfp4 import cases as nvfp4_cases

DTYPES = pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


def matrix():
    """diag(signs) @ H / 4, in FP64: x @ matrix is the transform of a row x."""
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]).double()
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.cat(
            (torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1))
        )
    return torch.diag(signs) @ hadamard / 4


def naive(x, inverse):
    """The stated order of additions, an element at a time, on FP32 numbers."""
    values = [torch.tensor(float(v)) for v in x]
    factors = [torch.tensor(0.25 * sign) for sign in reference.SIGNS]
    if not inverse:
        values = [v * f for v, f in zip(values, factors, strict=True)]
    for apart in (1, 2, 4, 8):
        values = [
            values[i] + values[i + apart] if not i & apart else values[i - apart] - values[i]
            for i in range(16)
        ]
    if inverse:
        values = [v * f for v, f in zip(values, factors, strict=True)]
    return torch.stack(values)


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_order_of_additions(inverse):
    x = torch.randn(32, generator=torch.Generator().manual_seed(1)) * 1e3
    expected = torch.cat([naive(group, inverse) for group in x.view(2, 16)])
    oracle.assert_same_bits(hadamard16(x, inverse=inverse), expected)


@DTYPES
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_against_the_matrix(dtype, inverse):
    """Four stages of FP32 sums of 16 terms, |x| / 4 each: 4 roundings; then one to the dtype."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    groups = x.double().view(-1, 16)
    expected = groups @ (matrix().T if inverse else matrix())
    found = hadamard16(x, inverse=inverse).double().view(-1, 16)
    bound = 4 * 2.0**-24 * groups.abs().sum(1, keepdim=True) / 4
    bound = bound + 2.0 ** -BITS[dtype] * (expected.abs() + bound)
    assert ((found - expected).abs() <= bound).all()


def test_exact_on_small_integers():
    """Multiples of 4 stay integers, so nothing is rounded: a unit vector gives a column."""
    x = 4 * torch.eye(16)
    assert torch.equal(hadamard16(x).double(), 4 * matrix())
    assert torch.equal(hadamard16(hadamard16(x), inverse=True), x)
    assert torch.equal(hadamard16(hadamard16(x, inverse=True)), x)


@DTYPES
def test_inverse_restores(dtype):
    """Both ways round by u = 2^-p of a value <= the group's norm, and in FP32 by 4 stages' u."""
    x = nvfp4_cases.spread((40, 64), dtype)
    back = hadamard16(hadamard16(x), inverse=True)
    norms = x.double().view(-1, 16).norm(dim=1, keepdim=True)
    # The error e of the first transform has at most sqrt(16) * u * norm, and the inverse keeps its
    # length; FP32 sums of 16 terms add 4 * 2^-24 * sum(|x|) / 4 <= 4 * 2^-24 * norm each way.
    bound = (4 + 1) * 2.0 ** -BITS[dtype] * norms + 8 * 5 * 2.0**-24 * norms
    smallest = torch.finfo(dtype).smallest_normal * 2.0 ** (1 - BITS[dtype])
    error = (back.double() - x.double()).view(-1, 16).abs()
    assert (error <= bound + 5 * smallest).all()


def test_commutes_with_sums():
    """Sum over ranks, then inverse, is the sum: on integers, so exactly."""
    parts = torch.randint(-64, 64, (4, 160), generator=torch.Generator().manual_seed(3)) * 4.0
    total = sum(hadamard16(part) for part in parts)
    assert torch.equal(hadamard16(total, inverse=True), parts.sum(0))


@DTYPES
def test_short_groups_pass_through(dtype):
    x = nvfp4_cases.spread((5, 37), dtype)
    found = hadamard16(x)
    oracle.assert_same_bits(found[:, 32:].contiguous(), x[:, 32:].contiguous())
    oracle.assert_same_bits(found[:, :32].contiguous(), hadamard16(x[:, :32].contiguous()))
    assert not torch.equal(found[:, :32], x[:, :32])


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_special_values_stay_in_their_group(value):
    x = nvfp4_cases.spread((64,))
    spoiled = x.clone()
    spoiled[20] = value
    found = hadamard16(spoiled)
    assert not found[16:32].isfinite().any()
    expected = hadamard16(x)
    assert torch.equal(found[:16], expected[:16])
    assert torch.equal(found[32:], expected[32:])


def test_input_is_kept_and_empty_is_fine():
    x = nvfp4_cases.spread((64,))
    kept = x.clone()
    hadamard16(x)
    assert torch.equal(x, kept)
    assert hadamard16(torch.empty(3, 0)).shape == (3, 0)
    assert hadamard16(torch.empty(0, 16)).shape == (0, 16)


def test_bad_input():
    with pytest.raises(ValueError, match=r"x: expected torch\.float32.*got torch\.int64"):
        hadamard16(torch.zeros(16, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x: expected a contiguous tensor.* strides \(1, 16\)"):
        hadamard16(torch.zeros(16, 16).t())
