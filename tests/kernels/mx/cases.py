"""Inputs for the MX casts and what is measured on them: shapes, values, signal to noise."""

import itertools
import math

import torch

from sidestream.kernels.formats.swizzle import swizzled_numel
from sidestream.kernels.mx import reference
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.formats import code_cases

SEED = code_cases.SEED
ELEMENTS = tuple(reference.elements())
POISON = 0xAB
MARGIN = 32  # bytes around a result, which must stay as they were; keeps it 16-byte aligned


def poisoned(shape, margin=MARGIN):
    """(Bytes of `shape` inside poisoned memory, that memory)."""
    numel = math.prod(shape)
    memory = torch.full((numel + 2 * margin,), POISON, dtype=torch.uint8)
    return memory[margin : margin + numel].view(shape), memory


def shapes(shape, element, swizzled):
    """The shapes of data and scales, as bytes, for a tensor of `shape`."""
    *outer, row_numel = shape
    columns = -(-row_numel // 32)
    width = -(-row_numel // 2) if element == "e2m1" else row_numel
    if swizzled:
        return (*outer, width), (swizzled_numel(math.prod(outer), columns),)
    return (*outer, width), (*outer, columns)


def quantized(function, x, options, margin=MARGIN):
    """The poisoned memories around data and scales after `function` has written into them."""
    element, swizzled = options[0], options[-1]
    made = [poisoned(shape, margin) for shape in shapes(x.shape, element, swizzled)]
    function(made[0][0], made[1][0], x, *options)
    return [memory for _, memory in made]


def dequantized(function, shape, dtype, arguments, margin=8):
    """The memory around a tensor of `shape` after `function` has written into it."""
    numel = math.prod(shape)
    memory = torch.full((numel + 2 * margin,), oracle.CANARY, dtype=dtype)
    function(memory[margin : margin + numel].view(shape), *arguments)
    return memory


def blocks_of_amaxes(step: int = 1) -> torch.Tensor:
    """FP32 [n, 32]: a block for each `step`th magnitude scale rules turn on, the rest below it."""
    amaxes = code_cases.amaxes()[: -(2**16)]  # without every BF16
    amaxes = torch.cat((amaxes[::step], code_cases.specials().abs()))
    generator = torch.Generator().manual_seed(11)
    blocks = torch.rand(len(amaxes), 32, generator=generator) * 2 - 1
    blocks = blocks * torch.where(amaxes.isfinite(), amaxes, 1.0).unsqueeze(1)
    places = torch.arange(len(amaxes)) % 32
    blocks[torch.arange(len(amaxes)), places] = amaxes
    return blocks


def heavy_tailed(numel: int) -> torch.Tensor:
    """Student's t with 3 degrees of freedom."""
    normal = torch.randn(4, numel, generator=torch.Generator().manual_seed(5))
    return normal[0] / normal[1:].square().mean(0).sqrt()


def signal_to_noise(x: torch.Tensor, decoded: torch.Tensor) -> float:
    """In dB."""
    x, decoded = x.double(), decoded.double()
    return 10 * math.log10(x.square().sum() / (x - decoded).square().sum())


COMBINATIONS = tuple(itertools.product(ELEMENTS, ("rceil", "floor", "ceil", "even")))
