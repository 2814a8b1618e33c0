"""FP8 with scales: torchao as an independent oracle, golden vectors, refusals, the ops."""

import math
from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidestream.kernels.formats import codes
from sidestream.kernels.formats.table import E4M3, E5M2
from sidestream.kernels.fp8 import reference
from sidestream.kernels.fp8.op import dequantize_fp8, quantize_fp8, update_fp8_scales_
from sidestream.tests.kernels.oracle import assert_same_bits

SCALINGS = pytest.mark.parametrize("scaling", ["tensor", "row", "1x128", "128x128"])
POWERS = pytest.mark.parametrize("power_of_2", [False, True], ids=["fp32", "power of 2"])
MAX_FP32 = 3.4028234663852886e38


def as_bytes(tensor):
    return tensor.view(torch.uint8)


def blocks_of(x, scaling):
    """Every block, as a list of index tuples into `x`, in the order of the scales: the slow way."""
    if scaling == "tensor":
        return [...]
    size = x.shape[-1] if scaling == "row" else 128
    columns = [slice(start, start + size) for start in range(0, x.shape[-1], size)]
    rows = x.shape[-2]
    height = 128 if scaling == "128x128" else 1
    matrices = range(x.shape[0]) if x.dim() == 3 else [None]
    return [
        (*(() if matrix is None else (matrix,)), slice(row, row + height), column)
        for matrix in matrices
        for row in range(0, rows, height)
        for column in columns
    ]


@SCALINGS
@POWERS
@pytest.mark.parametrize("shape", [(130, 200), (2, 129, 100), (3, 128), (1, 1)], ids=str)
def test_each_block_is_as_if_alone(shape, power_of_2, scaling):
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape).float())
    found, scale_inv = quantize_fp8(x, scaling=scaling, power_of_2=power_of_2)
    back = dequantize_fp8(found, scale_inv, scaling=scaling)
    flat = scale_inv.reshape(-1)
    indices = blocks_of(x, scaling)
    assert len(indices) == flat.numel()
    for index, inverse in zip(indices, flat, strict=True):
        amax = x[index].abs().max()
        scale = torch.tensor(448.0) / amax
        if power_of_2:
            scale = torch.tensor(2.0 ** math.floor(math.log2(Fraction(scale.item()))))
        assert torch.equal(inverse, torch.tensor(1.0) / scale)
        expected = codes.encode(x[index] * scale, E4M3)
        assert torch.equal(as_bytes(found)[index], expected)
        assert torch.equal(back[index], codes.decode(expected, E4M3) * inverse)


@POWERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_row_and_tensor_are_torchao(element, dtype, power_of_2):
    """Bit for bit, above its lower bound of 1e-12 on amax, which ours has not."""
    from torchao.float8 import float8_utils
    from torchao.float8.config import ScalingGranularity

    float8 = reference.ELEMENTS[element].dtype
    x = (torch.randn(500, 300) * torch.exp2(torch.randint(-30, 30, (500, 1)).float())).to(dtype)
    for scaling, granularity, dim in (
        ("row", ScalingGranularity.AXISWISE, -1),
        ("tensor", ScalingGranularity.TENSORWISE, None),
    ):
        scale = float8_utils.tensor_to_scale(
            x,
            float8,
            scaling_granularity=granularity,
            axiswise_dim=dim,
            round_scales_to_power_of_2=power_of_2,
        )
        expected = float8_utils.to_fp8_saturated(x.float() * scale, float8)
        found, scale_inv = quantize_fp8(x, scaling=scaling, element=element, power_of_2=power_of_2)
        assert torch.equal(as_bytes(found), as_bytes(expected))
        assert torch.equal(scale_inv, torch.ones(()) / scale)


@pytest.mark.parametrize(
    ("amax", "x", "code", "divided", "multiplied"),
    [
        (1.0, "0x1.a49248p-15", 12, 11, 11),
        (0.375, "0x1.724924p-16", 13, 14, 13),
        (0.625, "0x1.e00002p-16", 11, 10, 11),
    ],
)
def test_which_of_three_formulas_it_is(amax, x, code, divided, multiplied):
    """Golden: x * (448 / amax), neither x / (amax / 448) nor x * (1 / (amax / 448)).

    Ties tell them apart. By example, amax 1: the scale is 448 exactly, and so is x * 448 = 11.5
    steps of 2^-9, a tie that goes to the even code 12; 1 / 448 rounds up, so that x over it, or
    times its inverse, is below the tie and gives 11.
    """
    x, amax = torch.tensor(float.fromhex(x)), torch.tensor(amax)
    limit = torch.tensor(448.0)
    found, _ = quantize_fp8(torch.stack((x, amax)))
    assert as_bytes(found).tolist() == [code, 0x7E]
    assert codes.encode(x / (amax / limit), E4M3) == divided
    assert codes.encode(x * (torch.ones(()) / (amax / limit)), E4M3) == multiplied


@pytest.mark.parametrize(
    ("amax", "scale", "power"),
    [
        (448.0, 1.0, 1.0),
        (0.0, 1.0, 1.0),
        (math.inf, 1.0, 1.0),
        (math.nan, 1.0, 1.0),
        (3.5, 128.0, 128.0),
        (1.0, 448.0, 256.0),  # the mantissa of 448 is cut off: down, so that nothing overflows
        (449.0, 0.9977728128433228, 0.5),
        (1e-37, MAX_FP32, 2.0**127),  # 448 / 1e-37 is beyond FP32
        (1e-45, MAX_FP32, 2.0**127),
        (MAX_FP32, (1.75 + 2.0**-23) * 2.0**-120, 2.0**-120),  # 1.75 / (1 - 2^-24), rounded up
    ],
    ids=str,
)
def test_golden_scales(amax, scale, power):
    for power_of_2, expected in ((False, scale), (True, power)):
        found = reference.scale_of(torch.tensor([amax]), E4M3, power_of_2)
        assert found.tolist() == [torch.tensor(expected).item()]


@SCALINGS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite_stays_in_its_block(bad, scaling):
    x = torch.randn(256, 256)
    clean, clean_inverse = quantize_fp8(x, scaling=scaling)
    dirty = x.clone()
    dirty[130, 5] = bad
    found, inverse = quantize_fp8(dirty, scaling=scaling)
    index = next(i for i in blocks_of(x, scaling) if dirty[i].isfinite().all().logical_not())
    inside = torch.zeros_like(x, dtype=torch.bool)
    inside[index] = True
    assert torch.equal(as_bytes(found)[~inside], as_bytes(clean)[~inside])
    assert inverse.ne(clean_inverse).sum() == 1
    assert inverse[inverse != clean_inverse].item() == 1.0
    expected = codes.encode(dirty, E4M3)
    assert torch.equal(as_bytes(found)[inside], expected[inside])
    wanted = {"nan": math.nan, "inf": 448.0, "-inf": -448.0}[str(bad)]
    back = dequantize_fp8(found, inverse, scaling=scaling)
    assert_same_bits(back[130, 5], torch.tensor(wanted))


@SCALINGS
def test_zero_blocks_keep_the_signs_of_their_zeros(scaling):
    x = torch.zeros(130, 130)
    x[0, 0] = -0.0
    found, inverse = quantize_fp8(x, scaling=scaling)
    assert inverse.eq(1.0).all()
    assert as_bytes(found)[0, 0] == 0x80
    assert as_bytes(found).sum() == 0x80


@SCALINGS
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4)], ids=str)
def test_empty_tensors(shape, scaling):
    found, inverse = quantize_fp8(torch.empty(shape), scaling=scaling)
    assert found.shape == shape
    assert inverse.eq(1.0).all()
    assert dequantize_fp8(found, inverse, scaling=scaling).shape == shape


@pytest.mark.parametrize(
    ("scaling", "shape", "expected"),
    [
        ("tensor", (), ()),
        ("tensor", (3, 4), ()),
        ("row", (7,), (1,)),
        ("row", (2, 3, 7), (2, 3, 1)),
        ("1x128", (129,), (2,)),
        ("1x128", (2, 3, 128), (2, 3, 1)),
        ("128x128", (129, 128), (2, 1)),
        ("128x128", (4, 1, 300), (4, 1, 3)),
    ],
    ids=str,
)
def test_shapes_of_scales(scaling, shape, expected):
    found, inverse = quantize_fp8(torch.randn(shape), scaling=scaling)
    assert (found.shape, inverse.shape) == (shape, expected)
    assert (found.dtype, inverse.dtype) == (torch.float8_e4m3fn, torch.float32)


@SCALINGS
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda found: found.name)
def test_error_is_within_half_a_step(element, scaling):
    """|x - x'| <= 2^-(m + 1) |x|, or half a subnormal step of the block; 4 roundings of FP32."""
    x = torch.randn(200, 300)
    found, inverse = quantize_fp8(x, scaling=scaling, element=element.name)
    error = (dequantize_fp8(found, inverse, scaling=scaling).double() - x).abs()
    step = inverse.max().double() * element.min_subnormal / 2
    bound = (x.double().abs() * 2.0 ** -(element.mantissa_bits + 1)).clamp_min(step)
    assert (error <= bound * (1 + 2.0**-17)).all()
    assert (error > bound / 2).any()


def test_chunks_change_nothing(monkeypatch):
    x = torch.randn(40, 300)
    whole = [quantize_fp8(x, scaling=scaling) for scaling in ("tensor", "row", "1x128")]
    monkeypatch.setattr(reference, "CHUNK_NUMEL", 100)
    for scaling, (found, inverse) in zip(("tensor", "row", "1x128"), whole, strict=True):
        again, again_inverse = quantize_fp8(x, scaling=scaling)
        assert torch.equal(as_bytes(found), as_bytes(again))
        assert torch.equal(inverse, again_inverse)


def test_delayed_scaling_step_by_step():
    """Golden, by TransformerEngine's rule: newest amax in slot 0; history rolls, slot 0 is zeroed.

    Three tensors, a history of 3. 448 / 2^1 over the largest of the history; 0 keeps the scale.
    """
    history, scales = torch.zeros(3, 3), torch.ones(3)
    for tensor, values in enumerate(([2.0, -4.0], [0.0, 0.0], [math.inf, 1.0])):
        amax = history[tensor, 0]
        _, inverse = quantize_fp8(torch.tensor(values), scale=scales[tensor], amax=amax)
        assert inverse == 1.0
    assert history[:, 0].tolist() == [4.0, 0.0, math.inf]
    update_fp8_scales_(history, scales, margin=1)
    assert scales.tolist() == [56.0, 1.0, 1.0]
    assert history.tolist() == [[0.0, 0.0, 4.0], [0.0, 0.0, 0.0], [0.0, 0.0, math.inf]]
    history[:, 0] = torch.tensor([8.0, 7.0, 7.0])
    update_fp8_scales_(history, scales, margin=1)
    assert scales.tolist() == [28.0, 32.0, 1.0]
    assert history.tolist() == [[0.0, 4.0, 8.0], [0.0, 0.0, 7.0], [0.0, math.inf, 7.0]]
    history[:, 0] = torch.tensor([1.0, 0.0, 3.5])
    update_fp8_scales_(history, scales, margin=1, algorithm="most_recent")
    assert scales.tolist() == [224.0, 32.0, 64.0]
    assert history[0].tolist() == [0.0, 8.0, 1.0]


def test_delayed_scaling_at_the_edges():
    history = torch.tensor([[1e-40], [math.nan], [57344.0]])
    scales = torch.tensor([2.0, 3.0, 4.0])
    update_fp8_scales_(history, scales, element="e5m2")
    assert scales.tolist() == [MAX_FP32, 3.0, 1.0]
    assert history.tolist() == [[0.0]] * 3
    update_fp8_scales_(torch.empty(0, 4), torch.empty(0))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_delayed_scales_have_a_finite_inverse(element):
    """Of the largest amax and margin the formula gives 0, and before that scales below 2^-128."""
    amax = torch.tensor([MAX_FP32, 2.0**127, 2.0**30, 1.0]).repeat(101, 1)
    for margin, history in enumerate(amax):
        scales = torch.zeros(4)
        update_fp8_scales_(history.clone().view(4, 1), scales, element=element, margin=margin)
        assert (1 / scales).isfinite().all()
        exact = reference.ELEMENTS[element].max_finite * 2.0**-margin / history.double()
        assert_same_bits(scales, exact.clamp_min(2.0**-126).float())
    assert scales[0] == 2.0**-126


def test_powers_of_two_may_decode_the_largest_to_infinity():
    x = torch.tensor([MAX_FP32, 1e38])
    assert dequantize_fp8(*quantize_fp8(x, power_of_2=True))[0] == math.inf
    assert dequantize_fp8(*quantize_fp8(x)).isfinite().all()


def test_a_given_scale_is_used_as_it_is():
    x = torch.tensor([1.0, -3.0, 1000.0, math.nan])
    amax = torch.tensor([5.0])
    found, inverse = quantize_fp8(x[:3], scale=torch.tensor([3.0]), amax=amax, element="e5m2")
    assert torch.equal(as_bytes(found), codes.encode(x[:3] * 3.0, E5M2))
    assert inverse.item() == torch.tensor(1.0).div(torch.tensor(3.0)).item()
    assert amax.tolist() == [1000.0]
    quantize_fp8(x, scale=torch.tensor(3.0), amax=amax)
    assert amax.isnan().all()


X = torch.zeros(4, 6)
CODES, INVERSE = quantize_fp8(X, scaling="row")
ONE = torch.ones(())
REFUSALS = {
    "scaling": (lambda: quantize_fp8(X, scaling="column"), r"scaling: expected one of tensor, row"),
    "element": (lambda: quantize_fp8(X, element="e2m1"), r"element: expected one of e4m3, e5m2"),
    "dtype": (lambda: quantize_fp8(X.double()), r"x: expected torch.float32.*got torch.float64"),
    "strides": (lambda: quantize_fp8(X.t()), r"x: expected a contiguous tensor"),
    "dims": (
        lambda: quantize_fp8(X[0], scaling="128x128"),
        r"x: expected at least 2 dimensions for scaling '128x128', got shape \(6,\)",
    ),
    "scale and row": (
        lambda: quantize_fp8(X, scaling="row", scale=ONE),
        r"scale: expected None with scaling 'row'",
    ),
    "scale and power": (
        lambda: quantize_fp8(X, power_of_2=True, scale=ONE),
        r"scale: expected None .*power_of_2 True",
    ),
    "scale dtype": (lambda: quantize_fp8(X, scale=ONE.double()), r"scale: expected torch.float32"),
    "scale shape": (
        lambda: quantize_fp8(X, scale=torch.ones(2)),
        r"scale: expected one element, got shape \(2,\)",
    ),
    "scale device": (
        lambda: quantize_fp8(X, scale=ONE.to("meta")),
        r"scale: expected device cpu, got meta",
    ),
    "amax alone": (lambda: quantize_fp8(X, amax=ONE), r"amax: expected None without scale"),
    "out codes": (
        lambda: quantize_fp8(X, element="e5m2", scaling="row", out=(CODES, INVERSE)),
        r"out\[0\]: expected torch.float8_e5m2, got torch.float8_e4m3fn",
    ),
    "out scale": (
        lambda: quantize_fp8(X, out=(CODES, INVERSE)),
        r"out\[1\]: expected shape \(\), got \(4, 1\)",
    ),
    "codes": (lambda: dequantize_fp8(X, ONE), r"codes: expected torch.float8_e4m3fn, torch.float8"),
    "scale_inv": (
        lambda: dequantize_fp8(CODES, INVERSE, scaling="1x128", dtype=torch.float64),
        r"dtype: expected one of torch.float32, .*got torch.float64",
    ),
    "scale_inv shape": (
        lambda: dequantize_fp8(CODES, INVERSE.view(4)),
        r"scale_inv: expected shape \(\), got \(4,\)",
    ),
    "history": (
        lambda: update_fp8_scales_(torch.ones(3), torch.ones(3)),
        r"amax_history: expected shape \(tensors, length\) with length 1 to 16384, got \(3,\)",
    ),
    "no history": (lambda: update_fp8_scales_(torch.ones(3, 0), torch.ones(3)), r"got \(3, 0\)"),
    "scales": (
        lambda: update_fp8_scales_(torch.ones(3, 2), torch.ones(2)),
        r"scales: expected shape \(3,\), got \(2,\)",
    ),
    "margin": (
        lambda: update_fp8_scales_(torch.ones(3, 2), torch.ones(3), margin=-1),
        r"margin: expected 0 to 100, got -1",
    ),
    "algorithm": (
        lambda: update_fp8_scales_(torch.ones(3, 2), torch.ones(3), algorithm="mean"),
        r"algorithm: expected one of max, most_recent, got 'mean'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_what_was_expected(case):
    call, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_fake_and_compiled():
    with FakeTensorMode():
        found, inverse = quantize_fp8(torch.empty(3, 200), scaling="1x128", element="e5m2")
        assert (found.dtype, inverse.shape) == (torch.float8_e5m2, (3, 2))

    def there_and_back(x):
        return dequantize_fp8(*quantize_fp8(x, scaling="row"), scaling="row")

    x = torch.randn(5, 37)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), there_and_back(x))
