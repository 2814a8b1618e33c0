"""The functions that quantise a matrix along both sides, with options, and memory to write into."""

import math

import torch

from sidestream.kernels import (
    amax_nvfp4_with_transpose,
    quantize_fp8_with_transpose,
    quantize_mx_with_transpose,
    quantize_nvfp4_with_transpose,
)
from sidestream.tests.kernels import oracle

POISON = 0xAB
MARGIN = 32  # bytes around a result, which must stay as they were
NOISE = {"rounding": "stochastic", "seed": -(2**62) - 5, "first_index": 2**33 + 8}
MX, NVFP4 = quantize_mx_with_transpose, quantize_nvfp4_with_transpose
FP8, AMAX = quantize_fp8_with_transpose, amax_nvfp4_with_transpose
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# By name: function, options, dtype, shape. Whole tiles are of 128 x 64; with swizzled scales every
# 128 columns are whole.
CASES = {
    "mxfp8 whole": (MX, {}, BF16, (128, 64)),
    "mxfp8 parts": (MX, {"rule": "floor"}, FP16, (160, 96)),
    "mxfp8 swizzled": (MX, {"element": "e5m2", "swizzled": True}, FP32, (128, 128)),
    "mxfp8 stochastic parts": (MX, {"swizzled": True, **NOISE}, BF16, (32, 160)),
    "mxfp8 odd index": (MX, NOISE | {"first_index": 2**33 + 5}, BF16, (128, 64)),
    "mxfp4 whole": (MX, {"element": "e2m1", **NOISE}, BF16, (128, 64)),
    "mxfp4 parts": (MX, {"element": "e2m1", "swizzled": True}, BF16, (160, 32)),
    "nvfp4 whole": (NVFP4, {}, FP16, (128, 64)),
    "nvfp4 parts": (NVFP4, {"swizzled": True}, BF16, (144, 80)),
    "nvfp4 hadamard": (NVFP4, {"hadamard": True}, FP32, (128, 64)),
    "nvfp4 hadamard stochastic": (NVFP4, {"hadamard": True, **NOISE}, BF16, (128, 64)),
    "nvfp4 hadamard parts": (NVFP4, {"hadamard": True, "swizzled": True, **NOISE}, FP16, (16, 144)),
    "nvfp4 square": (NVFP4, {"square": True}, BF16, (128, 64)),
    "nvfp4 square parts": (NVFP4, {"square": True, "swizzled": True}, FP32, (48, 80)),
    "amax whole": (AMAX, {}, BF16, (128, 64)),
    "amax parts": (AMAX, {}, FP16, (144, 80)),
    "fp8 whole": (FP8, {}, BF16, (128, 64)),
    "fp8 parts": (FP8, {"element": "e5m2", "power_of_2": True}, FP32, (144, 80)),
    "fp8 of gfx942": (FP8, {"element": "e4m3fnuz"}, FP16, (32, 80)),
    "fp8 delayed": (FP8, {"scale": 0.3, "amax": 0.5}, BF16, (144, 80)),
}


def inputs(name, device="cpu"):
    """The matrix of a case, and its options on the device."""
    function, options, dtype, shape = CASES[name]
    x = oracle.values(math.prod(shape), dtype, seed=len(name), device=device).view(shape)
    if function is FP8 and "scale" not in options:
        x = x.nan_to_num(0.0, 1.0, -1.0)  # else the scale is 1
    options = {
        key: torch.tensor(value, device=device) if isinstance(value, float) else value
        for key, value in options.items()
    }
    return x, options


def flat(made):
    """The tensors of nested tuples."""
    return (
        [made] if isinstance(made, torch.Tensor) else [one for part in made for one in flat(part)]
    )


def results(name, x, options):
    """All that the call makes or changes, and that with amaxes which leave blocks their range."""
    function = CASES[name][0]
    amax = options.get("amax")
    made = flat(function(x, **options)) + ([] if amax is None else [amax])
    if function is NVFP4:
        amaxes = [torch.tensor(value, device=x.device) for value in (16.0, 20.0)]
        made += flat(NVFP4(x, amaxes=amaxes, **options))
    return made


def inside(tensors, margin=MARGIN):
    """(Memory like the tensors, inside poisoned memory; all of that.)"""
    found, memories = [], []
    for tensor in tensors:
        memory = torch.full((tensor.nbytes + 2 * margin,), POISON, dtype=torch.uint8)
        memories.append(memory)
        memory = memory[margin : margin + tensor.nbytes]
        found.append(memory.view(tensor.dtype).view(tensor.shape))
    return found, memories
