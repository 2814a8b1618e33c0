"""The definition of the L2 norm: its sums in NumPy bit for bit, its error, its range, its flag."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidestream.kernels.optim.norm_op import l2_norm_, largest_magnitudes, norms_of, power_sums
from sidestream.tests.kernels import oracle

EPSILON = 2.0**-24


def naive_norm(tensors):
    """The formula, a block at a time, its sum exact."""
    largest = max((t.abs().max().float().numpy() for t in tensors if t.numel()), default=0.0)
    total = 0
    for tensor in tensors:
        for block in tensor.reshape(-1).split(128):
            s = np.zeros(128, np.float32)
            s[: block.numel()] = np.square(block.float().numpy() / (largest or np.float32(1)))
            while len(s) > 1:
                s = s[: len(s) // 2] + s[len(s) // 2 :]
            total += math.floor(Fraction(float(s[0])) * 2**59)
    return np.float32(np.float64(largest) * np.sqrt(np.float64(total) / 2**59))


def norm_of(tensors, **options):
    norm = torch.full((), float("nan"))
    found_inf = torch.tensor(7, dtype=torch.int32)
    l2_norm_(norm, tensors, found_inf=found_inf, **options)
    return norm, int(found_inf)


def finite(numel, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values *= torch.exp2(torch.randint(-10, 3, (numel,), generator=generator).float())
    return values.to(dtype)


def mixed():
    shapes = [100_000, 16_384, 5, 32_768, 2049]
    return [finite(n, oracle.DTYPES[i % 3], i) for i, n in enumerate(shapes)]


def test_the_sums_are_as_stated():
    tensors = mixed()
    norm, flag = norm_of(tensors)
    assert norm.item() == naive_norm(tensors)
    assert flag == 0


def test_neither_order_nor_cuts_at_blocks_count():
    tensors = mixed()
    norm, _ = norm_of(tensors)
    assert norm_of(tensors[::-1])[0] == norm
    assert norm_of([part for tensor in tensors for part in tensor.split(384)])[0] == norm


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e30, 2e37], ids=str)
def test_error_is_below_the_stated_bound(scale):
    tensors = [
        tensor * scale if tensor.dtype == torch.float32 else tensor[:0] for tensor in mixed()
    ]
    exact = math.sqrt(math.fsum(float(t.double().square().sum()) for t in tensors))
    norm = torch.zeros(1, dtype=torch.float64)
    l2_norm_(norm, tensors)
    assert abs(norm.item() / exact - 1) < 7 * EPSILON
    l2_norm_(norm, tensors, squared=True)
    assert abs(norm.item() / exact**2 - 1) < 12 * EPSILON


def test_several_norms_at_once_and_over_ranks():
    """Two ranks with a part each of two quantities."""
    first, second = mixed()[:3], mixed()[3:]
    ranks = [[first[:1], second[:1]], [first[1:], second[1:]]]
    cpu = torch.device("cpu")
    largest = torch.stack([largest_magnitudes(owned, cpu) for owned in ranks]).amax(0)
    sums = torch.stack([power_sums(owned, largest) for owned in ranks]).sum(0)
    found = norms_of(largest, sums, 2.0)
    assert found.float().tolist() == [norm_of(first)[0].item(), norm_of(second)[0].item()]
    maxima = [max(t.abs().max().item() for t in tensors) for tensors in (first, second)]
    assert norms_of(largest, None, math.inf).tolist() == maxima


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("place", [0, 4, 99_999])
def test_one_value_that_is_not_finite_sets_the_flag(value, place, dtype):
    tensors = mixed()
    tensors[place % 5].view(-1)[place % tensors[place % 5].numel()] = value
    norm, found_inf = torch.zeros(1), torch.zeros(1, dtype=dtype)
    l2_norm_(norm, tensors, found_inf=found_inf)
    assert found_inf == 1
    assert norm.isnan() if math.isnan(value) else norm.isposinf()


def test_only_what_leaves_the_result_s_range_overflows():
    assert norm_of([torch.tensor([3e30, 4e30])]) == (torch.tensor(5e30), 0)
    norm, flag = norm_of([torch.tensor([3e30, 4e30])], squared=True)
    assert norm.isposinf()
    assert flag == 0


@pytest.mark.parametrize(
    "tensors", [[], [torch.empty(0), torch.empty(3, 0)]], ids=["none", "empty"]
)
def test_nothing_has_norm_zero(tensors):
    assert norm_of(tensors) == (0.0, 0)


def test_parameters_may_come_from_a_generator():
    tensors = [torch.full((3,), 2.0), torch.full((2,), -2.0)]
    norm = torch.tensor(math.nan)
    l2_norm_(norm, iter(tensors))
    assert norm == math.sqrt(20.0) or abs(float(norm) - math.sqrt(20.0)) < 1e-6


def test_short_and_long_tensors():
    sizes = [1, 2, 3, 17, 127, 128, 129, 300_000, *range(5, 90)]
    tensors = [finite(size, oracle.DTYPES[i % 3], i) for i, size in enumerate(sizes)]
    assert norm_of(tensors)[0] == naive_norm(tensors)


def test_strides_do_not_count():
    tensor = finite(6000, torch.float32, 1).view(60, 100)
    assert norm_of([tensor.t().contiguous().t()]) == norm_of([tensor])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": torch.zeros(2)}, r"norm: expected one element, got shape \(2,\)"),
        ({"norm": torch.tensor(0)}, r"norm: expected torch\.float32, torch\.float64, got"),
        ({"tensors": [torch.ones(2), torch.ones(2).double()]}, r"tensors\[1\]: expected .*float64"),
        (
            {"tensors": [torch.ones(2, device="meta")]},
            r"tensors\[0\]: expected device cpu, got meta",
        ),
        ({"found_inf": torch.tensor(0)}, r"found_inf: expected torch\.bool, .* got torch\.int64"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        l2_norm_(**{"norm": torch.tensor(0.0), "tensors": [torch.ones(2)]} | arguments)


def test_fake_tensors():
    with FakeTensorMode():
        assert l2_norm_(torch.empty(()), [torch.empty(3)]) is None
