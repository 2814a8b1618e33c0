"""Formats of elements and of blocks: their limits, and the bytes that blocks take."""

import ml_dtypes
import pytest

from sidestream.kernels.formats import table as formats


@pytest.mark.parametrize(
    ("element", "limits"),
    [
        (formats.E4M3, ml_dtypes.finfo("float8_e4m3fn")),
        (formats.E5M2, ml_dtypes.finfo("float8_e5m2")),
        (formats.E2M1, ml_dtypes.finfo("float4_e2m1fn")),
        (formats.E8M0, ml_dtypes.finfo("float8_e8m0fnu")),
        (formats.E4M3FNUZ, ml_dtypes.finfo("float8_e4m3fnuz")),
    ],
    ids=lambda found: getattr(found, "name", None),
)
def test_limits_of_elements_are_those_of_ml_dtypes(element, limits):
    assert element.max_finite == float(limits.max)
    assert element.min_normal == float(limits.smallest_normal)
    if element.mantissa_bits:
        assert element.min_subnormal == float(limits.smallest_subnormal)
    assert (element.bits, element.mantissa_bits) == (limits.bits, limits.nmant)
    assert 2.0**element.emax <= element.max_finite < 2.0 ** (element.emax + 1)


@pytest.mark.parametrize(
    ("block_format", "expected"),
    [
        (formats.FP8_TENSOR, [0, 1 + 4, 129 + 4, 256 + 4]),
        (formats.FP8_ROW, [0, 1 + 4, 129 + 4, 256 + 4]),
        (formats.FP8_1X128, [0, 1 + 4, 129 + 8, 256 + 8]),
        (formats.MXFP8, [0, 1 + 1, 129 + 5, 256 + 8]),
        (formats.MXFP4, [0, 1 + 1, 65 + 5, 128 + 8]),
        (formats.NVFP4, [0, 1 + 1 + 4, 65 + 9 + 4, 128 + 16 + 4]),
    ],
    ids=lambda found: getattr(found, "name", None),
)
def test_bytes_of_block_formats(block_format, expected):
    """Codes, scales of whole and short blocks, and NVFP4's scale of the tensor."""
    assert [block_format.num_bytes(numel) for numel in (0, 1, 129, 256)] == expected
    with pytest.raises(ValueError, match=r"numel: expected 0 or more, got -1"):
        block_format.num_bytes(-1)
