"""The interpreted MX kernels against `mx.reference`, bit for bit, canaries included."""

import mmap

import pytest
import torch

from sidestream.kernels.formats.device_table import codec_of
from sidestream.kernels.formats.table import MXFP8, SCALE_RULES
from sidestream.kernels.mx import kernel as mx
from sidestream.kernels.mx import reference
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.mx import cases as mx_cases

# Full tiles and a tail; rows that end in a short block, of odd numbers of elements, of less than a
# block; swizzled, full tiles and ones that lack rows or columns, several down and several across.
PLAIN = [(2, 2048 + 96), (3, 40, 32), (40, 129), (70, 7)]
SWIZZLED = [(140, 128), (3, 161)]
CASES = [(shape, False) for shape in PLAIN] + [(shape, True) for shape in SWIZZLED]
MAP_NORESERVE = 0x4000  # Linux: sparse memory may be larger than the machine


@pytest.fixture
def large_tiles(monkeypatch):
    """Fewer programs, which are what time here goes by: whole tiles of swizzled scales."""
    monkeypatch.setattr(mx, "TILE_BLOCKS", 512)
    mx.default_config.cache_clear()
    yield
    mx.default_config.cache_clear()


def check(x, options, dtypes=oracle.DTYPES[1:2], margin=mx_cases.MARGIN):
    """Quantize with kernels and reference, then dequantize to each of `dtypes` with both."""
    element, swizzled = options[0], options[-1]
    found = mx_cases.quantized(mx.quantize_mx_, x, options, margin)
    expected = mx_cases.quantized(reference.quantize_mx_, x, options, margin)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    shapes = mx_cases.shapes(x.shape, element, swizzled)
    data, scales = (
        memory[margin : len(memory) - margin].view(shape)
        for memory, shape in zip(found, shapes, strict=True)
    )
    for dtype in dtypes:
        arguments = (data, scales, element, swizzled)
        values = mx_cases.dequantized(mx.dequantize_mx_, x.shape, dtype, arguments)
        wanted = mx_cases.dequantized(reference.dequantize_mx_, x.shape, dtype, arguments)
        oracle.assert_same_bits(values, wanted)


def inputs(shape, dtype=torch.float32, seed=1):
    return oracle.values(torch.Size(shape).numel(), dtype, seed).view(shape)


@pytest.mark.parametrize(("shape", "swizzled"), CASES, ids=str)
@pytest.mark.parametrize("element", mx_cases.ELEMENTS)
def test_shapes(element, shape, swizzled, large_tiles):
    dtype = oracle.DTYPES[len(shape) % 3]
    check(inputs(shape, dtype), (element, "rceil", None, 0, swizzled))


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_tiles_as_launched_on_a_gpu(swizzled):
    check(inputs((132, 96)), ("e2m1", "rceil", None, 0, swizzled), oracle.DTYPES)


@pytest.mark.parametrize("first_index", [2**33 + 16, 2**33 + 5], ids=hex)
@pytest.mark.parametrize("element", mx_cases.ELEMENTS)
def test_stochastic(element, first_index, large_tiles):
    """Tiles of 512 blocks: a full one and one of masked blocks; all masked by the odd index."""
    seed = -(2**63) + 12345
    check(inputs((17, 1024)), (element, "rceil", seed, first_index, False), ())
    check(inputs((129, 128)), (element, "floor", seed, first_index, True), ())


@pytest.mark.parametrize(("element", "rule"), mx_cases.COMBINATIONS, ids=str)
def test_rules(element, rule, large_tiles):
    """Powers of two, what is next to them and between, subnormals, NaN, infinity."""
    check(mx_cases.blocks_of_amaxes(step=5), (element, rule, None, 0, False))


def test_unaligned_memory(large_tiles):
    memory = inputs((16513,), torch.bfloat16)
    check(memory[1:].view(4, 4128), ("e4m3", "rceil", None, 0, False))
    check(memory[1:].view(128, 129)[:, :128].contiguous(), ("e2m1", "rceil", None, 0, True), (), 3)


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0,)], ids=str)
def test_nothing_to_do_launches_nothing(shape):
    for swizzled in (False, True):
        check(torch.empty(shape), ("e4m3", "rceil", None, 0, swizzled))


def sparse(numel, dtype):
    """Zeros, of which only the pages that are touched exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype)


@pytest.mark.parametrize("full", [False, True], ids=["masked", "full"])
def test_elements_beyond_32_bits(full):
    """Rows of 2**30 elements: the first program's 32 rows of a tile go far beyond 2**32."""
    row_numel, rows = 2**30, 128
    x, data = (
        sparse(rows * row_numel, torch.bfloat16),
        sparse(rows * row_numel, torch.uint8),
    )
    x, data = x.view(rows, row_numel), data.view(rows, row_numel)
    chosen = torch.tensor([32 * group + row for group in range(4) for row in range(8)])
    for row in chosen.tolist():
        x[row, :128] = oracle.values(128, torch.bfloat16, seed=row)
    scales = torch.full((512,), mx_cases.POISON, dtype=torch.uint8)
    mx._quantize_kernel[1,](
        x,
        data,
        scales,
        rows,
        row_numel,
        row_numel // 128,
        None,
        0,
        CODEC=codec_of(MXFP8, SCALE_RULES["rceil"]),
        HARDWARE=False,
        SWIZZLED=True,
        FULL=full,
        MASKED=not full,
        BLOCKS=128,
    )
    near = torch.stack([x[row, :128] for row in chosen.tolist()])
    options = ("e4m3", "rceil", None, 0, False)
    expected = mx_cases.quantized(reference.quantize_mx_, near, options, 0)
    found = torch.stack([data[row, :128] for row in chosen.tolist()])
    assert torch.equal(found.view(-1), expected[0])
    position = (chosen % 32) * 16 + chosen // 32 * 4
    places = position.unsqueeze(1) + torch.arange(4)
    assert torch.equal(scales[places].view(-1), expected[1])
    assert scales[128:].eq(mx_cases.POISON).all()
