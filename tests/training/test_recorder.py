"""The recorder never makes the host wait for the device inside a step."""

import contextlib
import math
import random
import statistics
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from sidestream.tests.sharding.fake_streams import Late
from sidestream.tests.training.measures.fake_clocks import FakeHost
from sidestream.training import engines, recorder
from sidestream.training.launch.ranks import Place
from sidestream.training.measured import measuring
from sidestream.training.measures import HostClock, StreamClock
from sidestream.training.options import TrainOptions
from sidestream.training.plan import plan_run
from sidestream.training.recorder import Figures, Recorder
from sidestream.training.run import build_run
from sidestream.training.steps import train_step

CPU = torch.device("cpu")


class Shown:
    """A reporter that keeps what it is told."""

    def __init__(self):
        self.steps = []

    def step(self, step, loss, tokens_per_s, peak_mib):
        self.steps.append((step, loss, tokens_per_s))

    def note(self, text):
        raise AssertionError("no remark is due")


class Event:
    """In place of `torch.cuda.Event`, on a fake machine; the device takes a second an operator."""

    def __init__(self, machine, enable_timing):
        assert enable_timing
        self._machine = machine

    def record(self):
        self._count = len(self._machine.current.queue)

    def query(self):
        return self._machine.current.num_run >= self._count

    def synchronize(self):
        self._machine.host_waits += 1
        self._machine.run_until(self._count)

    def elapsed_time(self, later):
        assert self.query() and later.query(), "an event that has not come has no time"
        return 1000.0 * (later._count - self._count)


class Device(Late):
    """A GPU that does nothing until it is told to, and counts what makes the host wait for it."""

    def __init__(self):
        super().__init__(side_first=False)
        self.host_waits = 0
        self.on_host = {}

    def synchronize(self):
        if self.current.num_run < len(self.current.queue):
            self.host_waits += 1
        super().synchronize()

    def run_until(self, count):
        with _disable_current_modes(), torch._C._AutoDispatchBelowADInplaceOrView():
            self._run(self.current, count)


@contextlib.contextmanager
def recording_on(device, clock=StreamClock):
    """Recorders made inside think that `device` is a GPU."""
    original = StreamClock.on_host

    def on_host(self, value):
        copy = original(self, value)
        device.on_host[copy.data_ptr()] = copy
        return copy

    def read(values):
        # No operator, so the device does not see it.
        if values.data_ptr() not in device.on_host:
            device.synchronize()
        return tolist(values)

    tolist = torch.Tensor.tolist
    with (
        mock.patch.object(torch.Tensor, "tolist", read),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        device.installed(),
        mock.patch.object(torch.cuda, "Event", lambda enable_timing: Event(device, enable_timing)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(StreamClock, "on_host", on_host),
        mock.patch.object(recorder, "clock_of", lambda _: clock()),
        device,
    ):
        yield


def sgd(parameters, lr, weight_decay):
    """AdamW's counters of steps are on the host, which this machine cannot tell from a GPU's."""
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=weight_decay)


def record(device, steps, run=lambda step: None):
    """Steps of three operators whose losses are their numbers; `run` is called after each."""
    reporter = Shown()
    kept = Recorder(reporter, CPU)
    for step in range(1, steps + 1):
        kept.finish_step(step, 6, Figures(("loss",), torch.ones(1).mul(2).mul(step / 2)))
        run(step)
    return kept, reporter


def test_no_host_read_while_work_is_queued():
    device = Device()
    with recording_on(device):
        kept, reporter = record(device, 4)
        assert device.host_waits == 0
        assert reporter.steps == []
        kept.flush()
        assert device.host_waits > 0
    assert [(step, loss) for step, loss, _ in reporter.steps] == [
        (n, float(n)) for n in range(1, 5)
    ]
    assert (kept.loss_first, kept.loss_last) == (1.0, 4.0)


def test_steps_that_the_device_has_done_are_shown():
    device = Device()
    with recording_on(device):
        # It does a step of three operators once it has been given the second after that.
        kept, reporter = record(device, 5, lambda step: device.run_until(3 * (step - 2)))
        assert [step for step, _, _ in reporter.steps] == [1, 2]
        assert device.host_waits == 0
        kept.flush()
    assert [step for step, _, _ in reporter.steps] == [1, 2, 3, 4, 5]


def test_times_are_the_devices():
    device = Device()
    with recording_on(device):
        kept, reporter = record(device, 1)
        for _ in range(100):
            torch.ones(9).mul(3)
        kept.restart_clock()
        kept.finish_step(2, 6, Figures(("loss",), torch.ones(1)))
        kept.flush()
    # Operators of a second each: three and one; those before the clock was restarted are left out.
    assert kept.step_ms_median == 2000.0
    assert [speed for _, _, speed in reporter.steps] == [2.0, 4.0]


def test_no_host_read_in_a_whole_step_of_training(text_file):
    sizes = {"model": "tiny", "seq_len": 16, "batch": 4, "accumulate": 2}
    options = TrainOptions(data=text_file, zero=2, steps=3, nonfinite_grads="keep", **sizes)
    plan = plan_run(options, 1)
    device = Device()
    with (
        recording_on(device),
        mock.patch.object(engines, "build_optimizer", sgd),
        contextlib.ExitStack() as opened,
    ):
        run = build_run(plan, Place(), CPU, opened.enter_context(measuring(plan, Place(), CPU)))
        device.host_waits = 0
        kept = Recorder(Shown(), CPU)
        for step in (1, 2, 3):
            train_step(run, step, kept)
        assert device.host_waits == 0
        kept.flush()
    assert math.isfinite(kept.loss_last)


def test_a_loss_that_is_read_at_once_is_seen():
    device = Device()
    with recording_on(device, clock=HostClock):
        record(device, 2)
    assert device.host_waits == 1


def test_on_a_cpu_each_step_is_shown_with_the_next():
    kept, reporter = record(None, 3)
    assert [(step, loss) for step, loss, _ in reporter.steps] == [(1, 1.0), (2, 2.0)]
    kept.flush()
    assert kept.loss_last == 3.0
    assert kept.tokens_per_s > 0
    kept.flush()
    assert len(reporter.steps) == 3


def test_medians_are_those_of_all_steps_whatever_their_sizes():
    host, draw = FakeHost(), random.Random(0)
    with mock.patch.object(recorder, "clock_of", lambda _: host):
        kept = Recorder(Shown(), CPU)
    seconds, speeds = [], []
    for step in range(1, 8):
        tokens = draw.choice([8, 64])
        seconds.append(draw.uniform(1, 2))
        speeds.append(tokens / seconds[-1])
        host.run(seconds[-1])
        kept.finish_step(step, tokens, Figures(("loss",), torch.ones(1)))
        kept.flush()
        assert kept.step_ms_median == pytest.approx(1000 * statistics.median(seconds))
        assert kept.tokens_per_s == pytest.approx(statistics.median(speeds))


def test_nothing_is_known_before_the_first_step():
    kept = Recorder(Shown(), CPU)
    kept.flush()
    assert kept.loss_first is None
    assert math.isnan(kept.loss_last)
