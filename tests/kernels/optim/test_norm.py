"""The definition of the L2 norm: its order of sums in NumPy bit for bit, its error, its flag."""

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream.kernels.optim import reference as reference_optim
from sidestream.kernels.optim.op import l2_norm_
from sidestream.tests.kernels import oracle

EPSILON = 2.0**-24


class Counting(TorchDispatchMode):
    """Counts calls of operators."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def naive_sum(values, lanes):
    padded = np.zeros(-(-len(values) // lanes) * lanes, values.dtype)
    padded[: len(values)] = values
    total = np.zeros(lanes, values.dtype)
    for row in padded.reshape(-1, lanes):
        total = total + row
    while len(total) > 1:
        total = total.reshape(-1, 2)[:, 0] + total.reshape(-1, 2)[:, 1]
    return total[0]


def naive_norm(tensors):
    sums = []
    for tensor in tensors:
        chunk = 64 * 1024 // tensor.element_size()
        for part in tensor.reshape(-1).split(chunk):
            x = part.float().numpy()
            sums.append(naive_sum(x * x, 2048))
    return np.float32(np.sqrt(naive_sum(np.array(sums, np.float64), 8192)))


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


def test_the_order_of_sums_is_as_stated():
    tensors = mixed()
    norm, flag = norm_of(tensors)
    assert norm.item() == naive_norm(tensors)
    assert flag == 0


def test_more_sums_than_the_combination_has_lanes():
    sums = finite(20_000, torch.float32, 3).double()
    assert len(sums) > 2 * reference_optim.COMBINE_LANES
    found = reference_optim._sum_of(sums, reference_optim.COMBINE_LANES)
    assert found.item() == naive_sum(sums.numpy(), 8192)


def test_error_is_below_the_stated_bound():
    tensors = mixed()
    exact = math.sqrt(math.fsum(float(t.double().square().sum()) for t in tensors))
    assert abs(norm_of(tensors)[0].item() / exact - 1) < 31 * EPSILON
    squared = torch.zeros(1, dtype=torch.float64)
    l2_norm_(squared, tensors, squared=True)
    assert abs(squared.item() / exact**2 - 1) < 31 * EPSILON


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


def test_squares_that_overflow_set_no_flag():
    norm, flag = norm_of([torch.tensor([1e30, 1.0])])
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


def test_short_tensors_share_calls_and_have_the_same_bits():
    """More than are summed together, up to a row of lanes and beyond, between longer ones."""
    sizes = [1, 2, 3, 17, 2047, 2048, 2049, 40_000, *range(5, 90)]
    tensors = [finite(size, oracle.DTYPES[i % 3], i) for i, size in enumerate(sizes)]
    assert norm_of(tensors)[0] == naive_norm(tensors)
    norm, tiny = torch.zeros(()), [torch.ones(3)] * 256
    with Counting() as calls:
        reference_optim.l2_norm_(norm, tiny, found_inf=None, squared=True)
    assert norm == 768
    assert calls.count < 10 * len(tiny)


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


def test_opcheck_and_fake_tensors():
    overload = torch.ops.sidestream.l2_norm_.default
    options = {"found_inf": torch.tensor(False), "squared": False}
    positional = (torch.zeros(()), [torch.ones(5), torch.ones(3).half()])
    outcomes = torch.library.opcheck(overload, positional, options, raise_exception=False)
    assert set(outcomes.values()) == {"SUCCESS"}
    with FakeTensorMode():
        assert l2_norm_(torch.empty(()), [torch.empty(3)]) is None
