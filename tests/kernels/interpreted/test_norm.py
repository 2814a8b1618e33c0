"""The interpreted norm kernels against the definition, bit for bit."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sidestream.kernels.optim import norm, norm_reference
from sidestream.kernels.portable import fused_quotient, quotient_terms
from sidestream.tests.kernels import oracle

CPU = torch.device("cpu")


def values(numel, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    result = torch.randn(numel, generator=generator)
    return (result * torch.exp2(torch.randint(-19, 3, (numel,), generator=generator))).to(dtype)


def check(tensors, *, norm_dtype=torch.float32, flag_dtype=torch.int32, squared=False):
    results = []
    for module in (norm, norm_reference):
        found, flag = torch.full((1,), 7.0, dtype=norm_dtype), torch.ones(1, dtype=flag_dtype)
        module.l2_norm_(found, tensors, found_inf=flag, squared=squared)
        results.append((found, flag))
    (actual, flag), (expected, expected_flag) = results
    assert actual.isnan() if expected.isnan() else actual == expected
    assert flag == expected_flag
    return flag


def test_full_tiles_tails_and_mixed_dtypes():
    """Of two norms: tiles have 16384 FP32 elements or 32768 half-precision ones, blocks 128."""
    numels = [16384, 2 * 32768, 32768 + 5, 3, 0, 16384 + 2049, 130, 2048]
    tensors = [values(n, oracle.DTYPES[i % 3], i) for i, n in enumerate(numels)]
    quantities = [tensors[:3], [], tensors[3:]]
    largest = norm.largest_magnitudes(quantities, CPU)
    assert torch.equal(largest, norm_reference.largest_magnitudes(quantities, CPU))
    sums = norm.square_sums(quantities, largest)
    assert torch.equal(sums, norm_reference.power_sums(quantities, largest, 2.0))
    assert (sums[:, 0] > 0).tolist() == [True, False, True]
    assert sums[2, 1] > 0


@pytest.mark.parametrize("squared", [False, True], ids=["root", "squared"])
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.float64], ids=str)
def test_results(norm_dtype, squared):
    check([values(5000, torch.float32, 1)], norm_dtype=norm_dtype, squared=squared)


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e30], ids=str)
def test_the_range(scale):
    check([values(5000, torch.float32, 1) * scale])


FLAGS = [
    (float("nan"), torch.bool),
    (-float("nan"), torch.bool),
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


@triton.jit
def quotients(x, divisor, out, NUMEL: tl.constexpr):
    lanes = tl.arange(0, NUMEL)
    terms = quotient_terms(tl.load(divisor).to(tl.int32, bitcast=True))
    tl.store(out + lanes, fused_quotient(tl.load(x + lanes), terms))


def fused(self, x, y, z):
    """The GPU's: the product of two FP32 is exact here, the sum has 64 bits."""
    total = x.data.astype(np.longdouble) * y.data.astype(np.longdouble) + z.data
    return type(x)(total.astype(np.float32), x.dtype)


def hard_numerators(mantissa, count):
    """Those of 24 bits whose quotients by an odd `mantissa` are closest to the middle of two."""
    inverse = pow(1 << 25, -1, mantissa)
    return [sign * j * inverse % mantissa for j in range(1, count) for sign in (1, -1)]


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="a sum needs 64 bits")
def test_the_compiled_quotient_is_ieee_s(monkeypatch):
    """With a true fused multiply-add: of hard numerators and any, over divisors of all ranges."""
    monkeypatch.setattr(triton.runtime.interpreter.InterpreterBuilder, "create_fma", fused)
    generator = np.random.default_rng(4)
    mantissas = [2**23 + 1, 2**24 - 1, 2**24 - 3, *(generator.integers(2**23, 2**24, 40) | 1)]
    for index, mantissa in enumerate(int(found) for found in mantissas):
        exponent = (-149, -126, -60, -24, 0, 103, 104)[index % 7]
        near = hard_numerators(mantissa, 1000) + generator.integers(0, mantissa, 2098).tolist()
        x = np.array(near[:4096], np.float32)
        x[2048:] *= np.exp2(generator.integers(-30, 1, len(x) - 2048)).astype(np.float32)
        divisor = np.ldexp(np.float32(mantissa if exponent > -149 else 5), exponent)
        x = np.ldexp(np.minimum(x, np.float32(mantissa)), exponent)
        x = np.minimum(x, divisor).astype(np.float32)
        out = torch.empty(4096)
        quotients[1,](torch.from_numpy(x), torch.tensor([float(divisor)]), out, NUMEL=4096)
        expected = x / divisor
        counts = (expected >= 2.0**-80) | (expected == 0)
        assert (out.numpy()[counts] == expected[counts]).all(), (divisor, index)
