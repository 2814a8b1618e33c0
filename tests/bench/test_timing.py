"""Tests of paired timing: the order of turns, and medians and intervals of known distributions."""

import itertools
import random
import statistics

import pytest

from sidestream.bench import timing
from sidestream.bench.timing import (
    Estimate,
    alternating_order,
    compare_with_limit,
    estimate_median,
    estimate_median_of_launches,
    pair_differences,
    pair_ratios,
    shuffled_order,
)


def _lognormal(count: int, *, seed: int, centre: float = 1.0, spread: float = 0.1) -> list[float]:
    generator = random.Random(seed)
    return [centre * generator.lognormvariate(0.0, spread) for _ in range(count)]


@pytest.mark.parametrize(
    ("names", "rounds", "expected"), [("AB", 4, "ABBAABBA"), ("ABC", 3, "ABCCBAABC")]
)
def test_order_turns_round_every_round(names, rounds, expected):
    assert "".join(alternating_order(names, rounds)) == expected


def test_drawn_order_has_everybody_once_a_round_and_no_fixed_follower():
    order = list(shuffled_order("ABCDE", 200))
    rounds = [order[start : start + 5] for start in range(0, 1000, 5)]
    assert all(sorted(each) == list("ABCDE") for each in rounds)
    followers = {pair for each in rounds for pair in itertools.pairwise(each)}
    assert len(followers) == 5 * 4
    assert order == list(shuffled_order("ABCDE", 200))
    assert order != list(shuffled_order("ABCDE", 200, seed=1))


def test_order_refuses_no_rounds():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        list(alternating_order("AB", 0))


def test_pairs_go_by_position_and_are_complete():
    assert pair_ratios([2.0, 9.0], [4.0, 3.0]) == [0.5, 3.0]
    assert pair_differences([2.0, 9.0], [4.0, 3.0]) == [-2.0, 6.0]
    for pair in (pair_ratios, pair_differences):
        with pytest.raises(ValueError, match="got 2 and 1"):
            pair([1.0, 2.0], [1.0])


def test_pairing_removes_drift_that_both_share():
    """Two candidates at a true ratio of 0.8 while the machine slows to a third of its speed."""
    drift = [1.0 + 2.0 * index / 40 for index in range(40)]
    noise = _lognormal(80, seed=1, spread=0.02)
    first = [0.8 * slow * wobble for slow, wobble in zip(drift, noise[:40], strict=True)]
    second = [slow * wobble for slow, wobble in zip(drift, noise[40:], strict=True)]
    estimate = estimate_median(pair_ratios(first, second))
    # Four standard errors of a median of 40 ratios that each scatter by 0.8 * 0.02 * sqrt(2).
    assert abs(estimate.median - 0.8) < 0.018
    assert estimate.high - estimate.low < 0.03


@pytest.mark.parametrize("count", [1, 2, 25], ids=lambda count: f"n{count}")
def test_median_is_the_plain_median_inside_its_interval(count):
    samples = _lognormal(count, seed=count)
    estimate = estimate_median(samples)
    assert estimate.median == statistics.median(samples)
    assert min(samples) <= estimate.low <= estimate.median <= estimate.high <= max(samples)
    assert estimate.num_samples == count
    assert estimate_median(samples) == estimate


def test_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch):
    """200 experiments at 90 %: a count 3 binomial deviations off means a wrong width."""
    monkeypatch.setattr(timing, "CONFIDENCE", 0.9)
    monkeypatch.setattr(timing, "RESAMPLES", 300)
    found = [estimate_median(_lognormal(25, seed=seed)) for seed in range(200)]
    assert 167 <= sum(one.low <= 1.0 <= one.high for one in found) <= 193


def test_launches_that_disagree_widen_the_interval():
    """Three launches with little noise inside and 10 % between them: one launch cannot tell."""
    launches = [
        _lognormal(25, seed=seed, centre=0.9 + 0.1 * seed, spread=0.01) for seed in range(3)
    ]
    pooled = estimate_median_of_launches(launches)
    independent = estimate_median(list(itertools.chain(*launches)))
    assert pooled.median == independent.median
    assert pooled.high - pooled.low > 2 * (independent.high - independent.low)


@pytest.mark.parametrize("launches", [[], [[1.0], []]], ids=["none", "one-empty"])
def test_launches_without_samples_are_refused(launches):
    with pytest.raises(ValueError, match="at least one sample"):
        estimate_median_of_launches(launches)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        pytest.param(0.85, 0.90, "met", id="touching-from-below"),
        pytest.param(0.88, 0.92, "unclear", id="across"),
        pytest.param(0.91, 0.95, "missed", id="above"),
    ],
)
def test_verdict_needs_the_whole_interval(low, high, verdict):
    estimate = Estimate(median=(low + high) / 2, low=low, high=high, num_samples=25)
    assert compare_with_limit(estimate, 0.90) == verdict
