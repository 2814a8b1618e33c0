"""Tests of paired timing: the order of turns, and medians and intervals of known distributions."""

import itertools
import random
import statistics

import pytest

from sidestream.bench.timing import (
    Estimate,
    alternating_order,
    compare_with_limit,
    estimate_median,
    estimate_median_of_launches,
    pair_differences,
    pair_ratios,
)


def _lognormal(count: int, *, seed: int, centre: float = 1.0, spread: float = 0.1) -> list[float]:
    generator = random.Random(seed)
    return [centre * generator.lognormvariate(0.0, spread) for _ in range(count)]


@pytest.mark.parametrize(
    ("names", "rounds", "expected"),
    [
        pytest.param("A", 3, "AAA", id="one"),
        pytest.param("AB", 4, "ABBAABBA", id="two"),
        pytest.param("ABC", 3, "ABCCBAABC", id="three"),
    ],
)
def test_order_turns_round_every_round(names, rounds, expected):
    assert "".join(alternating_order(names, rounds)) == expected


def test_order_refuses_no_rounds():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        list(alternating_order("AB", 0))


def test_pairs_go_by_position():
    assert pair_ratios([2.0, 9.0], [4.0, 3.0]) == [0.5, 3.0]
    assert pair_differences([2.0, 9.0], [4.0, 3.0]) == [-2.0, 6.0]


@pytest.mark.parametrize("pair", [pair_ratios, pair_differences], ids=["ratios", "differences"])
def test_pairs_of_unequal_length_are_refused(pair):
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


@pytest.mark.parametrize("count", [1, 2, 5, 24, 25], ids=lambda count: f"n{count}")
def test_median_is_the_plain_median_inside_its_interval(count):
    samples = _lognormal(count, seed=count)
    estimate = estimate_median(samples)
    assert estimate.median == statistics.median(samples)
    assert min(samples) <= estimate.low <= estimate.median <= estimate.high <= max(samples)
    assert estimate.num_samples == count


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """200 experiments at 90 %: a count 4 binomial deviations off means a wrong width."""
    covered = 0
    for seed in range(200):
        estimate = estimate_median(
            _lognormal(25, seed=seed), confidence=0.9, resamples=300, seed=seed
        )
        covered += estimate.low <= 1.0 <= estimate.high
    assert 163 <= covered <= 197


def test_more_samples_and_less_confidence_narrow_the_interval():
    def width(count: int, confidence: float) -> float:
        estimate = estimate_median(_lognormal(count, seed=3), confidence=confidence)
        return estimate.high - estimate.low

    assert width(400, 0.95) < width(25, 0.95)
    assert width(100, 0.5) < width(100, 0.95)


def test_same_seed_same_interval_other_seed_other_draws():
    samples = _lognormal(30, seed=5)
    assert estimate_median(samples, seed=1) == estimate_median(samples, seed=1)
    intervals = {estimate_median(samples, resamples=50, seed=seed) for seed in range(5)}
    assert len(intervals) > 1


def test_one_launch_pools_as_its_samples_alone():
    samples = _lognormal(25, seed=6)
    pooled = estimate_median_of_launches([samples])
    assert pooled == estimate_median(samples)


def test_launches_that_disagree_widen_the_interval():
    """Three launches with little noise inside and 10 % between them: one launch cannot tell."""
    launches = [
        _lognormal(25, seed=seed, centre=0.9 + 0.1 * seed, spread=0.01) for seed in range(3)
    ]
    pooled = estimate_median_of_launches(launches)
    independent = estimate_median(list(itertools.chain(*launches)))
    assert pooled.median == independent.median
    assert pooled.high - pooled.low > 2 * (independent.high - independent.low)


@pytest.mark.parametrize("launches", [[], [[]], [[1.0], []]], ids=["none", "empty", "one-empty"])
def test_launches_without_samples_are_refused(launches):
    with pytest.raises(ValueError, match="at least one sample"):
        estimate_median_of_launches(launches)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -0.5, 95.0])
def test_confidence_outside_its_range_is_refused(confidence):
    with pytest.raises(ValueError, match="between 0 and 1"):
        estimate_median([1.0], confidence=confidence)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        pytest.param(0.85, 0.89, "met", id="below"),
        pytest.param(0.85, 0.90, "met", id="touching-from-below"),
        pytest.param(0.88, 0.92, "unclear", id="across"),
        pytest.param(0.91, 0.95, "missed", id="above"),
    ],
)
def test_verdict_needs_the_whole_interval(low, high, verdict):
    estimate = Estimate(median=(low + high) / 2, low=low, high=high, num_samples=25)
    assert compare_with_limit(estimate, 0.90) == verdict


def test_description_scales_every_number():
    estimate = Estimate(median=0.5, low=0.25, high=0.75, num_samples=9)
    assert estimate.describe(scale=100, digits=0) == "50 [25, 75]"
