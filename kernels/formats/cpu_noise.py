"""The noise of stochastic rounding drawn fast on a CPU: the bits of `noise.noise_bits`.

Calls cost as much as arithmetic here: a draw has some 60, each over one number for 16 elements. All
constants are tensors without dimensions, since a Python number is made one at every use, and what
all groups share stays one until it meets what they do not. Words that are only ever operands of an
exclusive or keep what they have above their 32 bits, until a mask takes it off.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .noise import GROUP_NUMEL, KEY_STEPS, LOW_32, MULTIPLIERS, PHILOX_ROUNDS

_WORDS = 4  # of a group
_TURNS = 4  # of a word
_HALF_BITS = 32


class _Constants(NamedTuple):
    zero: torch.Tensor
    low: torch.Tensor
    half_bits: torch.Tensor
    multipliers: tuple[torch.Tensor, ...]
    twice: torch.Tensor
    shifts: tuple[torch.Tensor, ...]


def _constant(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64, device="cpu")


@functools.cache
def _constants() -> _Constants:
    return _Constants(
        zero=_constant(0),
        low=_constant(LOW_32),
        half_bits=_constant(_HALF_BITS),
        multipliers=tuple(map(_constant, MULTIPLIERS)),
        twice=_constant(1 + (1 << _HALF_BITS)),
        shifts=tuple(_constant(turn * _HALF_BITS // _TURNS) for turn in range(_TURNS)),
    )


class Noise:
    """The noise of one seed, any 64 bits as an integer from -2^63 to 2^64 - 1."""

    def __init__(self, seed: int) -> None:
        first = (seed & LOW_32, (seed >> _HALF_BITS) & LOW_32)
        self._keys = [
            tuple(
                _constant((key + turn * step) & LOW_32)
                for key, step in zip(first, KEY_STEPS, strict=True)
            )
            for turn in range(PHILOX_ROUNDS)
        ]

    def draw_(self, noise: torch.Tensor, first_index: int) -> None:
        """Fill int32 `noise` [n], contiguous, with that of the elements from `first_index` on."""
        first_group, before = divmod(first_index, GROUP_NUMEL)
        num_groups = -(-(before + noise.numel()) // GROUP_NUMEL)
        drawn = noise
        if num_groups * GROUP_NUMEL != noise.numel():
            drawn = noise.new_empty(num_groups * GROUP_NUMEL)
        for start, stop in _with_one_high_word(first_group, first_group + num_groups):
            part = drawn[(start - first_group) * GROUP_NUMEL : (stop - first_group) * GROUP_NUMEL]
            self._draw_groups_(part, start)
        if drawn is not noise:
            noise.copy_(drawn[before : before + noise.numel()])

    def _draw_groups_(self, noise: torch.Tensor, first_group: int) -> None:
        """Fill `noise` with that of whole groups, whose numbers differ in their low words alone."""
        constant, num_groups = _constants(), noise.numel() // GROUP_NUMEL
        multiplier_0, multiplier_2 = constant.multipliers
        low = first_group & LOW_32
        c0 = torch.arange(low, low + num_groups, device="cpu")
        c1, c2, c3 = _constant(first_group >> _HALF_BITS), constant.zero, constant.zero
        for key_0, key_1 in self._keys:
            product_0, product_2 = c0 * multiplier_0, c2 * multiplier_2
            c0 = _high_word(product_2, c1 ^ key_0)
            c2 = _high_word(product_0, c3 ^ key_1)
            c1, c3 = product_2, product_0
        doubled = torch.stack((c0, c1, c2, c3), dim=1)
        doubled.bitwise_and_(constant.low).mul_(constant.twice)
        rotated = noise.view(num_groups, _WORDS, _TURNS)
        for turn, shift in enumerate(constant.shifts):
            rotated[:, :, turn].copy_(doubled >> shift)


def _high_word(product: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The upper word of the products, in which `other`'s lower one is exclusively or-ed."""
    constant = _constants()
    made = (product >> constant.half_bits) ^ other
    return made.bitwise_and_(constant.low)


def _with_one_high_word(first_group: int, end: int) -> Iterator[tuple[int, int]]:
    """The groups from `first_group` to `end`, cut where their numbers' upper 32 bits change."""
    while first_group < end:
        stop = min(end, (first_group >> _HALF_BITS) + 1 << _HALF_BITS)
        yield first_group, stop
        first_group = stop
