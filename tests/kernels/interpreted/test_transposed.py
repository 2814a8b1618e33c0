"""The interpreted kernels of both orientations against their definition, bit for bit."""

import pytest
import torch

from sidestream.kernels import quantize_mx_with_transpose
from sidestream.kernels.formats.device_table import codec_of
from sidestream.kernels.formats.table import MXFP8, SCALE_RULES
from sidestream.kernels.op import launching_on_cpu
from sidestream.kernels.transposed import mx
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.interpreted.test_mx import sparse
from sidestream.tests.kernels.transposed import cases


@pytest.mark.parametrize("name", cases.CASES)
def test_bits(name):
    expected = cases.results(name, *cases.inputs(name))
    with launching_on_cpu():
        found = cases.results(name, *cases.inputs(name))
    for one, other in zip(found, expected, strict=True):
        oracle.assert_same(one, other)


@pytest.mark.parametrize("shape", [(128, 128), (96, 32)], ids=str)
@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
@pytest.mark.parametrize("margin", [32, 33], ids=["aligned", "unaligned"])
def test_nothing_is_written_beside_the_results(margin, element, shape):
    """Whole tiles and parts; x starts where no wide access does if they do."""
    x = oracle.values(shape[0] * shape[1] + margin, torch.bfloat16, seed=margin)[margin:].view(
        shape
    )
    options = {"element": element, "swizzled": shape[0] == 96}
    memories = []
    expected = cases.flat(quantize_mx_with_transpose(x, **options))
    for launching in (False, True):
        (data, scales, data_t, scales_t), memory = cases.inside(expected, margin)
        memories.append(memory)
        out = ((data, scales), (data_t, scales_t))
        if launching:
            with launching_on_cpu():
                quantize_mx_with_transpose(x, out=out, **options)
        else:
            quantize_mx_with_transpose(x, out=out, **options)
    for one, other in zip(*memories, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(128, 2**26), (2**26, 64)], ids=["rows", "columns"])
def test_elements_beyond_32_bits(shape):
    """The first tile: its rows, or its columns where they are transposed, go far beyond 2^32."""
    rows, columns = shape
    x = sparse(rows * columns, torch.bfloat16).view(rows, columns)
    data, data_t = sparse(x.numel(), torch.uint8), sparse(x.numel(), torch.uint8)
    scales, scales_t = (sparse(x.numel() // 32, torch.uint8) for _ in range(2))
    near = x[:128, :64]
    near.copy_(oracle.values(near.numel(), torch.bfloat16, seed=3).view(near.shape))
    layout = mx.tiles.cut_of(near, (), MXFP8.element).layout
    codec = codec_of(MXFP8, SCALE_RULES["rceil"])
    sizes = (rows, columns, columns // 64)
    mx._quantize_kernel[1,](
        x,
        data,
        scales,
        data_t,
        scales_t,
        *sizes,
        None,
        0,
        CODEC=codec,
        HARDWARE=False,
        LAYOUT=layout,
    )
    found = (
        data.view(shape)[:128, :64],
        scales.view(rows, -1)[:128, :2],
        data_t.view(columns, rows)[:64, :128],
        scales_t.view(columns, -1)[:64, :4],
    )
    expected = cases.flat(quantize_mx_with_transpose(near.contiguous()))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other.view(torch.uint8))
