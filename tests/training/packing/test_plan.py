import functools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.training.packing import cut, pack

BUDGET = 12
LENGTHS = st.lists(st.integers(0, BUDGET), max_size=60)


def _first_fit_decreasing(lengths, budget):
    """The definition, n x bins."""
    bins, rooms = [], []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fitting = [place for place, room in enumerate(rooms) if room >= lengths[index]]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            rooms.append(budget)
        place = fitting[0]
        bins[place].append(index)
        rooms[place] -= lengths[index]
    return tuple(map(tuple, bins))


def _fewest_bins(lengths, budget):
    """Over all ways to fill one bin after the other."""

    @functools.cache
    def fewest(left, room):
        if not left:
            return 0
        best = len(left)
        for place, length in enumerate(left):
            if place and left[place - 1] == length:
                continue
            rest = left[:place] + left[place + 1 :]
            opened = length > room
            best = min(best, opened + fewest(rest, (budget if opened else room) - length))
        return best

    return fewest(tuple(sorted(filter(None, lengths), reverse=True)), 0)


@settings(max_examples=150, deadline=None)
@given(LENGTHS)
def test_bins_are_those_of_the_definition(lengths):
    plan = pack(lengths, BUDGET)
    assert plan.bins == _first_fit_decreasing(lengths, BUDGET)
    assert sorted(index for bin_ in plan.bins for index in bin_) == list(range(len(lengths)))
    assert plan.bin_tokens == tuple(sum(lengths[i] for i in bin_) for bin_ in plan.bins)
    assert all(tokens <= BUDGET for tokens in plan.bin_tokens)
    assert plan == pack(lengths, BUDGET)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=8))
def test_no_more_bins_than_the_bound_of_first_fit_decreasing(lengths):
    assert 9 * len(pack(lengths, BUDGET).bins) <= 11 * _fewest_bins(lengths, BUDGET) + 6


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(0, 3))
def test_as_many_bins_as_asked_for(lengths, more):
    needed = pack(lengths, BUDGET)
    fixed = pack(lengths, BUDGET, num_bins=len(needed.bins) + more)
    assert fixed.bins == needed.bins + ((),) * more
    assert fixed.bin_tokens == needed.bin_tokens + (0,) * more


@pytest.mark.parametrize(
    ("lengths", "bins", "waste"),
    [
        ([], (), 0.0),
        ([0, 0], ((0, 1),), 1.0),
        ([1], ((0,),), 7 / 8),
        ([8, 8], ((0,), (1,)), 0.0),
        ([5, 3, 3, 2, 2, 1], ((0, 1), (2, 3, 4, 5)), 0.0),
        ([4, 0, 5], ((2, 1), (0,)), 7 / 16),
    ],
    ids=["none", "empty", "one_token", "whole_bins", "ties_by_index", "an_empty_one"],
)
def test_known_packings(lengths, bins, waste):
    plan = pack(lengths, 8)
    assert plan.bins == bins
    assert plan.waste == pytest.approx(waste, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        (([3, 9], 8), {}, r"at most 8 tokens, got 9 in sequence 1; cut them with `cut`"),
        (([3, -1], 8), {}, r"lengths >= 0, got -1 for sequence 1"),
        (([3], 0), {}, r"budget >= 1, got 0"),
        (([3], 8), {"num_bins": -1}, r"num_bins >= 0, got -1"),
        (([5, 5], 8), {"num_bins": 1}, r"1 bins of 8 tokens, got 10 tokens, .* sequence 1 with 5"),
        (([0], 8), {"num_bins": 0}, r"0 bins of 8 tokens, got 0 tokens"),
    ],
    ids=["too_long", "negative", "no_budget", "negative_bins", "too_few_bins", "no_bin"],
)
def test_what_cannot_be_packed_is_refused(arguments, options, expected):
    with pytest.raises(ValueError, match=expected):
        pack(*arguments, **options)


def test_a_length_is_an_integer():
    with pytest.raises(TypeError):
        pack([1.5], 8)


def test_a_lognormal_mix_wastes_less_than_3_percent_in_seconds():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(50_000).log_normal_(5.5, 1.0, generator=generator).long().clamp(1, 2048)
    start = time.perf_counter()
    plan = pack(lengths.tolist(), 2048)
    # 0.1 s; n x bins would be 50,000 x 8,700 looks, 20 s and more.
    assert time.perf_counter() - start < 5
    assert sum(plan.bin_tokens) == int(lengths.sum())
    assert plan.waste < 0.001


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=10), st.integers(1, 9))
def test_pieces_are_the_sequences_in_order(lengths, longest):
    pieces = cut(lengths, longest)
    expected = [
        (sequence, start, min(longest, length - start))
        for sequence, length in enumerate(lengths)
        for start in range(0, length, longest)
    ]
    got = zip(pieces.sequence.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True)
    assert list(got) == expected


def test_pieces_of_nothing_are_refused():
    with pytest.raises(ValueError, match="longest >= 1, got 0"):
        cut([3], 0)
