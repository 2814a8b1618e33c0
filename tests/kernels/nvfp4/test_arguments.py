"""The ops of NVFP4: torch's own checks of them, empty tensors, gradients, bad input."""

import pytest
import torch

from sidestream.kernels.nvfp4.op import dequantize_nvfp4, hadamard16, quantize_nvfp4
from sidestream.tests.kernels.nvfp4 import cases as nvfp4_cases

UNIT = torch.tensor(2688.0)


@pytest.mark.parametrize("shape", [(0,), (5, 0), (0, 5)], ids=str)
def test_empty(shape):
    data, scales, amax = quantize_nvfp4(torch.empty(shape))
    assert data.numel() == scales.numel() == 0
    assert amax == 0
    assert dequantize_nvfp4(data, scales, amax, row_numel=shape[-1]).shape == shape


def test_ops_pass_the_checks_of_torch():
    x = nvfp4_cases.spread((4, 32))
    amax, out = torch.zeros(()), torch.empty(4, 32)
    data, scales = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    calls = {
        "amax_nvfp4_": (amax, x, True),
        "quantize_nvfp4_": (data, scales, x, UNIT, 3, 0, False, True, False),
        "dequantize_nvfp4_": (out, data, scales, UNIT, False, False),
        "hadamard16_": (out, x, False),
    }
    tests = ("test_schema", "test_faketensor")
    for name, arguments in calls.items():
        op = getattr(torch.ops.sidestream, name).default
        torch.library.opcheck(op, arguments, test_utils=tests)


def test_no_gradient_and_kept_input():
    x = nvfp4_cases.spread((4, 32)).requires_grad_()
    kept = x.detach().clone()
    data, scales, amax = quantize_nvfp4(x)
    assert not amax.requires_grad
    assert not dequantize_nvfp4(data, scales, amax).requires_grad
    assert not hadamard16(x).requires_grad
    assert torch.equal(x.detach(), kept)


X = torch.ones(4, 32)
BAD_QUANTIZE = [
    ({"x": X.double()}, r"x: expected torch\.float32.*got torch\.float64"),
    ({"x": torch.tensor(1.0)}, r"x: expected at least one dim"),
    ({"x": X.t()}, r"x: expected a contiguous tensor, got .*strides"),
    ({"rounding": "up"}, r"rounding: expected one of nearest, stochastic, got 'up'"),
    ({"variant": "ao"}, r"variant: expected one of te, torchao, got 'ao'"),
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
