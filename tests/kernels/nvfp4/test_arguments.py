"""The ops of NVFP4: empty tensors, gradients, bad input."""

import pytest
import torch

from sidestream.kernels.nvfp4.op import amax_nvfp4, dequantize_nvfp4, hadamard16, quantize_nvfp4
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.nvfp4 import cases as nvfp4_cases


@pytest.mark.parametrize("shape", [(0,), (5, 0), (0, 5)], ids=str)
def test_empty(shape):
    data, scales, amax = quantize_nvfp4(torch.empty(shape))
    assert data.numel() == scales.numel() == 0
    assert amax == 0
    assert dequantize_nvfp4(data, scales, amax, row_numel=shape[-1]).shape == shape


def test_no_gradient_and_kept_input():
    x = nvfp4_cases.spread((4, 32)).requires_grad_()
    kept = x.detach().clone()
    data, scales, amax = quantize_nvfp4(x)
    assert not amax.requires_grad
    assert not dequantize_nvfp4(data, scales, amax).requires_grad
    assert not hadamard16(x).requires_grad
    assert torch.equal(x.detach(), kept)


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize("shape", [(4, 32), (3, 37)], ids=str)
def test_out_is_written_and_returned(shape, swizzled):
    x = nvfp4_cases.spread(shape, torch.bfloat16)
    expected = quantize_nvfp4(x, hadamard=True, swizzled=swizzled)
    amax = torch.full((), 9.0)
    assert amax_nvfp4(x, hadamard=True, out=amax) is amax
    assert torch.equal(amax, expected[2])
    out = tuple(torch.full_like(part.view(torch.uint8), 0xAB) for part in expected[:2])
    out = (out[0], out[1].view(expected[1].dtype))
    made = quantize_nvfp4(x, global_amax=amax, hadamard=True, swizzled=swizzled, out=out)
    assert all(one is other for one, other in zip(made, (*out, amax), strict=True))
    for one, other in zip(made[:2], expected[:2], strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    for dtype in oracle.DTYPES:
        options = {"row_numel": shape[-1], "swizzled": swizzled}
        wanted = dequantize_nvfp4(*expected, dtype=dtype, **options)
        decoded = torch.full(shape, 7.0, dtype=dtype)
        assert dequantize_nvfp4(*expected, out=decoded, **options) is decoded
        oracle.assert_same_bits(decoded, wanted)
    transformed = torch.full(shape, 7.0, dtype=torch.bfloat16)
    assert hadamard16(x, out=transformed) is transformed
    oracle.assert_same_bits(transformed, hadamard16(x))


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_transformed_in_place(dtype, inverse):
    """With short ends of rows; traced too."""

    def step(x):
        return hadamard16(x, inverse=inverse, out=x)

    torch._dynamo.reset()
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        for shape in ((7, 37), (5000,), (2, 0)):
            x = nvfp4_cases.spread(shape, dtype)
            expected = hadamard16(x, inverse=inverse)
            made = call(x)
            assert made.data_ptr() == x.data_ptr()
            oracle.assert_same_bits(x, expected)


X = torch.ones(4, 32)
DATA, SCALES, AMAX = quantize_nvfp4(X)
OUT = (DATA, SCALES)
MEMORY = torch.zeros(4 * 32 * 4, dtype=torch.uint8)  # of X, seen as FP32
INSIDE = MEMORY.view(torch.float32).view(4, 32)
SHARED = {
    "codes in x": lambda: quantize_nvfp4(INSIDE, out=(MEMORY[:64].view(4, 16), SCALES)),
    "amax in codes": lambda: quantize_nvfp4(
        X, global_amax=MEMORY[:4].view(torch.float32)[0], out=(MEMORY[:64].view(4, 16), SCALES)
    ),
    "one in the other": lambda: quantize_nvfp4(
        X, out=(MEMORY[:64].view(4, 16), MEMORY[:8].view(SCALES.dtype).view(4, 2))
    ),
    "decoded in codes": lambda: dequantize_nvfp4(MEMORY[:64].view(4, 16), SCALES, AMAX, out=INSIDE),
    "decoded in the amax": lambda: dequantize_nvfp4(DATA, SCALES, INSIDE[0, 0], out=INSIDE),
    "partly in place": lambda: hadamard16(INSIDE[:2], out=INSIDE[1:3]),
    "amax in x": lambda: amax_nvfp4(INSIDE, out=INSIDE[0, 0]),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_is_refused(name):
    with pytest.raises(ValueError, match=r"^out(\[0\])?: expected memory apart from that of"):
        SHARED[name]()


BAD_OUT = {
    "pair": (lambda: quantize_nvfp4(X, out=DATA), r"out: expected a pair, got Tensor"),
    "codes": (lambda: quantize_nvfp4(X, out=(DATA[:3], SCALES)), r"out\[0\]: expected shape"),
    "scales": (
        lambda: quantize_nvfp4(X, out=(DATA, SCALES.view(torch.uint8))),
        r"out\[1\]: expected torch\.float8_e4m3fn, got torch\.uint8",
    ),
    "swizzled": (
        lambda: quantize_nvfp4(X, out=OUT, swizzled=True),
        r"out\[1\]: expected shape \(512,\)",
    ),
    "device": (
        lambda: quantize_nvfp4(X, out=(DATA.to("meta"), SCALES)),
        r"out\[0\]: expected device cpu, got meta",
    ),
    "decoded": (
        lambda: dequantize_nvfp4(DATA, SCALES, AMAX, out=X[:3].clone()),
        r"out: expected shape \(4, 32\), got \(3, 32\)",
    ),
    "integers": (
        lambda: dequantize_nvfp4(DATA, SCALES, AMAX, out=X.int()),
        r"out: expected torch\.float32.*got torch\.int32",
    ),
    "transform": (
        lambda: hadamard16(X, out=X.bfloat16()),
        r"out: expected torch\.float32, got torch\.bfloat16",
    ),
    "amax": (lambda: amax_nvfp4(X, out=torch.zeros(1)), r"out: expected shape \(\), got \(1,\)"),
}


@pytest.mark.parametrize("name", BAD_OUT)
def test_bad_out(name):
    call, message = BAD_OUT[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_out_in_a_trace_and_without_data():
    def step(x, data, scales, out):
        made = quantize_nvfp4(hadamard16(x, out=out), out=(data, scales))
        return dequantize_nvfp4(*made, out=out)

    x = nvfp4_cases.spread((4, 32))
    memory = [torch.empty_like(tensor) for tensor in (DATA, SCALES, x)]
    expected = step(x, *(tensor.clone() for tensor in memory))
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    oracle.assert_same_bits(compiled(x, *memory), expected)
    oracle.assert_same_bits(memory[2], expected)
    meta = [tensor.to("meta") for tensor in (x, *memory)]
    assert step(*meta) is meta[3]


BAD_QUANTIZE = [
    ({"x": X.double()}, r"x: expected torch\.float32.*got torch\.float64"),
    ({"x": torch.tensor(1.0)}, r"x: expected at least 1 dimension, got shape \(\)"),
    ({"x": X.t()}, r"x: expected a contiguous tensor, got .*strides"),
    ({"rounding": "up"}, r"rounding: expected one of nearest, stochastic, got 'up'"),
    ({"variant": "ao"}, r"variant: expected one of te, torchao, got 'ao'"),
    ({"nonfinite": "zero"}, r"nonfinite: expected one of saturate, nan, got 'zero'"),
    ({"rounding": "stochastic"}, r"seed: expected an integer with 'stochastic' rounding, got None"),
    ({"seed": 3}, r"seed: expected None with 'nearest' rounding, got 3"),
    ({"rounding": "stochastic", "seed": 2**64}, r"seed: expected -9223.* to 1844"),
    ({"first_index": -1}, r"first_index: expected 0 to .*, got -1"),
    ({"global_amax": X}, r"global_amax: expected one element, got.*\(4, 32\)"),
    ({"global_amax": torch.tensor(1)}, r"global_amax: expected torch\.float32, got torch\.int64"),
    ({"global_amax": torch.empty((), device="meta")}, r"global_amax: expected device cpu.*meta"),
]


@pytest.mark.parametrize(
    ("changed", "message"), BAD_QUANTIZE, ids=[m[:24] for _, m in BAD_QUANTIZE]
)
def test_bad_input_to_quantize(changed, message):
    options = {"x": X} | changed
    with pytest.raises(ValueError, match=message):
        quantize_nvfp4(options.pop("x"), **options)


def test_bad_input_to_dequantize():
    data, scales, amax = quantize_nvfp4(X)
    with pytest.raises(ValueError, match=r"data: expected torch\.uint8.*got torch\.int8"):
        dequantize_nvfp4(data.view(torch.int8), scales, amax)
    with pytest.raises(ValueError, match=r"row_numel: expected 31 to 32, got 30"):
        dequantize_nvfp4(data, scales, amax, row_numel=30)
    with pytest.raises(ValueError, match=r"scales: expected shape \(4, 2\)"):
        dequantize_nvfp4(data, scales[:3], amax)
    with pytest.raises(ValueError, match=r"scales: expected shape \(512,\)"):
        dequantize_nvfp4(data, scales, amax, swizzled=True)
    with pytest.raises(ValueError, match=r"dtype: expected one of.*got torch\.int32"):
        dequantize_nvfp4(data, scales, amax, dtype=torch.int32)
