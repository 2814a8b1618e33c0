"""A matrix and its transpose: the bits of the casts of either, square scales, refusals."""

import math

import pytest
import torch

from sidestream.kernels import (
    amax_nvfp4,
    amax_nvfp4_with_transpose,
    dequantize_nvfp4,
    quantize_fp8,
    quantize_fp8_with_transpose,
    quantize_mx,
    quantize_mx_with_transpose,
    quantize_nvfp4,
    quantize_nvfp4_with_transpose,
)
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.transposed.cases import NOISE, flat

SHAPE = (96, 160)


def values(*shape, dtype=torch.bfloat16, seed=1):
    return oracle.values(math.prod(shape), dtype, seed).view(shape)


def assert_all_same(found, expected):
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert one.shape == other.shape
        oracle.assert_same(one, other)


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize("noise", [{}, NOISE], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_mx_is_the_cast_of_either(element, noise, swizzled):
    x = values(*SHAPE)
    options = {"element": element, "rule": "even", "swizzled": swizzled, **noise}
    rows, columns = quantize_mx_with_transpose(x, **options)
    assert_all_same(rows, quantize_mx(x, **options))
    assert_all_same(columns, quantize_mx(x.t().contiguous(), **options))


@pytest.mark.parametrize("noise", [{}, NOISE], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("hadamard", [False, True], ids=["as it is", "transformed"])
def test_nvfp4_is_the_cast_of_either_the_transform_that_of_columns(hadamard, noise):
    x = values(*SHAPE)
    transposed = x.t().contiguous()
    rows, columns = quantize_nvfp4_with_transpose(x, hadamard=hadamard, swizzled=True, **noise)
    assert_all_same(rows, quantize_nvfp4(x, swizzled=True, **noise))
    assert_all_same(columns, quantize_nvfp4(transposed, hadamard=hadamard, swizzled=True, **noise))
    amaxes = torch.tensor(3.0), torch.tensor(5.0)
    found = quantize_nvfp4_with_transpose(x, amaxes=amaxes, hadamard=hadamard)
    assert_all_same(found[0], quantize_nvfp4(x, global_amax=amaxes[0]))
    assert_all_same(found[1], quantize_nvfp4(transposed, global_amax=amaxes[1], hadamard=hadamard))


def test_amaxes_are_those_of_the_matrix_and_of_its_transformed_columns():
    x = values(*SHAPE)
    found = amax_nvfp4_with_transpose(x)
    expected = amax_nvfp4(x), amax_nvfp4(x.t().contiguous(), hadamard=True)
    assert_all_same(found, expected)
    out = torch.ones(()), torch.ones(())
    assert amax_nvfp4_with_transpose(x, out=out)[1] is out[1]
    assert_all_same(out, expected)


@pytest.mark.parametrize("delayed", [False, True], ids=["current", "delayed"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e4m3fnuz"])
def test_fp8_is_the_cast_of_the_matrix_and_its_codes_transposed(element, delayed):
    x = values(*SHAPE).nan_to_num(0.0, 3.0, -3.0)
    options, expected_options = (
        {"scale": torch.tensor(0.3), "amax": torch.zeros(())} if delayed else {"power_of_2": True}
        for _ in range(2)
    )
    codes, codes_t, scale_inv = quantize_fp8_with_transpose(x, element=element, **options)
    expected = quantize_fp8(x, element=element, **expected_options)
    assert_all_same((codes, scale_inv), expected)
    assert_all_same(codes_t, expected[0].view(torch.uint8).t().contiguous().view(codes.dtype))
    if delayed:
        assert_all_same(options["amax"], expected_options["amax"])


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_square_scales_are_plain_ones_where_every_block_has_its_square_s_amax(dtype):
    """On the diagonals of squares lies the largest number of each, so in every row and column."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(2)).clamp(-3, 3)
    largest = torch.linspace(3.5, 9.0, 4 * 3).view(4, 3)
    diagonal = torch.eye(16, dtype=torch.bool).repeat(4, 3)
    x = torch.where(diagonal, largest.repeat_interleave(16, 0).repeat_interleave(16, 1), x)
    x = x.to(dtype)
    assert_all_same(quantize_nvfp4_with_transpose(x, square=True), quantize_nvfp4_with_transpose(x))


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_square_scales_give_both_sides_the_same_numbers(swizzled):
    """And the largest of the scales that its sixteen blocks would have."""
    x = values(*SHAPE)
    rows, columns = quantize_nvfp4_with_transpose(x, square=True, swizzled=swizzled)
    decoded = dequantize_nvfp4(*rows, swizzled=swizzled)
    assert_all_same(dequantize_nvfp4(*columns, swizzled=swizzled), decoded.t().contiguous())
    plain = quantize_nvfp4_with_transpose(x, square=True)[0][1].float()
    of_blocks = quantize_nvfp4(x)[1].float().view(6, 16, 10).amax(1)
    assert torch.equal(plain, of_blocks.repeat_interleave(16, 0))


def test_square_scales_take_the_first_amax_for_both_sides():
    x = values(32, 32)
    amaxes = torch.tensor(4.0), torch.tensor(9.0)
    found = quantize_nvfp4_with_transpose(x, amaxes=amaxes, square=True)
    expected = quantize_nvfp4_with_transpose(x, amaxes=amaxes[:1] * 2, square=True)
    assert_all_same(found, expected)


@pytest.mark.parametrize("shape", [(0, 32), (64, 0)], ids=str)
def test_nothing_to_do(shape):
    x = torch.empty(shape)
    for swizzled in (False, True):
        (data, _), (data_t, _) = quantize_mx_with_transpose(x, swizzled=swizzled)
        assert (data.shape, data_t.shape) == (shape, shape[::-1])
        for square in (False, True):
            quantize_nvfp4_with_transpose(x, swizzled=swizzled, square=square)
    assert [one.item() for one in amax_nvfp4_with_transpose(x)] == [0.0, 0.0]
    assert quantize_fp8_with_transpose(x)[2].item() == 1.0
    scale = torch.tensor(4.0)
    assert quantize_fp8_with_transpose(x, scale=scale)[2].item() == 0.25


BAD_SHAPES = {
    "mx rows": (quantize_mx_with_transpose, (40, 64), "32", (64, 64)),
    "mx columns": (quantize_mx_with_transpose, (64, 33), "32", (64, 64)),
    "nvfp4": (quantize_nvfp4_with_transpose, (8, 40), "16", (16, 48)),
    "amax": (amax_nvfp4_with_transpose, (8, 16), "16", (16, 16)),
    "fp8": (quantize_fp8_with_transpose, (16, 24), "16", (16, 32)),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_sides_that_blocks_do_not_divide_are_named_with_the_padding_that_would_do(name):
    function, shape, multiple, padded = BAD_SHAPES[name]
    with pytest.raises(ValueError, match=r"x: expected sides") as caught:
        function(torch.ones(shape))
    message = str(caught.value)
    assert f"multiples of {multiple}" in message
    assert f"got shape {shape}; pad it with zeros to {padded}" in message
    function(torch.ones(padded))


@pytest.mark.parametrize("shape", [(64,), (2, 32, 32), ()], ids=str)
def test_what_is_no_matrix_is_refused(shape):
    with pytest.raises(ValueError, match=r"x: expected a matrix, got shape"):
        quantize_mx_with_transpose(torch.ones(shape))


@pytest.mark.parametrize("options", [{"hadamard": True}, NOISE], ids=["transformed", "stochastic"])
def test_square_scales_are_refused_where_the_sides_would_differ(options):
    with pytest.raises(ValueError, match=r"square: expected False with .*, got True; both sides"):
        quantize_nvfp4_with_transpose(values(32, 32), square=True, **options)


def test_results_that_share_memory_are_refused_unwritten():
    x = torch.ones(32, 64)
    rows, columns = quantize_mx_with_transpose(x)
    shared = rows, (rows[0].view(64, 32), columns[1])
    before = [one.view(torch.uint8).clone() for one in flat(shared)]
    with pytest.raises(ValueError, match=r"out\[0\]\[0\]: expected memory apart from that of out"):
        quantize_mx_with_transpose(x + 1, out=shared)
    assert all(
        torch.equal(one.view(torch.uint8), other)
        for one, other in zip(flat(shared), before, strict=True)
    )


def test_one_graph_for_torch_compile():
    """Of all four, without a break."""

    def both(x):
        rows, columns = quantize_mx_with_transpose(x)
        made = quantize_nvfp4_with_transpose(x, hadamard=True)
        return rows, columns, made, quantize_fp8_with_transpose(x)

    x = torch.randn(64, 32)
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert_all_same(compiled(x), both(x))
