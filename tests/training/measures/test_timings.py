"""What ranks told is summed up right, and a straggler is told from noise."""

import json
import math
import random

import pytest

from sidestream.training.measures import Timings
from sidestream.training.measures.timings import reading_of


def told(*usual_s, noise_s=0.0, count=16, seed=0):
    """Ranks whose only region takes so long, give or take."""
    draw = random.Random(seed)
    ranks = [[each + draw.uniform(-noise_s, noise_s) for _ in range(count)] for each in usual_s]
    return Timings(tuple({"step": reading_of(sum(each), 0, count, each)} for each in ranks))


def test_a_reading_has_median_and_deviation():
    reading = reading_of(18, 9, 5, [1, 2, 3, 4, 8])
    assert (reading.median_s, reading.deviation_s, reading.num_recent) == (3, 1, 5)


SHOWN = {
    "max": ["step: max 3000.000 ms"],
    "minmax": ["step: min 1000.000 ms, max 3000.000 ms"],
    "mean": ["step: mean 2000.000 ms"],
    "all": ["step: rank 0 1000.000 ms, rank 2 3000.000 ms"],
}


@pytest.mark.parametrize("option", SHOWN)
def test_lines(option):
    first, last = (reading_of(each, 0, 2, [each / 2]) for each in (2, 6))
    assert Timings(({"step": first}, {}, {"step": last}), option).lines(2) == SHOWN[option]


def test_json_has_every_rank():
    reading = reading_of(2.0, 1.0, 2, [0.5, 1.5])
    row = json.loads(Timings(({"step": reading}, {})).to_json())["step"]
    assert row["ranks"][1] is None
    assert row["ranks"][0] == {
        "elapsed_s": 2.0,
        "host_s": 1.0,
        "count": 2,
        "median_s": 1.0,
        "deviation_s": 0.5,
        "num_recent": 2,
    }
    assert (row["min_s"], row["max_s"], row["mean_s"]) == (2.0, 2.0, 2.0)


def test_the_farthest_straggler_is_first():
    late = told(1.0, 1.3, 1.0, 1.0, 2.0, noise_s=0.01).stragglers()
    assert [each.rank for each in late] == [4, 1]
    first = late[0]
    assert first.excess_s == pytest.approx(1.0, abs=0.02)
    assert 0 < first.noise_s <= 0.01
    assert str(first).startswith("straggler: rank 4 in step, ")


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_who_waits_for_a_straggler_is_none(world_size):
    """A rank is slow in what it does alone; in what follows the others wait for it."""

    def reading(seconds, count):
        return reading_of(seconds * count, 0, count, [seconds] * count)

    slow = {"step": 2.0, "step/batch": 0.9, "step/forward": 0.5}
    waits = {"step": 2.0, "step/batch": 0.1, "step/forward": 0.7}  # 4 microbatches
    ranks = [
        {
            name: reading(seconds, 32 if name == "step/forward" else 8)
            for name, seconds in (slow if rank == 1 else waits).items()
        }
        for rank in range(world_size)
    ]
    late = Timings(tuple(ranks)).stragglers()
    assert [(each.rank, each.name) for each in late] == [(1, "step/batch")]
    flat = [{name.removeprefix("step/"): each for name, each in rank.items()} for rank in ranks]
    late = Timings(tuple(flat[:2])).stragglers()
    assert [(each.rank, each.name) for each in late] == [(1, "batch"), (0, "forward")]


@pytest.mark.parametrize("seed", range(20))
def test_noise_makes_no_straggler(seed):
    assert told(*[1.0] * 16, noise_s=0.3, seed=seed).stragglers() == []


NOBODY = {
    "one rank": told(1.0),
    "fewer than five occurrences": told(1.0, 9.0, count=4),
    "a small share": told(1.0, 1.04),
    "as early as the others": told(1.0, 1.0, 1.0),
    "only earlier": told(1.0, 0.2, 1.0, 1.0),
}


@pytest.mark.parametrize("timings", NOBODY.values(), ids=NOBODY)
def test_nobody_is_late(timings):
    assert timings.stragglers() == []


def test_of_two_ranks_the_later_one_is_late():
    (late,) = told(1.0, 1.5).stragglers()
    assert (late.rank, late.others_s, late.noise_s) == (1, 1.0, 0.0)
    assert str(late).endswith("(50%) beyond the others, without noise")


def test_its_own_noise_excuses_a_rank():
    usual = [reading_of(8, 0, 8, [1.0] * 8) for _ in range(3)]
    noisy = reading_of(16, 0, 8, [1.0, 3.0, 1.5, 2.5] * 2)
    timings = Timings(tuple({"step": each} for each in [*usual, noisy]))
    assert timings.stragglers() == []
    assert [each.rank for each in timings.stragglers(times_noise=1)] == [3]


def test_others_without_time():
    (late,) = told(0.0, 0.0, 1.0).stragglers()
    assert late.rank == 2
    assert math.isfinite(late.excess_s)
    assert "%" not in str(late)
