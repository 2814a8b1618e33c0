"""Joules are those of the rank's own device, lap by lap, and never 0 where they are not known."""

from unittest import mock

import pytest

from sidestream.tests.ranks import run_on_ranks
from sidestream.training.measures import (
    Energy,
    EnergyMonitor,
    energy,
    sum_over_ranks,
)
from sidestream.training.measures.energy_sources import EnergyUnavailable


class Counter:
    """Joules that pass when `run` says so; None: it cannot be read."""

    key, remark, max_gap_s = "counter", "", 100.0

    def __init__(self):
        self.joules, self.is_open, self.refusal = 1000.0, False, ""

    def open(self):
        if self.refusal:
            raise EnergyUnavailable(self.refusal)
        self.is_open = True

    def run(self, joules):
        self.joules += joules

    def read_joules(self):
        assert self.is_open
        if self.joules is None:
            raise EnergyUnavailable("the counter is off")
        return self.joules

    def close(self):
        assert self.is_open
        self.is_open = False


@pytest.fixture
def counter():
    return Counter()


@pytest.fixture
def monitor(counter):
    made = EnergyMonitor(source=counter)
    made.setup()
    return made


def test_laps_and_total(monitor, counter):
    counter.run(5)
    assert monitor.lap() == Energy(5, "counter")
    counter.run(7)
    assert monitor.get_total().joules == 12
    counter.run(1)
    assert monitor.lap().joules == 8
    assert monitor.lap().joules == 0
    counter.run(2)
    monitor.shutdown()
    counter.run(100)
    assert monitor.get_total().joules == 15
    assert not counter.is_open
    monitor.setup()
    assert monitor.get_total().joules == 0


def test_a_pause_counts_nothing(monitor, counter):
    counter.run(1)
    monitor.pause()
    counter.run(100)
    assert monitor.get_total().joules == 1
    monitor.resume()
    counter.run(2)
    assert monitor.lap().joules == 3
    monitor.pause()
    counter.run(100)
    assert monitor.lap().joules == 0
    monitor.shutdown()
    assert monitor.get_total().joules == 3


@pytest.mark.parametrize(
    ("before", "act"),
    [
        ("", "lap"),
        ("", "pause"),
        ("", "get_total"),
        ("", "shutdown"),
        ("setup", "setup"),
        ("setup", "resume"),
        ("setup pause", "pause"),
        ("setup shutdown", "lap"),
        ("setup shutdown", "shutdown"),
    ],
    ids=lambda text: text.replace(" ", "-") or "new",
)
def test_a_call_out_of_order_is_refused(counter, before, act):
    monitor = EnergyMonitor(source=counter)
    for each in before.split():
        getattr(monitor, each)()
    with pytest.raises(RuntimeError, match=f"^{act}: expected an energy monitor that is"):
        getattr(monitor, act)()


def test_no_counter_is_said_and_is_not_0(counter):
    counter.refusal = "no driver"
    monitor = EnergyMonitor(source=counter)
    monitor.setup()
    monitor.pause()
    monitor.resume()
    lap = monitor.lap()
    assert (str(lap), lap.joules, lap.per(10)) == ("unavailable: no driver", None, None)
    monitor.shutdown()
    assert str(monitor.get_total()) == monitor.unavailable.join(["unavailable: ", ""])


def test_a_counter_that_fails_meanwhile(monitor, counter):
    counter.run(5)
    counter.joules, before = None, counter.joules
    assert str(monitor.lap()) == "unavailable: the counter is off"
    counter.joules = before + 7
    # This lap began when the counter was off.
    assert monitor.lap().joules is None
    counter.run(2)
    assert monitor.lap().joules == 2
    assert monitor.get_total().joules is None


def test_a_counter_that_goes_back(monitor, counter):
    counter.run(-1)
    assert str(monitor.lap()) == "unavailable: counter went back from 1000.0 J to 999.0 J"
    counter.run(3)
    assert monitor.lap().joules == 3


def test_a_counter_that_was_not_read_in_time(counter):
    with mock.patch.object(energy.time, "monotonic") as now:
        now.return_value = 0.0
        monitor = EnergyMonitor(source=counter)
        monitor.setup()
        monitor.pause()
        now.return_value = 500.0  # a pause may be longer
        monitor.resume()
        counter.run(1)
        now.return_value = 600.0
        assert monitor.lap().joules == 1
        now.return_value = 701.0
        assert "within 100 s and was not read for 101 s" in str(monitor.lap())


def test_keeping_up_reads_a_counter_in_time_and_no_more_often(counter):
    with (
        mock.patch.object(energy.time, "monotonic") as now,
        mock.patch.object(counter, "read_joules", wraps=counter.read_joules) as read,
    ):
        now.return_value = 0.0
        monitor = EnergyMonitor(source=counter)
        monitor.setup()
        for step in range(1000):
            counter.run(1)
            now.return_value = float(step)
            monitor.keep_up()
        assert read.call_count == 1 + 999 // 51
        assert monitor.lap().joules == 1000
        monitor.pause()
        now.return_value = 5000.0
        monitor.keep_up()
        assert monitor.lap().joules == 0


def test_joules_of_steps_and_tokens():
    used = Energy(12.0, "counter", "of two")
    assert (used.per(4), str(used)) == (3.0, "12.0 J (of two)")
    with pytest.raises(ValueError, match="above 0, got 0"):
        used.per(0)


def test_a_sum_says_what_must_be_known_of_it():
    remarked = Energy(3.0, "GPU a", "of the whole GPU")
    assert str(sum_over_ranks(remarked)) == "3.0 J (of the whole GPU)"


def _sums(rank, world_size):
    counters = ["GPU a", "GPU b", "GPU b"]  # the last two share one
    known = Energy(1.0 + rank, counters[rank])
    return (
        sum_over_ranks(known).joules,
        str(sum_over_ranks(known if rank != 1 else Energy(None, "GPU b", "off"))),
    )


def test_ranks_that_share_a_counter_count_it_once():
    assert run_on_ranks(_sums, 3) == [(1.0 + 3.0, "unavailable: rank 1: off")] * 3


def test_no_other_rank_is_asked_unless_the_call_says_so(monitor, counter):
    with mock.patch.object(energy, "gathered", side_effect=AssertionError):
        monitor.lap()
        monitor.get_total()
    with mock.patch.object(energy, "gathered", side_effect=lambda value, *_: [value]) as asked:
        counter.run(3)
        assert monitor.lap_over_ranks().joules == 3
    assert asked.call_count == 1


def test_on_this_machine_it_is_a_number_or_a_reason():
    monitor = EnergyMonitor()
    monitor.setup()
    told = str(monitor.lap())
    assert told.startswith("unavailable: ") == (monitor.unavailable != "")
    assert told.startswith("unavailable: ") or told.endswith(" J")
    monitor.shutdown()
