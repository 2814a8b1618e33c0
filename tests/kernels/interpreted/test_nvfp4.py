"""The interpreted NVFP4 and Hadamard kernels against their definitions, bit for bit."""

import math

import pytest
import torch
import triton
import triton.language as tl

from sidestream.kernels.formats import device_swizzle, swizzle
from sidestream.kernels.nvfp4 import hadamard, reference
from sidestream.kernels.nvfp4 import kernel as nvfp4
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.nvfp4 import cases as nvfp4_cases

POISON = 0xAB
AROUND_BYTES = 64
DTYPES = pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
VARIANTS = pytest.mark.parametrize("torchao", [False, True], ids=["te", "torchao"])
AMAXES = (0.0, 7e-36, 0.7, 3e38, math.inf, math.nan, -1.0)


class Poisoned:
    """A tensor full of poison in memory that goes on on both sides, where nobody may write."""

    def __init__(self, shape, dtype, late_bytes=0):
        self.numel_bytes = math.prod(shape) * dtype.itemsize
        self.start = AROUND_BYTES + late_bytes
        self.memory = torch.full((self.start + self.numel_bytes + AROUND_BYTES,), POISON).byte()
        self.bytes = self.memory[self.start : self.start + self.numel_bytes]
        self.tensor = self.bytes.view(dtype).view(shape)

    def assert_same(self, expected):
        assert torch.equal(self.bytes, expected.contiguous().view(-1).view(torch.uint8))
        assert self.memory[: self.start].eq(POISON).all()
        assert self.memory[self.start + self.numel_bytes :].eq(POISON).all()


def scale_shape(x, swizzled):
    columns = -(-x.shape[-1] // 16)
    if swizzled:
        return (swizzle.swizzled_numel(x.shape[:-1].numel(), columns),)
    return (*x.shape[:-1], columns)


def check(x, amax=None, *, dtype=torch.float32, torchao=False, swizzled=False, **options):
    """Amax, codes and scales, and the way back, of the kernels and of the definition."""
    if amax is None:
        amax = torch.tensor(math.nan)
        wanted = {key: options[key] for key in ("hadamard", "as_nan") if key in options}
        reference.amax_nvfp4_(amax, x, **wanted)
        found = Poisoned((), torch.float32)
        nvfp4.amax_nvfp4_(found.tensor, x, **wanted)
        found.assert_same(amax)

    data_shape = (*x.shape[:-1], -(-x.shape[-1] // 2))
    data, scales = (
        Poisoned(shape, torch.uint8) for shape in (data_shape, scale_shape(x, swizzled))
    )
    options |= {"torchao": torchao, "swizzled": swizzled}
    nvfp4.quantize_nvfp4_(data.tensor, scales.tensor, x, amax, **options)
    expected_data, expected_scales = (torch.full_like(p.tensor, 1) for p in (data, scales))
    reference.quantize_nvfp4_(expected_data, expected_scales, x, amax, **options)
    scales.assert_same(expected_scales)
    data.assert_same(expected_data)

    out = Poisoned(x.shape, dtype)
    arguments = (expected_data, expected_scales, amax, torchao, swizzled)
    nvfp4.dequantize_nvfp4_(out.tensor, *arguments)
    expected_out = torch.full_like(out.tensor, 1.5)
    reference.dequantize_nvfp4_(expected_out, *arguments)
    oracle.assert_same_bits(out.tensor, expected_out)
    out.assert_same(out.tensor.clone())


@pytest.mark.parametrize("shape", nvfp4_cases.SHAPES, ids=str)
def test_shapes(shape):
    check(nvfp4_cases.spread(shape), torchao=len(shape) == 1)


@pytest.mark.parametrize(
    ("dtype", "transformed"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
def test_stochastic(dtype, transformed):
    """Noise of whole groups in full tiles, then of what does not start with one."""
    options = {"seed": nvfp4_cases.SEED, "hadamard": transformed, "dtype": dtype}
    x = nvfp4_cases.spread((4096 + 50,), dtype)
    for first_index in (2**33, 5):
        check(x, first_index=first_index, **options)
    if transformed:
        check(nvfp4_cases.spread((4, 39), dtype), first_index=7, **options)


@pytest.mark.parametrize(("torchao", "seed"), [(False, 1), (True, None)], ids=str)
def test_special_values(torchao, seed):
    x = nvfp4_cases.special()
    nans = torch.full((33,), math.nan)
    tiny = x * 1e-37
    check(torch.cat((x, nans)), torchao=torchao, seed=seed)
    check(tiny, torchao=torchao, seed=seed)


@pytest.mark.parametrize(("torchao", "seed"), [(False, 1), (True, None)], ids=str)
def test_blocks_that_are_not_finite_as_nan(torchao, seed):
    """In a full tile, in a tail, and in rows with short blocks; nothing finite at all."""
    options = {"torchao": torchao, "seed": seed, "as_nan": True}
    check(nvfp4_cases.special(4096 + 160), **options)
    check(nvfp4_cases.special(160).view(4, 40), hadamard=True, swizzled=True, **options)
    check(torch.full((33,), math.nan), **options)


@VARIANTS
def test_amaxes_beyond_use(torchao):
    x = nvfp4_cases.special(4096)
    for amax in AMAXES:
        for as_nan in (False, True):
            check(x, torch.tensor(amax), torchao=torchao, as_nan=as_nan)


@pytest.mark.parametrize("shape", [(3, 16 * 128), (2, 65, 100), (130, 64)], ids=str)
def test_swizzled_scales(shape):
    """Rows across tiles of 128 x 4 scales: a full tile of elements and more, short blocks."""
    check(nvfp4_cases.spread(shape), swizzled=True)


@triton.jit
def scale_places(found, base, first_block, columns, reciprocal, BLOCKS: tl.constexpr):
    """`device_swizzle.scale_pointers` of swizzled scales, from `base` on."""
    first_block = first_block.to(tl.int64)
    pointers = device_swizzle.scale_pointers(
        base, first_block, columns, reciprocal, True, False, BLOCKS
    )
    tl.store(found + tl.arange(0, BLOCKS), pointers.to(tl.int64) - base.to(tl.int64))


@pytest.mark.parametrize(
    "columns", [1, 2, 3, 63, 255, 256, 257, 1023, 1024, 1025, 2**20 + 1, 2**30]
)
def test_places_of_swizzled_scales(columns):
    """At a row's end, in the last of 128 rows, and where blocks and their places need 64 bits."""
    ends = (columns, 127 * columns, 2**31, 2**33 // columns * columns, 2**39)
    lanes = torch.arange(1024)
    reciprocal = device_swizzle.reciprocal_of(columns)
    across = swizzle.tiles_across(columns)
    for end in ends:
        for first in (max(end - 1000, 0), end - 1, end):
            at = first + lanes
            expected = swizzle.swizzled_index(at // columns, at % columns, across)
            found = torch.full_like(lanes, -1)
            scale_places[1,](found, lanes.byte(), first, columns, reciprocal, BLOCKS=1024)
            assert torch.equal(found, expected), first


def test_unaligned_memory():
    x = nvfp4_cases.spread((4096 + 17,))[1:]
    check(x)
    check(x, hadamard=True)


@DTYPES
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_hadamard(dtype, inverse):
    inputs = [nvfp4_cases.spread(shape, dtype) for shape in ((4096 + 33,), (5, 37), (2, 0))]
    for x in (*inputs[: 1 if inverse else 3], nvfp4_cases.special().to(dtype)):
        expected = torch.full_like(x, 1.5)
        reference.hadamard16_(expected, x, inverse)
        for in_place in (False, True):
            found = Poisoned(x.shape, dtype)
            source = found.tensor.copy_(x) if in_place else x
            hadamard.hadamard16_(found.tensor, source, inverse)
            oracle.assert_same_bits(found.tensor, expected)
            found.assert_same(found.tensor.clone())
