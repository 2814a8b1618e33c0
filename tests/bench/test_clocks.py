"""The clocks: what is timed lies in no cache, candidates share a rotation, graphs hold it all."""

import contextlib
import itertools
import subprocess
import sys
import types

import pytest
import torch

from sidestream.bench import clocks


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(1, clocks.MAX_ROTATED), (500, 4), (1500, 2), (2000, 1), (9999, 1)],
)
def test_operands_are_many_enough_to_leave_the_cache(num_bytes, expected):
    assert clocks.num_rotated(num_bytes, cache_bytes=1000) == expected


def test_candidates_go_on_where_the_last_one_stopped():
    """Nobody finds what another one has just read, but where the rotation has gone round."""
    seen = []
    runs = {
        name: [lambda name=name, index=index: seen.append((name, index)) for index in range(3)]
        for name in "ab"
    }
    tickers = clocks.CpuClock(sample_s=0.0).tickers(runs)
    seen.clear()
    for name in "abba":
        tickers[name].sample()
    assert [name for name, _ in seen] == list("abba")
    places = [index for _, index in seen]
    assert places == [(places[0] + turn) % 3 for turn in range(4)]


def test_a_sample_is_the_mean_of_enough_calls(monkeypatch):
    now = [0.0]

    def run():
        now[0] += 0.25

    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])
    clock = clocks.CpuClock(sample_s=2.0)
    ticker = clock.tickers({"a": [run]})["a"]
    start = now[0]
    assert ticker.sample() == pytest.approx(0.25)
    assert now[0] - start == pytest.approx(2.0)
    assert ticker.method == "perf_counter"
    assert clocks.host_microseconds(run, clock, calls=50) == pytest.approx(0.25e6)


def test_the_cpu_s_largest_cache_is_found(tmp_path, monkeypatch):
    for index, size in enumerate(("32K", "512K", "8M")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(f"{size}\n")
    monkeypatch.setattr(clocks, "_CPU_CACHES", tmp_path)
    assert clocks.CpuClock().cache_bytes == 8 * 1024**2
    monkeypatch.setattr(clocks, "_CPU_CACHES", tmp_path / "nowhere")
    assert clocks.CpuClock().cache_bytes > 0


class FakeEvent:
    """An event of a device on which nothing takes time."""

    def __init__(self, **options):
        pass

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, end):
        return 1.0


@pytest.fixture
def cuda(monkeypatch):
    """The clock of a GPU that is none; the streams that are made current."""
    current = []
    properties = types.SimpleNamespace(L2_cache_size=1, total_memory=1)
    for name, function in {
        "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
        "Event": FakeEvent,
        "current_stream": lambda device: "the stream before",
        "get_device_properties": lambda device: properties,
        "graph": contextlib.nullcontext,
        "set_stream": current.append,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(clocks.CudaClock, "captures", True)
    return clocks.clock_of(torch.device("cuda")), current


def _refusing(error):
    """A call that a graph cannot hold: the third, after one to compile and two that are timed."""
    calls = itertools.count()

    def run():
        if next(calls) == 3:
            raise error("no")

    return run


def test_after_a_capture_that_was_refused_events_time_all(cuda):
    clock, current = cuda
    tickers = clock.tickers({"refuses": [_refusing(RuntimeError)], "next": [lambda: None]})
    assert [ticker.method for ticker in tickers.values()] == ["CUDA events"] * 2
    assert current == ["the stream before"]
    assert tickers["next"].sample() == pytest.approx(1e-3)


def test_a_full_device_is_no_refusal(cuda):
    clock, _ = cuda
    with pytest.raises(torch.OutOfMemoryError):
        clock.tickers({"full": [_refusing(torch.OutOfMemoryError)]})
    assert clock.tickers({"next": [lambda: None]})["next"].method == "CUDA graph"


@pytest.mark.gpu
def test_a_graph_holds_whole_rotations_and_events_time_the_rest():
    device = torch.device("cuda")
    clock = clocks.clock_of(device)
    targets = [torch.zeros(1 << 20, device=device) for _ in range(3)]
    runs = {"captured": [lambda one=one: one.add_(1.0) for one in targets]}
    runs["not to be"] = runs["captured"]
    tickers = clock.tickers(runs, uncaptured=["not to be"])
    assert tickers["not to be"].method == "CUDA events"
    assert tickers["captured"].method == "CUDA graph"
    before = [float(one[0]) for one in targets]
    seconds = tickers["captured"].sample()
    after = [float(one[0]) for one in targets]
    calls = {one - other for one, other in zip(after, before, strict=True)}
    assert len(calls) == 1
    assert calls.pop() >= 2
    assert 0.0 < seconds < 1e-3


REFUSED = """
import torch
from sidestream.bench import clocks
clock, one = clocks.clock_of(torch.device("cuda")), torch.zeros(1 << 20, device="cuda")
tickers = clock.tickers({"waits": [lambda: one.sum().item()], "next": [lambda: one.add_(1.0)]})
assert all(ticker.sample() > 0.0 for ticker in tickers.values())
print(*(ticker.method for ticker in tickers.values()), sep=", ")
"""


@pytest.mark.gpu
def test_what_refuses_to_be_captured_is_timed_by_events():
    """In a process of its own, which is of no use for graphs any more."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "CUDA events, CUDA events", done.stderr
