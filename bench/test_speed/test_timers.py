"""The host's cost of a timed region for pytest-benchmark: a start and a stop, alone and nested.

    pytest bench/test_speed/test_timers.py --benchmark-only [--benchmark-json FILE]

DEVICE=cuda in the environment times on the GPU as well, whose events are recorded; the CPU alone is
the default. A round has 1000 regions, so that the table's microseconds are nanoseconds a region;
the JSON has `ns_per_region`, of the fastest round.
"""

import os
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from sidestream.training.measures import Timers

DEVICE = os.environ.get("DEVICE", "cpu")
REGIONS = 1000
ROUNDS = 200


def _alone(timers: Timers) -> None:
    for _ in range(REGIONS):
        with timers.region("step"):
            pass


def _nested(timers: Timers) -> None:
    for _ in range(REGIONS // 4):
        with (
            timers.region("step"),
            timers.region("forward"),
            timers.region("block"),
            timers.region("attention"),
        ):
            pass


def _by_hand(timers: Timers) -> None:
    timer = timers("step", log_level=0)
    for _ in range(REGIONS):
        timer.start()
        timer.stop()


def _above_the_level(timers: Timers) -> None:
    for _ in range(REGIONS):
        with timers.region("detail", log_level=1):
            pass


@pytest.mark.parametrize("run", [_alone, _nested, _by_hand, _above_the_level])
def test_region(benchmark: BenchmarkFixture, run: Callable[[Timers], None]) -> None:
    """A thousand regions that do nothing inside."""
    timers = Timers(device=DEVICE)
    benchmark.group = f"{REGIONS} timed regions, {DEVICE}"
    benchmark.pedantic(run, args=(timers,), rounds=ROUNDS, warmup_rounds=5)
    if benchmark.stats is not None:  # None where benchmarks are switched off
        benchmark.extra_info["ns_per_region"] = benchmark.stats.stats.min * 1e9 / REGIONS
