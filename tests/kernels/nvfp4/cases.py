"""What NVFP4 and the Hadamard transform are tried on: shapes, magnitudes, special values."""

import math

import torch

SEED = -0x0123_4567_89AB_CDEF
# One tile of 4096 elements and a tail; rows that are cut into whole blocks; rows that are not.
SHAPES = [(4096 + 512 + 9,), (3, 1600), (5, 37), (3, 7, 1), (1, 15), (2, 0)]


def spread(shape, dtype=torch.float32, seed=3):
    """Gaussian blocks of 16 whose magnitudes lie up to 16 octaves apart, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)
    values = torch.randn(numel, generator=generator)
    octaves = torch.randint(-12, 4, (numel // 16 + 1,), generator=generator).float()
    values *= torch.exp2(octaves).repeat_interleave(16)[:numel]
    values[16:32] = 0.0
    return values.to(dtype).view(shape)


def special(numel=160):
    """Blocks with NaNs, infinities, nothing else, minus zeros and subnormals, among plain ones."""
    values = spread((numel,))
    values[3], values[17], values[32:48] = math.nan, -math.nan, math.nan
    values[49:51] = torch.tensor([1e-40, -0.0])
    values[70] = -math.inf
    values[80:82] = torch.tensor([math.inf, math.nan])
    return values
