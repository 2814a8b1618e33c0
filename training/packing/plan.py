"""Which bin every sequence goes into: first-fit decreasing, decided from lengths alone.

lengths 5 3 3 2 2 1, budget 8      ->  bins (0, 1) (2, 3, 4, 5)      waste 0
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Bins of sequence numbers, in the order in which they lie there, and the tokens of each bin;
    `budget` is the number of tokens that a bin has room for.
    """

    budget: int
    bins: tuple[tuple[int, ...], ...]
    bin_tokens: tuple[int, ...]

    @property
    def waste(self) -> float:
        """Share of the bins' room that is left empty; 0 without bins."""
        room = self.budget * len(self.bins)
        return 1 - sum(self.bin_tokens) / room if room else 0.0


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of sequences: piece i is `length[i]` tokens of sequence `sequence[i]` from `start[i]`;
    int64 tensors, sequence by sequence.
    """

    sequence: Tensor
    start: Tensor
    length: Tensor


def cut(lengths: Sequence[int] | Tensor, longest: int) -> Pieces:
    """Cut sequences into pieces of `longest` tokens and a rest; empty sequences have no piece.

        cut([5, 0, 2], 2)  ->  sequence 0 0 0 2, start 0 2 4 0, length 2 2 1 2

    Raises:
        ValueError: `longest` is below 1.
    """
    if longest < 1:
        raise ValueError(f"expected longest >= 1, got {longest}; pass the tokens of a whole piece")
    whole = torch.as_tensor(lengths, dtype=torch.int64)
    counts = (whole + longest - 1) // longest
    sequence = torch.repeat_interleave(torch.arange(whole.numel()), counts)
    firsts = counts.cumsum(0) - counts
    start = (torch.arange(sequence.numel()) - firsts[sequence]) * longest
    return Pieces(sequence, start, (whole[sequence] - start).clamp(max=longest))


def pack(lengths: Sequence[int], budget: int, *, num_bins: int | None = None) -> PackingPlan:
    """Put sequences of these lengths into bins of `budget` tokens, the longest first, each into the
    first bin with room for it; of equal ones, the first comes first.

    Takes at most 11/9 of the fewest bins possible + 6/9 (Dosa 2007), and O(n log n) time. As many
    bins as that needs, or exactly `num_bins`, some of them perhaps empty.

    Raises:
        TypeError: a length, `budget` or `num_bins` is no integer.
        ValueError: a length is negative or above the budget, `budget` is below 1, `num_bins` is
        negative, or the sequences do not fit into `num_bins`.
    """
    lengths = list(map(operator.index, lengths))
    budget = operator.index(budget)
    num_bins = None if num_bins is None else operator.index(num_bins)
    _check(lengths, budget, num_bins)
    # Of the bins that first fit opens, at most one is not more than half full.
    most = min(len(lengths), 2 * sum(lengths) // budget + 1)
    rooms = _Rooms(budget, most if num_bins is None else num_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins or 0)]
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable
    for length, group in groupby(order, key=lengths.__getitem__):
        equal = list(group)
        placed = 0
        while placed < len(equal):
            place = rooms.first_with(length)
            if place is None:
                raise ValueError(
                    f"expected sequences that fit into {num_bins} bins of {budget} tokens, got "
                    f"{sum(lengths)} tokens, of which sequence {equal[placed]} with {length} finds "
                    "no room; pass more bins, a larger budget or less"
                )
            if place == len(bins):
                bins.append([])
            count = len(equal) - placed
            if length:
                count = min(count, rooms.room(place) // length)
            bins[place] += equal[placed : placed + count]
            rooms.take(place, count * length)
            placed += count
    filled = tuple(budget - rooms.room(place) for place in range(len(bins)))
    return PackingPlan(budget, tuple(map(tuple, bins)), filled)


def _check(lengths: list[int], budget: int, num_bins: int | None) -> None:
    if budget < 1:
        raise ValueError(f"expected budget >= 1, got {budget}; pass the tokens of a bin")
    if num_bins is not None and num_bins < 0:
        raise ValueError(f"expected num_bins >= 0, got {num_bins}; pass None for as many as needed")
    if not lengths:
        return
    shortest, longest = min(lengths), max(lengths)
    if shortest < 0:
        raise ValueError(
            f"expected lengths >= 0, got {shortest} for sequence {lengths.index(shortest)}; pass "
            "numbers of tokens"
        )
    if longest > budget:
        raise ValueError(
            f"expected sequences of at most {budget} tokens, got {longest} in sequence "
            f"{lengths.index(longest)}; cut them with `cut`, or pass a larger budget"
        )


class _Rooms:
    """The room left in each bin, and the first bin with enough of it in O(log bins): a binary tree
    in which a node has the larger of its children's rooms, and the leaves are the bins.
    """

    def __init__(self, budget: int, count: int) -> None:
        self._num_leaves = 1 << max(0, count - 1).bit_length()
        # Leaves that are no bins have no room, not even for an empty sequence.
        leaves = [budget] * count + [-1] * (self._num_leaves - count)
        self._largest = [-1] * self._num_leaves + leaves
        for node in range(self._num_leaves - 1, 0, -1):
            self._largest[node] = max(self._largest[2 * node], self._largest[2 * node + 1])

    def first_with(self, room: int) -> int | None:
        if self._largest[1] < room:
            return None
        node = 1
        while node < self._num_leaves:
            node *= 2
            if self._largest[node] < room:
                node += 1
        return node - self._num_leaves

    def room(self, place: int) -> int:
        return self._largest[self._num_leaves + place]

    def take(self, place: int, tokens: int) -> None:
        node = self._num_leaves + place
        self._largest[node] -= tokens
        while node > 1:
            node //= 2
            largest = max(self._largest[2 * node], self._largest[2 * node + 1])
            if self._largest[node] == largest:
                return
            self._largest[node] = largest
