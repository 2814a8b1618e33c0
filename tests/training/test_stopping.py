import os
import signal

import pytest
import torch

from sidestream.training import stopping as stopping_file
from sidestream.training.launch.ranks import Place
from sidestream.training.stopping import Stopping

LOSS = torch.tensor(2.5)


class LateClock:
    """Of a GPU that has done what somebody waited for."""

    def __init__(self):
        self.marks = 0
        self.waited_for = []

    def mark(self):
        self.marks += 1
        return self.marks

    def wait(self, mark):
        self.waited_for.append(mark)

    def on_host(self, value):
        return value


@pytest.fixture
def late_clock(monkeypatch):
    clock = LateClock()
    monkeypatch.setattr(stopping_file, "clock_of", lambda device: clock)
    return clock


def _steps(stopping, count):
    """Whether it was agreed after each of so many steps, in the second of which SIGTERM comes."""
    agreed = []
    for step in range(1, count + 1):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        assert torch.equal(stopping.mean_over_ranks(LOSS, "loss"), LOSS)
        agreed.append(stopping.is_agreed())
    return agreed


def test_on_a_cpu_the_run_stops_after_the_step_in_which_it_was_asked():
    stopping = Stopping(Place(), torch.device("cpu"), can_save=True)
    with stopping.listening():
        assert _steps(stopping, 3) == [False, True, True]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_on_a_gpu_it_stops_a_step_later_and_never_waits_for_the_last_one(late_clock):
    stopping = Stopping(Place(), torch.device("cuda"), can_save=True)
    with stopping.listening():
        assert _steps(stopping, 4) == [False, False, True, True]
    assert late_clock.waited_for == [1, 2, 3]


def test_after_a_save_it_is_asked_at_once(late_clock):
    stopping = Stopping(Place(), torch.device("cuda"), can_save=True)
    with stopping.listening():
        assert not stopping.is_agreed_now()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.is_agreed_now() and stopping.is_agreed()


def test_a_run_that_saves_nothing_leaves_the_signal_alone(late_clock):
    stopping = Stopping(Place(), torch.device("cuda"), can_save=False)
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        with stopping.listening():
            assert _steps(stopping, 4) == [False] * 4
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [True] and late_clock.marks == 0


@pytest.mark.parametrize("among_others", [False, True], ids=["alone", "among others"])
def test_a_second_request_is_anothers_unless_ranks_hear_it_from_two_sides(among_others):
    place = Place(0, 1, 0, 1, "env://") if among_others else Place()
    stopping = Stopping(place, torch.device("cpu"), can_save=True)
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        with stopping.listening():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopping.is_agreed_now()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ([] if among_others else [True])
