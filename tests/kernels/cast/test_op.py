"""`cast` and `cast_back`: ml_dtypes as an independent oracle, shapes, refusals, the ops."""

import math

import ml_dtypes
import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidestream.kernels.cast import reference
from sidestream.kernels.cast.op import cast, cast_back
from sidestream.kernels.formats import codes, noise
from sidestream.kernels.formats.table import CASTS, E2M1, E4M3, ELEMENT_FORMATS
from sidestream.tests.kernels.formats import code_cases
from sidestream.tests.kernels.oracle import assert_same_bits

ORACLES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": numpy.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
}
# ml_dtypes saturates nothing, so it is compared up to the largest finite value; E8M0 only where
# nothing is negative, a NaN there, or near FP32's subnormals, which it rounds up.
RANGES = {element.name: (0.0, element.max_finite) for element in ELEMENT_FORMATS}
RANGES |= {"e8m0": (1.5 * 2.0**-127, 2.0**127), "bf16": (0.0, math.inf), "fp16": (0.0, math.inf)}
FORMATS = pytest.mark.parametrize("to", CASTS)
STOCHASTIC = [name for name, form in CASTS.items() if form.has_stochastic]


def inputs():
    values = [code_cases.inputs(element) for element in code_cases.SIGNED]
    return torch.cat(values)


def as_bytes(tensor):
    return tensor.view(torch.uint8)


@FORMATS
def test_cast_is_ml_dtypes(to):
    x = inputs()
    low, high = RANGES[to]
    x = x[((x.abs() if low == 0 else x) >= low) & (x.abs() <= high)]
    x = x[: len(x) // 2 * 2]
    assert len(x) > 60_000
    with numpy.errstate(over="ignore"):
        expected = x.numpy().astype(ORACLES[to])
    found = cast(x, to)
    if to == "e2m1":
        codes_of = codes.unpack_nibbles(found)
        assert torch.equal(codes_of, torch.from_numpy(expected.view(numpy.uint8)) & 0xF)
    elif to in ("bf16", "fp16"):
        bits = torch.from_numpy(expected.view(numpy.int16))
        assert_same_bits(found, bits.view(CASTS[to].dtype))
    else:
        assert torch.equal(as_bytes(found), torch.from_numpy(expected.view(numpy.uint8)))


@FORMATS
def test_cast_back_is_ml_dtypes(to):
    if to in ("bf16", "fp16"):
        stored = torch.arange(2**16).to(torch.int16).view(CASTS[to].dtype)
        expected = stored.float()
    else:
        stored = torch.arange(256).to(torch.uint8).view(CASTS[to].dtype)
        if to == "e2m1":
            # The codes are counted through here; ml_dtypes has one in a byte.
            low_then_high = [nibble for byte in range(256) for nibble in (byte & 15, byte >> 4)]
            raw = numpy.array(low_then_high, dtype=numpy.uint8)
        else:
            raw = as_bytes(stored).numpy()
        expected = torch.from_numpy(raw.view(ORACLES[to]).astype(numpy.float32))
    assert_same_bits(cast_back(stored, to), expected)
    for dtype in (torch.bfloat16, torch.float16):
        assert_same_bits(cast_back(stored, to, dtype), expected.to(dtype))


@FORMATS
def test_what_no_format_holds(to):
    """One rule, whatever the source: see the table of `cast`."""
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38])
    expected = {
        "e4m3": [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0xFE],
        "e5m2": [0x7F, 0x7F, 0x7B, 0xFB, 0x7B, 0xFB],
        "e2m1": [0x77, 0xF7, 0xF7],
        "e8m0": [255, 255, 255, 255, 254, 254],
        "e4m3fnuz": [0x80, 0x80, 0x7F, 0xFF, 0x7F, 0xFF],
    }
    if to in expected:
        assert as_bytes(cast(x, to)).tolist() == expected[to]
        assert as_bytes(cast(x[:4].bfloat16(), to)).tolist() == expected[to][: len(cast(x[:4], to))]
    else:
        found = cast(x, to)
        assert found[:2].isnan().all()
        assert found[2:].tolist() == [math.inf, -math.inf] * 2


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (3, 0), (5, 1)], ids=str
)
@FORMATS
def test_shapes(to, shape):
    x = torch.randn(shape)
    found = cast(x, to)
    back = cast_back(found, to)
    if to == "e2m1":
        assert found.shape == ((*shape[:-1], -(-shape[-1] // 2)) if shape else (1,))
        flat = codes.encode(x, E2M1)
        expected = codes.decode(flat, E2M1)
        assert torch.equal(back[..., : shape[-1]] if shape else back[0], expected)
        assert not back[..., shape[-1] :].any() if shape else back[1] == 0
    else:
        assert found.shape == back.shape == shape
    assert found.dtype == CASTS[to].dtype


@pytest.mark.parametrize("to", STOCHASTIC)
def test_a_shard_has_the_bits_of_the_whole(to, monkeypatch):
    """Any cut, any chunk: bits depend on the seed and the index alone, and on both."""
    x = torch.randn(5000)
    whole = cast(x, to, rounding="stochastic", seed=5)
    per_byte = 2 if to == "e2m1" else 1
    parts = []
    for start, end in ((0, 2), (2, 18), (18, 1000), (1000, 5000)):
        part = cast(x[start:end], to, rounding="stochastic", seed=5, first_index=start)
        parts.append(as_bytes(part))
    assert torch.equal(torch.cat(parts), as_bytes(whole))
    monkeypatch.setattr(reference, "CHUNK_NUMEL", 34)
    again = cast(x.view(50, 100), to, rounding="stochastic", seed=5)
    assert torch.equal(as_bytes(again).view(-1), as_bytes(whole))
    for options in ({"seed": 6}, {"seed": 5, "first_index": 16}):
        other = cast(x, to, rounding="stochastic", **options)
        assert not torch.equal(as_bytes(other), as_bytes(whole))
    assert len(whole) == 5000 // per_byte


def test_odd_rows_draw_for_elements_not_for_places():
    x = torch.randn(40, 33) * 2
    drawn = noise.noise_bits(9, 3, x.numel()).view(x.shape)
    expected = codes.pack_nibbles(codes.encode_stochastic(x, E2M1, drawn))
    assert torch.equal(cast(x, "e2m1", rounding="stochastic", seed=9, first_index=3), expected)


@pytest.mark.parametrize("to", STOCHASTIC)
def test_stochastic_rounding_is_unbiased(to):
    """A million draws of one value: two neighbours, and the mean within 4 sigma."""
    value = 1.2890625 if to != "bf16" else 1.001953125 + 2.0**-12
    x = torch.full((1_000_000,), value)
    back = cast_back(cast(x, to, rounding="stochastic", seed=11), to).double()
    low, high = back.unique().tolist()
    assert low < value < high
    share = (value - low) / (high - low)
    sigma = (high - low) * math.sqrt(share * (1 - share) / len(x))
    assert abs(back.mean().item() - value) <= 4 * sigma


@pytest.mark.parametrize("seed", [2**64 - 1, -1, 2**63, -(2**63), 0])
def test_seeds_are_64_bits(seed):
    x = torch.randn(64)
    made = cast(x, "e4m3", rounding="stochastic", seed=seed)
    drawn = noise.noise_bits(seed, 0, 64)
    expected = codes.encode_stochastic(x, E4M3, drawn)
    assert torch.equal(as_bytes(made), expected)


def test_out_is_filled_and_returned():
    memory = torch.full((8,), 0xAB, dtype=torch.uint8)
    out = memory[2:6]
    assert cast(torch.ones(8), "e2m1", out=out) is out
    assert memory.tolist() == [0xAB, 0xAB, 0x22, 0x22, 0x22, 0x22, 0xAB, 0xAB]
    back = torch.zeros(8)
    assert cast_back(out, "e2m1", out=back) is back
    assert back.tolist() == [1.0] * 8


X = torch.zeros(4, 6)
REFUSALS = {
    "to": (lambda: cast(X, "e3m4"), r"to: expected one of bf16, .*got 'e3m4'"),
    "rounding": (lambda: cast(X, "e4m3", rounding="up"), r"rounding: expected one of nearest"),
    "dtype": (lambda: cast(X.double(), "e4m3"), r"x: expected torch.float32.*got torch.float64"),
    "strides": (lambda: cast(X.t(), "e4m3"), r"x: expected a contiguous tensor.*\.contiguous"),
    "no seed": (lambda: cast(X, "e4m3", rounding="stochastic"), r"seed: expected an integer"),
    "seed": (lambda: cast(X, "e4m3", seed=1), r"seed: expected None with 'nearest'"),
    "big seed": (
        lambda: cast(X, "e4m3", rounding="stochastic", seed=2**64),
        r"seed: expected -9223372036854775808 to 18446744073709551615",
    ),
    "index": (
        lambda: cast(X, "e4m3", rounding="stochastic", seed=1, first_index=-1),
        r"first_index: expected 0 to .*got -1",
    ),
    "stochastic": (
        lambda: cast(X, "e8m0", rounding="stochastic", seed=1),
        r"to: expected one of bf16, e4m3, e5m2, e2m1, e4m3fnuz to round stochastically, got 'e8m0'",
    ),
    "out shape": (
        lambda: cast(X, "e2m1", out=torch.zeros(4, 6, dtype=torch.uint8)),
        r"out: expected shape \(4, 3\), got \(4, 6\)",
    ),
    "out dtype": (lambda: cast(X, "bf16", out=X), r"out: expected torch.bfloat16, got torch.fl"),
    "out device": (
        lambda: cast(X, "bf16", out=X.bfloat16().to("meta")),
        r"out: expected device cpu, got meta",
    ),
    "from": (lambda: cast_back(X, "fp4"), r"from_: expected one of bf16"),
    "codes dtype": (lambda: cast_back(X, "e4m3"), r"codes: expected torch.float8_e4m3fn, got"),
    "codes strides": (
        lambda: cast_back(X.bfloat16().t(), "bf16"),
        r"codes: expected a contiguous tensor",
    ),
    "back dtype": (
        lambda: cast_back(X.bfloat16(), "bf16", torch.float64),
        r"dtype: expected one of torch.float32, .*got torch.float64",
    ),
    "scalar": (
        lambda: cast_back(torch.zeros((), dtype=torch.uint8), "e2m1"),
        r"codes: expected at least 1 dimension, got shape \(\)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_what_was_expected(case):
    call, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_fake_and_compiled():
    with FakeTensorMode():
        made = cast(torch.empty(3, 5), "e2m1")
        assert (made.shape, made.dtype) == ((3, 3), torch.uint8)
        assert cast_back(made, "e2m1").shape == (3, 6)

    def there_and_back(x):
        return cast_back(cast(x, "e4m3", rounding="stochastic", seed=3), "e4m3")

    x = torch.randn(37)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), there_and_back(x))


def test_nothing_is_recorded_for_autograd():
    x = torch.ones(4, requires_grad=True)
    assert cast(x, "bf16").grad_fn is None
    assert x.is_leaf
