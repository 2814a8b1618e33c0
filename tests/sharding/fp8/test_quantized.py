"""Quantised tensors have the bits of the kernels' casts; what is not finite shows; predicates."""

import math

import pytest
import torch

from sidestream.sharding.fp8 import (
    QuantizedTensor,
    is_float8_tensor,
    is_mxfp8_tensor,
    is_nvfp4_tensor,
    quantize,
    recipe_for,
)
from sidestream.sharding.fp8.quantized import fill_stretch
from sidestream.tests.sharding.fp8.kinds import BLOCKS, by_kernels, same, wild

KINDS = pytest.mark.parametrize("kind", list(BLOCKS))


@KINDS
def test_bits_are_the_kernels(kind):
    for shape in ((200, 260), (129, 128), (1, 2), (130, 34)):
        for dtype in (torch.float32, torch.bfloat16):
            x = wild(*shape).to(dtype)
            codes, scales, amax, values = by_kernels(x, kind)
            found = quantize(x, BLOCKS[kind])
            assert same(found.codes, codes), (shape, dtype)
            assert same(found.scales, scales), (shape, dtype)
            assert amax is None or same(found.amax, amax)
            assert same(found.dequantize(), values), (shape, dtype)
            assert found.dequantize(torch.bfloat16).dtype == torch.bfloat16


@KINDS
def test_other_shapes(kind):
    for shape in ((0, 4), (3, 0), (6,), (2, 3, 64), (1, 5, 130)):
        x = torch.randn(shape)
        found = quantize(x, BLOCKS[kind])
        flat = by_kernels(x.reshape(-1, shape[-1]), kind)[-1] if x.numel() else x
        assert same(found.dequantize().reshape(flat.shape), flat), shape


@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_what_is_not_finite_spoils_its_block_and_no_other(kind, bad):
    x = wild(256, 256)
    x[200, 140] = 0.0  # so that the largest magnitudes are those of other elements
    clean = quantize(x, BLOCKS[kind]).dequantize()
    x[200, 140] = -bad
    found = quantize(x, BLOCKS[kind]).dequantize()
    height, width = BLOCKS[kind].height, BLOCKS[kind].width
    inside = torch.zeros(256, 256, dtype=torch.bool)
    row, column = (0, 0) if width is None else (200 // height * height, 140 // width * width)
    inside[row : row + (256 if width is None else height), column : column + (width or 256)] = True
    assert found[inside].isnan().all()
    if kind != "nvfp4":  # whose tensor scale no longer sees the block's other elements
        assert same(found[~inside], clean[~inside])
    assert found[~inside].isfinite().all()


def test_transposed_code_by_code():
    x = wild(200, 260)
    for kind in ("tensor", "tensor e5m2", "tiles"):
        turned = quantize(x, BLOCKS[kind]).transposed()
        expected = quantize(x.t().contiguous(), BLOCKS[kind])
        assert same(turned.codes, expected.codes)
        assert same(turned.scales, expected.scales)
    with pytest.raises(ValueError, match=r"square blocks, got shape .* in blocks of 1 x 32"):
        quantize(x, BLOCKS["mxfp8"]).transposed()


@KINDS
def test_what_is_no_source_or_no_result_is_refused(kind):
    for x in (torch.ones(2, 64).double(), torch.ones(2, 64).int(), torch.ones(64, 2).t()):
        with pytest.raises(ValueError, match=r"x: expected (torch.float32|a contiguous)"):
            quantize(x, BLOCKS[kind])
    if BLOCKS[kind].width is not None:
        with pytest.raises(ValueError, match="scale: expected none for blocks of"):
            quantize(torch.ones(2, 64), BLOCKS[kind], scale=torch.tensor(2.0))
    with pytest.raises(ValueError, match=r"dtype: expected one of torch\.float32"):
        quantize(torch.ones(2, 64), BLOCKS[kind]).dequantize(torch.int32)


def test_rows_of_pairs():
    with pytest.raises(ValueError, match="rows of a multiple of 2 elements for nvfp4, got"):
        QuantizedTensor.empty((4, 7), BLOCKS["nvfp4"])


def test_codes_may_lie_in_a_buffer_of_others():
    buffer = torch.zeros(1000, dtype=torch.uint8)
    codes = buffer[128 : 128 + 64].view(torch.float8_e4m3fn).view(2, 32)
    empty = QuantizedTensor.empty((2, 32), BLOCKS["mxfp8"])
    into = QuantizedTensor(empty.blocks, empty.shape, codes, empty.scales)
    x = torch.randn(2, 32)
    fill_stretch(into, x.view(-1), 0, x.abs().amax(1, keepdim=True))
    assert same(codes, quantize(x, BLOCKS["mxfp8"]).codes)
    assert buffer[:128].eq(0).all()
    assert buffer[192:].eq(0).all()


def test_memory_that_does_not_fit_is_refused():
    blocks = BLOCKS["nvfp4"]
    good = QuantizedTensor.empty((2, 32), blocks)
    parts = {"codes": good.codes, "scales": good.scales, "amax": good.amax}
    assert QuantizedTensor(blocks, (2, 32), **parts).shape == torch.Size((2, 32))
    for name, memory, kind in (
        ("codes", good.codes[:1], ValueError),
        ("codes", torch.empty(2, 32, dtype=torch.uint8)[:, ::2], ValueError),
        ("codes", torch.empty(2, 16), ValueError),
        ("scales", good.scales.t(), ValueError),
        ("scales", torch.empty(2, 2), ValueError),
        ("amax", None, TypeError),
    ):
        with pytest.raises(kind, match=f"{name}: expected"):
            QuantizedTensor(blocks, good.shape, **{**parts, name: memory})


def double(name, module="transformer_engine.pytorch.tensor.of_some_version", *bases):
    """An object of a class called so, as if of that package."""
    return type(name, bases, {"__module__": module})()


PREDICATES = (is_float8_tensor, is_mxfp8_tensor, is_nvfp4_tensor)


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (quantize(torch.ones(2, 16), recipe_for("tensorwise").weight), (1, 0, 0)),
        (quantize(torch.ones(2, 16), recipe_for("blockwise").weight), (1, 0, 0)),
        (quantize(torch.ones(2, 16), recipe_for("mxfp8").weight), (1, 1, 0)),
        (quantize(torch.ones(2, 16), recipe_for("nvfp4").weight), (0, 0, 1)),
        (double("Float8Tensor"), (1, 0, 0)),
        (double("Float8Tensor", "transformer_engine.pytorch.float8_tensor"), (1, 0, 0)),
        (double("Float8BlockwiseQTensor"), (1, 0, 0)),
        (double("MXFP8Tensor"), (1, 1, 0)),
        (double("NVFP4Tensor"), (0, 0, 1)),
        (double("Own", "here", type(double("MXFP8Tensor"))), (1, 1, 0)),
        (double("Float8Tensor", "torchao.float8"), (0, 0, 0)),
        (double("Recipe"), (0, 0, 0)),
        (torch.ones(2).to(torch.float8_e4m3fn), (0, 0, 0)),  # codes alone: what they mean is open
        (None, (0, 0, 0)),
    ],
    ids=lambda value: (
        "".join(map(str, value)) if isinstance(value, tuple) else type(value).__name__
    ),
)
def test_predicates(thing, expected):
    assert tuple(predicate(thing) for predicate in PREDICATES) == expected
