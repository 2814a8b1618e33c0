"""Inputs to try conversions to element codes on: every BF16, and what lies on boundaries."""

import math

import torch

from sidestream.kernels.formats import codes
from sidestream.kernels.formats.table import E2M1, E4M3, E5M2, ElementFormat

SIGNED = (E4M3, E5M2, E2M1)
SEED = 0x0123_4567_89AB_CDEF


def every_bf16() -> torch.Tensor:
    """All 2^16 BF16 values in FP32, infinities and NaNs among them."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def finite_codes(element: ElementFormat) -> torch.Tensor:
    """Every code that stands for a finite value, uint8."""
    every = torch.arange(1 << element.bits, dtype=torch.uint8)
    return every[codes.decode(every, element).isfinite()]


def boundaries(element: ElementFormat) -> torch.Tensor:
    """Each code's value, the midpoint to the next and the overflow's, all also one ulp off."""
    values = codes.decode(finite_codes(element), element)
    values = values[values >= 0].double().unique()
    next_up = torch.cat((values[1:], 2 * values[-1:] - values[-2:-1]))
    points = torch.cat((values, (values + next_up) / 2, next_up[-1:])).float()
    bits = points.view(torch.int32)
    near = torch.cat([(bits + off).view(torch.float32) for off in (-1, 0, 1)])
    near = near[near.isfinite()]
    return torch.cat((near, -near))


def specials() -> torch.Tensor:
    """Zeros, NaNs of both signs and odd payloads, infinities, FP32's subnormals and extremes."""
    floats = [0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38]
    floats += [3.4028235e38, -3.4028235e38, 3.3895314e38, -3.3895314e38, 3.3961775e38]
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -0x7FFFFF, 0x7FFFFFFF, -1])
    return torch.cat((torch.tensor(floats), nans.to(torch.int32).view(torch.float32)))


def inputs(element: ElementFormat) -> torch.Tensor:
    """All of the above, and random values of many magnitudes."""
    generator = torch.Generator().manual_seed(7)
    powers = torch.exp2(torch.randint(-40, 20, (20_000,), generator=generator).float())
    spread = torch.randn(20_000, generator=generator) * powers
    return torch.cat((every_bf16(), boundaries(element), specials(), spread))


def amaxes() -> torch.Tensor:
    """Block maxima, FP32 >= 0: every power of two one ulp around, what rules turn on, specials."""
    powers = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    steps = [1.0, 1.25, 1.5, 1.75, 1.875, 1.9375]
    points = torch.cat([(powers.double() * step).float() for step in steps])
    bits = points[points.isfinite()].view(torch.int32)
    near = torch.cat([(bits + off).view(torch.float32) for off in (-1, 0, 1)])
    return torch.cat((near[near >= 0], specials().abs(), every_bf16().abs()))
