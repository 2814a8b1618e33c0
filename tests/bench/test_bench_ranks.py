"""Tests of the benches' rank processes: results in rank order, failures with their traceback."""

import multiprocessing
import subprocess
import sys
import threading

import pytest

from sidestream.bench.ranks import read_loopback_bytes, run_ranks
from sidestream.tests.bench import rank_work

pytestmark = pytest.mark.timeout(200)


def test_results_come_in_rank_order_and_ranks_share_a_group():
    assert run_ranks(rank_work.add_up, 2, 10) == [(0, 21.0, 1), (1, 21.0, 1)]


@pytest.mark.parametrize(
    ("work", "argument", "message"),
    [
        pytest.param(rank_work.fail_last, "lost key", "rank 1 failed:\n.*lost key", id="raises"),
        pytest.param(rank_work.die_last, 3, "rank 1 failed:\nexited with code 3", id="dies"),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_others(work, argument, message):
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        run_ranks(work, 2, argument)
    assert not multiprocessing.active_children()


def test_a_rank_that_does_not_end_runs_into_the_limit():
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] gave no result within 3 s"):
        run_ranks(rank_work.sleep_last, 2, 600.0, timeout_s=3.0)
    assert not multiprocessing.active_children()


def test_another_thread_can_end_them():
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(RuntimeError, match="ended before they gave a result"):
        run_ranks(rank_work.sleep_last, 2, 600.0, stop=stop)
    assert not multiprocessing.active_children()


def test_ranks_end_with_a_killed_parent():
    code = (
        "from sidestream.bench.ranks import run_ranks\n"
        "from sidestream.tests.bench.rank_work import speak_and_sleep\n"
        "if __name__ == '__main__': run_ranks(speak_and_sleep, 2, 600.0)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert {parent.stdout.readline(), parent.stdout.readline()} == {"rank 0\n", "rank 1\n"}
    finally:
        parent.kill()
    # The ranks have the other end of the pipe too: it ends when they do.
    assert parent.communicate(timeout=30.0)[0] == ""


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_ranks(rank_work.add_up, 0, 1)


def test_loopback_bytes_only_grow():
    before = read_loopback_bytes()
    after = read_loopback_bytes()
    assert (before is None and after is None) or before <= after
