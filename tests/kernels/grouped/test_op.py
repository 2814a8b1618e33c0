"""Grouped casts against the single casts, their layout against torch's checks, refusals, ops."""

import pytest
import torch

from sidestream.kernels import (
    amax_nvfp4,
    amax_nvfp4_grouped,
    dequantize_fp8,
    dequantize_mx,
    dequantize_nvfp4,
    quantize_fp8,
    quantize_fp8_grouped,
    quantize_mx,
    quantize_mx_grouped,
    quantize_nvfp4,
    quantize_nvfp4_grouped,
)
from sidestream.kernels.grouped import reference
from sidestream.kernels.launch import recorded
from sidestream.kernels.op import launching_on_cpu
from sidestream.tests.kernels import oracle

ROWS, COLUMNS = 300, 96
# Of 130, none, 5 and 155 rows; ten belong to no group.
BOUNDS = [(0, 130), (130, 130), (130, 135), (135, 290)]
ENDS = torch.tensor([end for _, end in BOUNDS], dtype=torch.int32)
X = oracle.values(ROWS * COLUMNS, torch.bfloat16, seed=1).view(ROWS, COLUMNS)
NOISE = {"rounding": "stochastic", "seed": 2**63 + 11}
INTEGERS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)


def as_bytes(tensor):
    return tensor.view(torch.uint8)


def scales_of(scales, columns):
    """[(scales of a group, as it would be alone), ...], and what lies behind: by hand."""
    across, at, found = -(-columns // 4), 0, []
    for start, end in BOUNDS:
        numel = -(-(end - start) // 128) * across * 512
        found.append(scales[at : at + numel])
        at += numel
    return found, scales[at:]


@INTEGERS
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e4m3fnuz"])
def test_fp8_of_every_group(element, dtype):
    codes, scale_inv = quantize_fp8_grouped(X, ENDS.to(dtype), element=element, power_of_2=True)
    for index, (start, end) in enumerate(BOUNDS):
        one, inverse = quantize_fp8(X[start:end], element=element, power_of_2=True)
        assert torch.equal(as_bytes(codes[start:end]), as_bytes(one))
        oracle.assert_same_bits(scale_inv[index], inverse)
    assert codes[290:].float().isnan().all()


@pytest.mark.parametrize("noise", [{}, NOISE], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_mx_of_every_group(element, noise):
    data, scales = quantize_mx_grouped(X, ENDS, element=element, rule="even", **noise)
    by_group, behind = scales_of(scales, COLUMNS // 32)
    for (start, end), found in zip(BOUNDS, by_group, strict=True):
        index = noise and {"first_index": start * COLUMNS}
        options = {"element": element, "rule": "even", "swizzled": True, **noise, **index}
        one, expected = quantize_mx(X[start:end], **options)
        assert torch.equal(as_bytes(data[start:end]), as_bytes(one))
        assert torch.equal(as_bytes(found), as_bytes(expected))
    assert len(behind) >= 512
    assert as_bytes(behind).eq(0xFF).all()


@pytest.mark.parametrize("noise", [{}, NOISE], ids=["nearest", "stochastic"])
def test_nvfp4_of_every_group(noise):
    data, scales, amaxes = quantize_nvfp4_grouped(X, ENDS, **noise)
    by_group, behind = scales_of(scales, COLUMNS // 16)
    for group, ((start, end), found) in enumerate(zip(BOUNDS, by_group, strict=True)):
        index = noise and {"first_index": start * COLUMNS}
        one, expected, amax = quantize_nvfp4(X[start:end], swizzled=True, **noise, **index)
        assert torch.equal(data[start:end], one)
        assert torch.equal(as_bytes(found), as_bytes(expected))
        assert amaxes[group] == amax
    assert as_bytes(behind).eq(0x7F).all()
    assert data[290:].eq(0x77).all()


def test_amaxes_that_are_given_hold_and_out_is_filled():
    amaxes = torch.tensor([9.0, 8.0, 7.0, 6.0])
    expected = quantize_nvfp4_grouped(X, ENDS, amaxes=amaxes)
    one = quantize_nvfp4(X[135:290], global_amax=amaxes[3], swizzled=True)
    assert torch.equal(expected[0][135:290], one[0])
    out = torch.zeros_like(expected[0]), torch.zeros_like(expected[1])
    found = quantize_nvfp4_grouped(X, ENDS, amaxes=amaxes, out=out)
    assert found[:2] == out
    assert torch.equal(out[0], expected[0])
    made = amax_nvfp4_grouped(X, ENDS, out=amaxes)
    assert made is amaxes
    wanted = [amax_nvfp4(X[start:end]) for start, end in BOUNDS]
    assert amaxes.tolist() == [float(one) for one in wanted]


def test_torch_takes_the_scales_of_mxfp8():
    """By its own checks of shapes; meta tensors have no values."""
    data, scales = quantize_mx_grouped(X, ENDS)
    weights = torch.empty(4, 64, COLUMNS, dtype=data.dtype, device="meta").transpose(1, 2)
    weight_scales = torch.empty(4, 128 * 4, dtype=scales.dtype, device="meta")
    found = torch._scaled_grouped_mm(
        data.to("meta"),
        weights,
        scales.view(-1, 4).to("meta"),
        weight_scales,
        offs=ENDS.to("meta"),
        out_dtype=torch.bfloat16,
    )
    assert found.shape == (ROWS, 64)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("num_groups", [1, 3, 200])
def test_the_memory_is_enough_for_any_groups_and_no_more(rows, num_groups):
    """The worst: as many groups of one row as there may be, and one that has the others."""
    ones = min(num_groups, rows - 1)
    tiles = ones + -(-(rows - ones) // 128)
    assert reference.scales_numel(rows, 4, num_groups) == tiles * 512


@pytest.mark.parametrize(
    "ends", [[10, 5, 20], [-1, 5, 20], [10, 20, 41], [41, 41, 40]], ids=["order", "low", "end", "3"]
)
def test_ends_that_no_host_has_checked_make_nans(ends):
    """As on a GPU: whatever is decoded by whatever scale is NaN."""
    x, ends = torch.randn(40, 64), torch.tensor(ends)
    ops = torch.ops.sidestream
    codes, scale_inv = torch.ones(40, 64).to(torch.float8_e4m3fn), torch.ones(3)
    ops.quantize_fp8_grouped_(codes, scale_inv, x, ends, False)
    assert dequantize_fp8(codes, torch.ones(())).isnan().all()
    assert scale_inv.isnan().all()
    amaxes = torch.ones(3)
    ops.amax_nvfp4_grouped_(amaxes, x, ends)
    assert amaxes.isnan().all()
    data = torch.zeros(40, 32, dtype=torch.uint8)
    scales = torch.zeros(4 * 512, dtype=torch.uint8)
    ops.quantize_mx_grouped_(
        data, scales.view(torch.float8_e8m0fnu), x, ends, "e2m1", "rceil", None, 0
    )
    made = dequantize_mx(
        data, scales[:512].view(torch.float8_e8m0fnu), element="e2m1", swizzled=True
    )
    assert made.isnan().all()
    assert scales.eq(0xFF).all()
    ops.quantize_nvfp4_grouped_(
        data, scales.view(torch.float8_e4m3fn), x, ends, torch.ones(3), None, 0
    )
    made = dequantize_nvfp4(
        data, scales[:512].view(torch.float8_e4m3fn), torch.ones(()), swizzled=True
    )
    assert made.isnan().all()


def test_no_rows_and_no_columns():
    for shape in ((0, 64), (5, 0)):
        x, ends = torch.empty(shape), torch.tensor([0, shape[0]])
        codes, scale_inv = quantize_fp8_grouped(x, ends)
        assert codes.shape == shape
        assert scale_inv.tolist() == [1.0, 1.0]
        data, scales, amaxes = quantize_nvfp4_grouped(x, ends)
        assert data.numel() == scales.numel() == 0
        assert amaxes.tolist() == [0.0, 0.0]
        assert quantize_mx_grouped(x, ends)[1].numel() == 0


REFUSALS = {
    "order": (ENDS.flip(0), {}, r"ends\[1\]: expected 290, where the .* to 300, .* got 135; sort"),
    "past the end": (torch.tensor([5, 301]), {}, r"ends\[1\]: expected 5, .* to 300, .* got 301"),
    "negative": (torch.tensor([-1]), {}, r"ends\[0\]: expected 0, .* got -1"),
    "dtype": (ENDS.float(), {}, r"ends: expected torch.int32, torch.int64, got torch.float32"),
    "none": (ENDS[:0], {}, r"ends: expected 1 to 1024 groups, got 0"),
    "strides": (ENDS[::2], {}, r"ends: expected a contiguous 1-D tensor"),
    "device": (ENDS.to("meta"), {}, r"ends: expected device cpu, got meta"),
    "no seed": (ENDS, {"rounding": "stochastic"}, r"seed: expected an integer with 'stochastic'"),
    "index": (ENDS, NOISE | {"first_index": -1}, r"first_index: expected 0 to"),
    "out": (ENDS, {"out": (X, X)}, r"out\[0\]: expected torch.float8_e4m3fn, got torch.bfloat16"),
}


@pytest.mark.parametrize(("ends", "options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(ends, options, message):
    with pytest.raises(ValueError, match=message):
        quantize_mx_grouped(X, ends, **options)


def test_more_refusals():
    with pytest.raises(ValueError, match=r"x: expected \[rows, K\] .* got shape \(300, 3, 32\)"):
        quantize_fp8_grouped(X.view(300, 3, 32), ENDS)
    with pytest.raises(TypeError, match=r"ends: expected a torch.Tensor, got list; pass a tensor"):
        quantize_fp8_grouped(X, [130, 300])
    with pytest.raises(ValueError, match=r"amaxes: expected shape \(4,\), got \(3,\)"):
        quantize_nvfp4_grouped(X, ENDS, amaxes=torch.ones(3))
    with pytest.raises(ValueError, match=r"element: expected one of e4m3, e5m2, e2m1, got 'e4m3fn"):
        quantize_mx_grouped(X, ENDS, element="e4m3fnuz")
    amaxes = torch.zeros(4)
    with pytest.raises(ValueError, match=r"out: expected memory apart from that of ends"):
        amax_nvfp4_grouped(X, amaxes.view(torch.int32), out=amaxes)


@pytest.mark.parametrize("late", range(3), ids=["x", "data", "scales"])
def test_memory_that_begins_late_takes_no_wide_access(late):
    """Each of the three: what is compiled for aligned memory is a fault of the GPU's elsewhere."""
    x, ends = torch.randn(40, 64).to(torch.bfloat16), torch.tensor([7, 40])
    found = [x, *quantize_mx_grouped(x, ends)]
    shape, dtype = found[late].shape, found[late].dtype
    memory = torch.zeros(found[late].nbytes + 2, dtype=torch.uint8)[2:]
    with launching_on_cpu(), recorded() as launches:
        quantize_mx_grouped(found[0], ends, out=tuple(found[1:]))
        found[late] = memory.view(dtype).view(shape)
        quantize_mx_grouped(found[0], ends, out=tuple(found[1:]))
    assert [launch.constants["ALIGNED"] for launch in launches] == [True, False]


def test_a_trace_needs_no_values_of_ends():
    @torch.compile(backend="eager", fullgraph=True)
    def cast(x, ends):
        return quantize_mx_grouped(x, ends)[1], quantize_nvfp4_grouped(x, ends)[2]

    found, expected = cast(X, ENDS), (quantize_mx_grouped(X, ENDS)[1], amax_nvfp4_grouped(X, ENDS))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))
    assert cast(X, ENDS.flip(0))[1].isnan().all()
