"""The blocks of all recipes, each by the kernels' own cast of a whole tensor."""

import dataclasses

import torch

from sidestream.kernels import (
    dequantize_fp8,
    dequantize_mx,
    dequantize_nvfp4,
    quantize_fp8,
    quantize_mx,
    quantize_nvfp4,
)
from sidestream.sharding.fp8 import recipe_for

BLOCKS = {
    "tensor": recipe_for("tensorwise").weight,
    "tensor e5m2": dataclasses.replace(recipe_for("tensorwise").gradient, rule=True),
    "tiles": recipe_for("blockwise").weight,
    "1x128": dataclasses.replace(recipe_for("blockwise").activation, rule=False),
    "mxfp8": recipe_for("mxfp8").weight,
    "nvfp4": recipe_for("nvfp4").weight,
}


def by_kernels(x, kind):
    """(codes, scales, amax or None, values) of a matrix."""
    if kind == "mxfp8":
        codes, scales = quantize_mx(x)
        return codes, scales, None, dequantize_mx(codes, scales)
    if kind == "nvfp4":
        codes, scales, amax = quantize_nvfp4(x)
        return codes, scales, amax, dequantize_nvfp4(codes, scales, amax)
    scaling = {"tiles": "128x128", "1x128": "1x128"}.get(kind, "tensor")
    element = "e5m2" if kind == "tensor e5m2" else "e4m3"
    power_of_2 = kind in ("tiles", "tensor e5m2")
    codes, scales = quantize_fp8(x, scaling=scaling, element=element, power_of_2=power_of_2)
    return codes, scales, None, dequantize_fp8(codes, scales, scaling=scaling)


def same(one, other):
    """Of two tensors, whether bits are equal."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def wild(*shape):
    """Values of many magnitudes, all finite."""
    rows = torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1)).float())
    return torch.randn(shape) * rows
