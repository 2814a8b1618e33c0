"""Ranks tell each other their times in one call, and what one refuses all refuse."""

from unittest import mock

import pytest
import torch.distributed as dist

from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.tests.training.measures.fake_clocks import FakeHost
from sidestream.training.measures import Timers


def _gathers(rank, world_size):
    host = FakeHost()
    timers = Timers(0, "all", device="cpu", host_clock=host)
    for _ in range(8):
        with timers.region("step"):
            host.run(1 if rank != 1 else 1.5)
            with timers.region("first" if rank == 0 else "other"):
                host.run(0.25)
    with mock.patch.object(dist, "all_gather_object", side_effect=dist.all_gather_object) as sent:
        timings = timers.gather(reset=False)
        text = timers.report()
    assert sent.call_count == 2
    assert timers.read().names == (), "a report begins anew"
    return timings.names, timings.spread("step/other").by_rank_s, text


def test_ranks_tell_each_other_once_and_may_differ():
    (names, other, text), *rest = run_on_ranks(_gathers, 3)
    assert names == ("step", "step/first", "step/other")
    assert other == {1: 2.0, 2: 2.0}
    assert text.splitlines() == [
        "step: rank 0 10000.000 ms, rank 1 14000.000 ms, rank 2 10000.000 ms",
        "step/first: rank 0 2000.000 ms",
        "step/other: rank 1 2000.000 ms, rank 2 2000.000 ms",
        "straggler: rank 1 in step, 1750.000 ms a time, 500.000 ms (40%) beyond the others, "
        "without noise",
    ]
    assert rest == [(names, other, text)] * 2


def _refuses(rank, world_size):
    timers = Timers(device="cpu")
    timers("a", 0).start()
    if rank == 0:
        timers("a").stop()
    texts = []
    for names in (None, ["b"]):
        try:
            timers.gather(names=names)
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    timers("a").elapsed()
    return texts


def test_what_one_rank_refuses_all_refuse():
    first, second = run_on_ranks(_refuses, 2)
    assert first == second
    assert "rank 1: timer 'a': expected timers that are stopped" in first[0]
    assert "expected timers that there are, such as a, got b" in first[1]


def _gone(rank, world_size):
    if rank == 0:
        Timers(device="cpu").gather()


def test_a_rank_that_is_gone_is_named():
    with pytest.raises(RanksFailed, match="gathering of the timers failed"):
        run_on_ranks(_gone, 2)
