"""The swizzled layout of scales: torchao as an independent oracle, golden places, refusals."""

import pytest
import torch
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from sidestream.kernels.formats import swizzle

SHAPES = [(1, 1), (128, 4), (127, 3), (129, 5), (300, 9), (256, 16)]


def scales_of(shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(1, 256, shape, generator=generator).to(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout_is_torchao_s(shape):
    scales = scales_of(shape)
    swizzled = swizzle.swizzle_scales(scales)
    assert swizzled.numel() == swizzle.swizzled_numel(*shape)
    assert torch.equal(swizzled, to_blocked(scales).flatten())
    assert torch.equal(swizzle.unswizzle_scales(swizzled, *shape), scales)
    assert torch.equal(from_blocked(swizzled, *shape), scales)
    assert int(swizzled.eq(0).sum()) == swizzled.numel() - scales.numel()


def test_golden_places():
    """(row, column) -> place, in a matrix of 8 columns, two tiles across."""
    places = {(0, 0): 0, (0, 3): 3, (32, 0): 4, (96, 3): 15, (1, 0): 16, (127, 3): 511}
    places |= {(0, 4): 512, (37, 6): 598, (128, 0): 1024, (2**33, 5): 2**27 // 2 * 1024 + 513}
    for (row, column), place in places.items():
        assert swizzle.swizzled_index(row, column, 2) == place


def test_tensors_of_more_and_fewer_dimensions():
    scales = scales_of((3, 50, 6))
    swizzled = swizzle.swizzle_scales(scales.view(torch.float8_e8m0fnu))
    assert swizzled.dtype is torch.float8_e8m0fnu
    assert torch.equal(swizzled.view(torch.uint8), swizzle.swizzle_scales(scales.view(150, 6)))
    assert torch.equal(swizzle.swizzle_scales(scales[0, 0]), swizzle.swizzle_scales(scales[0, :1]))
    transposed = scales_of((6, 200)).t()
    assert torch.equal(
        swizzle.swizzle_scales(transposed), swizzle.swizzle_scales(transposed.contiguous())
    )


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_nothing_is_nothing(shape):
    swizzled = swizzle.swizzle_scales(torch.empty(shape, dtype=torch.uint8))
    assert swizzled.shape == (0,)
    assert swizzle.unswizzle_scales(swizzled, *shape).shape == shape


def test_bad_arguments_say_what_is_expected():
    with pytest.raises(
        ValueError, match=r"scales: expected a dtype of one byte, got torch.float32"
    ):
        swizzle.swizzle_scales(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"scales: expected \[\.\.\., columns\], got a scalar"):
        swizzle.swizzle_scales(torch.zeros((), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"swizzled: expected 512 .* of 3 rows of 4 blocks, got"):
        swizzle.unswizzle_scales(torch.zeros(511, dtype=torch.uint8), 3, 4)
    with pytest.raises(ValueError, match=r"rows: expected 0 or more, got -1"):
        swizzle.unswizzle_scales(torch.zeros(512, dtype=torch.uint8), -1, 4)
