"""The noise of stochastic rounding drawn fast on a CPU: the bits of `noise.noise_bits`.

Philox multiplies its words 0 and 2, and what comes out changes places: so both are rows of one
tensor, in turn this way round and the other, and a call does for both what is done to each. All
constants are tensors, since a Python number is made one at every use. Words that are only ever
operands of an exclusive or keep what they have above their 32 bits, until a mask takes it off.
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
    low: torch.Tensor
    half_bits: torch.Tensor
    multipliers: tuple[torch.Tensor, torch.Tensor]
    twice: torch.Tensor
    shifts: tuple[torch.Tensor, ...]


def _constant(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64, device="cpu")


def _rows(first: int, second: int) -> torch.Tensor:
    return torch.tensor([[first], [second]], dtype=torch.int64, device="cpu")


@functools.cache
def _constants() -> _Constants:
    first, second = MULTIPLIERS
    return _Constants(
        low=_constant(LOW_32),
        half_bits=_constant(_HALF_BITS),
        multipliers=(_rows(first, second), _rows(second, first)),
        twice=_constant(1 + (1 << _HALF_BITS)),
        shifts=tuple(_constant(turn * _HALF_BITS // _TURNS) for turn in range(_TURNS)),
    )


class _Memory:
    """Room for the words of groups as they are made."""

    def __init__(self, num_groups: int) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device="cpu")

        self.num_groups = num_groups
        self.even = empty(2, num_groups)
        self.products = (empty(2, num_groups), empty(2, num_groups))
        self.words = empty(num_groups, _WORDS)


class Noise:
    """The noise of one seed, any 64 bits as an integer from -2^63 to 2^64 - 1."""

    def __init__(self, seed: int) -> None:
        keys = (seed & LOW_32, (seed >> _HALF_BITS) & LOW_32)
        self._memory: _Memory | None = None
        self._keys = []
        for turn in range(PHILOX_ROUNDS):
            key_0, key_1 = (
                (key + turn * step) & LOW_32 for key, step in zip(keys, KEY_STEPS, strict=True)
            )
            # The words that come out of a round, and so their keys, stand the other way round.
            self._keys.append(_rows(key_0, key_1) if turn % 2 else _rows(key_1, key_0))

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
        if self._memory is None or self._memory.num_groups != num_groups:
            self._memory = _Memory(num_groups)
        words = self._memory.words
        torch.stack(self._words(first_group, self._memory), dim=1, out=words)
        words.bitwise_and_(constant.low).mul_(constant.twice)
        turns = noise.view(num_groups, _WORDS, _TURNS).unbind(2)
        for turn, shift in zip(turns, constant.shifts, strict=True):
            torch.bitwise_right_shift(words, shift, out=turn)

    def _words(self, first_group: int, memory: _Memory) -> tuple[torch.Tensor, ...]:
        """The words of the groups, int64 whose low 32 bits count."""
        constant, low, even = _constants(), first_group & LOW_32, memory.even
        even_rows = even.unbind()  # words 0 and 2
        torch.arange(low, low + memory.num_groups, out=even_rows[0])
        even_rows[1].zero_()
        odd_rows = _rows(first_group >> _HALF_BITS, 0).unbind()  # words 1 and 3
        made = [(products, products.unbind()) for products in memory.products]
        for turn, keys in enumerate(self._keys):
            products, rows = made[turn % 2]
            torch.mul(even, constant.multipliers[turn % 2], out=products)
            torch.bitwise_right_shift(products, constant.half_bits, out=even)
            even_rows[0].bitwise_xor_(odd_rows[1])
            even_rows[1].bitwise_xor_(odd_rows[0])
            even.bitwise_xor_(keys).bitwise_and_(constant.low)
            odd_rows = rows
        # After an odd number of rounds words 2 and 3 stand first.
        return even_rows[1], odd_rows[1], even_rows[0], odd_rows[0]


def _with_one_high_word(first_group: int, end: int) -> Iterator[tuple[int, int]]:
    """The groups from `first_group` to `end`, cut where their numbers' upper 32 bits change."""
    while first_group < end:
        stop = min(end, (first_group >> _HALF_BITS) + 1 << _HALF_BITS)
        yield first_group, stop
        first_group = stop
