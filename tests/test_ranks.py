"""Tests of `run_on_ranks`: values, tracebacks, deaths and time limits come back to the caller."""

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from sidestream.tests.ranks import RanksFailed, run_on_ranks

pytestmark = pytest.mark.timeout(60)


@dataclass
class Reply:
    total: torch.Tensor
    threads: int
    fresh: torch.Tensor


def _reply(rank: int, world_size: int, addend: torch.Tensor) -> Reply:
    total = addend + rank
    dist.all_reduce(total)
    return Reply(total, torch.get_num_threads(), torch.empty(3))


def _setting(rank: int, world_size: int) -> tuple[int, bool, str | None]:
    return rank, dist.is_initialized(), os.environ.get("A_SETTING")


def _rank_one_raises(rank: int, world_size: int) -> str:
    if rank == 1:
        raise ValueError("rank one says no")
    return "fine"


def _rank_one_dies(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def _rank_one_exits(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)


def _stay_in_rank_one(rank: int, world_size: int, pid_path: str) -> str:
    if rank == 1:
        with open(pid_path, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    return "fine"


def test_values_come_back_in_rank_order() -> None:
    replies = run_on_ranks(_reply, 3, torch.tensor([1.0, 2.0]))
    for reply in replies:
        assert isinstance(reply, Reply)
        assert reply.threads == 1
        torch.testing.assert_close(reply.total, torch.tensor([6.0, 9.0]), rtol=0, atol=0)


def test_ranks_see_poisoned_memory() -> None:
    (reply,) = run_on_ranks(_reply, 1, torch.zeros(1))
    assert reply.fresh.isnan().all()


def test_environment_and_no_group() -> None:
    values = run_on_ranks(_setting, 2, backend=None, env={"A_SETTING": "on"})
    assert values == [(0, False, "on"), (1, False, "on")]
    assert "A_SETTING" not in os.environ


def test_traceback_of_the_failing_rank_comes_back() -> None:
    with pytest.raises(RanksFailed, match="rank one says no") as caught:
        run_on_ranks(_rank_one_raises, 2)
    assert caught.value.values == {0: "fine"}
    assert 'raise ValueError("rank one says no")' in caught.value.failures[1]
    assert "rank 1: Traceback" in str(caught.value)


def test_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RanksFailed, match="rank 1: was killed by SIGKILL") as caught:
        run_on_ranks(_rank_one_dies, 2)
    assert list(caught.value.failures) == [1]


def test_silent_exit_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="rank 1: exited with code 3"):
        run_on_ranks(_rank_one_exits, 2)


def test_time_limit_kills_and_shows_where_the_rank_stood(tmp_path) -> None:
    pid_path = tmp_path / "pid"
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1: still running after 5 s") as caught:
        run_on_ranks(_stay_in_rank_one, 2, str(pid_path), timeout_s=5)
    assert time.monotonic() - started < 20
    assert "_stay_in_rank_one" in caught.value.failures[1]
    assert caught.value.values == {0: "fine"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_path.read_text()), 0)


@pytest.mark.parametrize(
    "function", [lambda rank, world_size: None, "abc".join], ids=["lambda", "method"]
)
def test_what_cannot_travel_is_refused(function) -> None:
    with pytest.raises(TypeError, match="top level of its module"):
        run_on_ranks(function, 1)
