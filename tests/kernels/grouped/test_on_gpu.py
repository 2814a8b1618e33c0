"""The compiled grouped casts on a GPU against the CPU path, bit for bit, wrong ends included."""

import pytest
import torch

from sidestream.kernels import (
    amax_nvfp4_grouped,
    quantize_fp8_grouped,
    quantize_mx_grouped,
    quantize_nvfp4_grouped,
)
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.oracle import assert_same as same

pytestmark = pytest.mark.gpu

NOISE = {"rounding": "stochastic", "seed": -5}
SHAPES = [(3000, 4096), (300, 64), (1000, 96), (129, 77), (5, 33), (0, 64)]


def ends_of(rows, num_groups):
    """Some are equal, so that groups are empty; the last rows are in none."""
    cuts = torch.randint(0, rows + 1, (num_groups,), generator=torch.Generator().manual_seed(1))
    return cuts.sort().values.to(torch.int32)


def everything(x, ends):
    yield from quantize_fp8_grouped(x, ends, element="e5m2")
    yield amax_nvfp4_grouped(x, ends)
    for element in ("e4m3", "e2m1"):
        for noise in ({}, NOISE, NOISE | {"first_index": 7}):
            yield from quantize_mx_grouped(x, ends, element=element, **noise)
    for noise in ({}, NOISE, NOISE | {"first_index": 7}):
        yield from quantize_nvfp4_grouped(x, ends, **noise)


@pytest.mark.parametrize("late", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("num_groups", [1, 8, 257, 1024])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups(shape, num_groups, late):
    rows, columns = shape
    dtype = oracle.DTYPES[(rows + num_groups) % 3]
    x = oracle.values(rows * columns, dtype, seed=rows)
    memory = torch.zeros(len(x) + late, dtype=dtype, device="cuda")
    memory[late:] = x
    ends = ends_of(rows, num_groups)
    found = everything(memory[late:].view(shape), ends.cuda())
    for one, other in zip(found, everything(x.view(shape), ends), strict=True):
        same(one, other)


@pytest.mark.parametrize("ends", [[10, 5, 200], [-1, 5, 200], [5, 201, 201]], ids=str)
def test_wrong_ends_make_nans_and_a_host_that_waits_for_nothing(ends):
    x, ends = torch.randn(200, 64, device="cuda"), torch.tensor(ends, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        codes, scale_inv = quantize_fp8_grouped(x, ends)
        data, scales = quantize_mx_grouped(x, ends)
        packed, block_scales, amaxes = quantize_nvfp4_grouped(x, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found in (codes.float(), scale_inv, data.float(), scales.float(), amaxes):
        assert found.isnan().all()
    assert block_scales.float().isnan().all()
    assert packed.eq(0x77).all()
