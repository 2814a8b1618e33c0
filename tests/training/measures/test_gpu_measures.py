"""On a GPU: its own time, without a wait, and its own joules."""

import json

import pytest
import torch

from sidestream.training.measures import EnergyMonitor, Timers

pytestmark = pytest.mark.gpu
CYCLES = 50_000_000  # tens of milliseconds


def test_a_region_has_the_gpus_time_and_waits_for_nothing():
    timers = Timers(device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    with timers.region("step"), timers.region("sleep"):
        torch.cuda._sleep(CYCLES)
    last.record()
    assert json.loads(timers.to_json()) == {}, "the GPU is not that fast"
    torch.cuda.synchronize()
    reading = timers.read(["step/sleep"]).of("step/sleep")[0]
    assert reading.host_s < reading.elapsed_s
    assert reading.elapsed_s <= timers("step").elapsed() <= first.elapsed_time(last) / 1e3


def test_a_captured_region_is_replayed_without_events():
    timers = Timers(device="cuda")
    values = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(40):
            with timers.region("add"):
                values += 1
    values.zero_()
    with timers.region("replay"):
        graph.replay()
    assert timers("replay").elapsed() > 0
    assert timers.read().names == ()
    assert values.tolist() == [40.0] * 8


def test_work_costs_joules():
    monitor = EnergyMonitor("cuda")
    monitor.setup()
    if monitor.unavailable:
        pytest.skip(monitor.unavailable)
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(100):
        matrix @ matrix
        torch.cuda.synchronize()
    used = monitor.lap()
    monitor.shutdown()
    assert used.joules is not None and used.joules > 0
    assert used.counter.startswith("GPU-")
