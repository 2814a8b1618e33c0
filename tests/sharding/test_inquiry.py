"""Ranks ask each other through a store: here those of one process, which look when told to."""

import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from sidestream.sharding import inquiry
from sidestream.sharding.accounts import (
    Account,
    AwaitedCollective,
    account_of,
    decoded,
    main_thread_place,
    seen_of,
    why_silent,
)
from sidestream.sharding.in_flight import REPORTS
from sidestream.sharding.inquiry import Inquiry

LIMIT_S = 25.0
"""A look each second, one rank that is busy included."""


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Ranks:
    """Those of one group, each with its own connection to a store: ranks 0, 10, 20 of the job."""

    def __init__(self, size: int, clock: Clock) -> None:
        self.store: dist.Store | None = dist.HashStore()
        self.clock = clock
        self.said = [0] * size
        self.all = [self._one(rank, size) for rank in range(size)]

    def _one(self, rank: int, size: int) -> Inquiry:
        def account() -> Account:
            self.said[rank] += 1
            waits = () if rank == 2 else (AwaitedCollective("a gather", 5, 15.0),)
            return account_of(10 * rank, "in a forward", waits, ["an event"])

        return Inquiry(
            lambda: self.store,
            rank,
            [10 * place for place in range(size)],
            account=account,
            moved_s=lambda: 0.0,
            limit_s=LIMIT_S,
        )

    def look(self, *ranks: int) -> None:
        self.clock.now_s += 1.01
        for rank in ranks or range(len(self.all)):
            self.all[rank].look()


@pytest.fixture
def clock() -> Any:
    clock = Clock()
    with (
        mock.patch.object(inquiry, "time", clock),
        mock.patch.object(REPORTS, "_latest", (0.0, "")),
    ):
        yield clock


def report() -> str:
    return REPORTS.latest()[1]


def test_nobody_says_anything_twice_unless_asked(clock: Clock) -> None:
    ranks = Ranks(3, clock)
    for _ in range(3):
        ranks.look()
    assert ranks.said == [1, 1, 1], "who it is, once"
    assert report() == ""


def test_all_answer_and_all_read_the_report(clock: Clock) -> None:
    ranks = Ranks(3, clock)
    ranks.look()
    for rank in (0, 1):
        ranks.all[rank].ask()
    for _ in range(3):
        ranks.look()
    assert all(one.wait(0) for one in ranks.all)
    assert ranks.said == [2, 2, 2], "one question, though two ranks wanted to know"
    assert report().startswith(
        "ranks 0, 10 have waited 15.0 s in a gather for rank 20, which stood in a forward (at "
    )
    for _ in range(3):
        ranks.look()
    assert ranks.said == [2, 2, 2]
    ranks.all[2].ask()
    assert not ranks.all[2].wait(0), "that report was of an older question"
    for _ in range(3):
        ranks.look()
    assert ranks.all[2].wait(0) and ranks.said == [3, 3, 3]


def test_a_report_from_before_it_was_wanted_is_no_answer(clock: Clock) -> None:
    ranks = Ranks(3, clock)
    ranks.look()
    ranks.all[0].ask()
    ranks.look()
    ranks.look(0)
    assert ranks.all[0].wait(0) and report()
    ranks.all[1].ask()
    ranks.look(1)
    assert not ranks.all[1].wait(0), "rank 1 has not read that report, but it is of before"
    for _ in range(3):
        ranks.look()
    assert ranks.all[1].wait(0) and ranks.said == [3, 3, 3]


def test_who_does_not_answer_is_named_once_patience_is_over(clock: Clock) -> None:
    ranks = Ranks(3, clock)
    ranks.look(0, 1)
    ranks.all[0].ask()
    for _ in range(4):
        ranks.look(0, 1)
        assert report() == ""
    ranks.look(0, 1)
    assert "for rank 20, which never answered, nor within 4.0 s: stopped" in report()


def test_the_next_one_asks_where_the_first_has_stopped_meanwhile(clock: Clock) -> None:
    ranks = Ranks(3, clock)
    ranks.look()
    for rank in (0, 1):
        ranks.all[rank].ask()
    ranks.look()
    for _ in range(12):
        ranks.look(1, 2)
    assert ranks.all[1].wait(0)
    # Its process is this one, which is not stopped.
    assert "for rank 0, which did not answer within 4.0 s: busy, stopped" in report()


def test_a_rank_that_goes_on_looks_less_often(clock: Clock) -> None:
    ranks = Ranks(1, clock)
    (one,) = ranks.all
    one.look()
    with (
        mock.patch.object(one, "_moved_s", lambda: clock.now_s),
        mock.patch.object(one, "_talk") as talk,
    ):
        clock.now_s += 0.9
        one.look()
        assert talk.call_count == 0
        clock.now_s += 0.2
        one.look()
        assert talk.call_count == 1
    long = Inquiry(lambda: None, 0, (0,), account=mock.Mock(), moved_s=lambda: 0.0, limit_s=600.0)
    assert (long.look_s, long._busy_s) == (1.0, 5.0)


def test_a_group_that_was_destroyed_is_not_asked(clock: Clock) -> None:
    ranks = Ranks(2, clock)
    ranks.look()
    ranks.store = None
    ranks.all[0].ask()
    for _ in range(9):
        ranks.look()
    assert not ranks.all[0].wait(0) and ranks.said == [1, 1]


def test_a_store_that_is_gone_is_told_as_such(clock: Clock) -> None:
    ranks = Ranks(2, clock)
    with (
        mock.patch.object(
            ranks, "store", mock.Mock(clone=mock.Mock(side_effect=RuntimeError("reset\nat")))
        ),
        pytest.raises(RuntimeError),
    ):
        ranks.look(0)
    assert ranks.all[0].obstacle() == (
        "the ranks' store is out of reach: its host, mostly rank 0, is gone, or its machine (reset)"
    )


def test_a_store_that_answers_nothing_is_told_by_who_does_not_wait_for_it(clock: Clock) -> None:
    ranks, may_go = Ranks(2, clock), threading.Event()
    ranks.look()
    one = ranks.all[0]
    with mock.patch.object(one, "_talk", lambda store: may_go.wait(10)):
        clock.now_s += 2.0
        thread = threading.Thread(target=one.look)
        thread.start()
        assert one.obstacle() == ""
        clock.now_s += 4.1
        assert one.obstacle().startswith("the ranks' store does not answer: its host, mostly rank")
        may_go.set()
        thread.join()
    assert one.obstacle() == ""


def test_an_account_comes_back_and_is_bounded() -> None:
    long, ranks = "x" * 10_000, tuple(range(0, 1024, 2))
    waits = [AwaitedCollective(long, 3, float(place), ranks, " from rank 2") for place in range(50)]
    account = account_of(5, long, waits, [long] * 50)
    assert decoded(account.encoded()) == account
    assert len(account.encoded()) < 16 * 1024
    assert [wait.lasting_s for wait in account.waits] == [49.0, 48.0, 47.0, 46.0]


def test_the_place_is_that_of_the_main_thread() -> None:
    places: list[str] = []
    thread = threading.Thread(target=lambda: places.append(main_thread_place()))
    thread.start()
    thread.join()
    waits_here = (
        r"/threading\.py:\d+ in \w+, called at sharding/test_inquiry\.py:\d+ in test_the_place"
    )
    assert re.search(waits_here, places[0]), "the standard library's own callers are left out"
    assert "sharding/test_inquiry.py" in main_thread_place()


def test_what_has_become_of_a_process_of_this_machine() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    own = account_of(1, "", [], [])
    account = Account(1, own.host, process.pid, "", "")
    try:
        assert why_silent(account, 1.0).startswith("did not answer within 1.0 s: busy")
        process.send_signal(19)
        deadline = time.monotonic() + 10
        while "is stopped, as by SIGSTOP" not in seen_of(account):
            assert time.monotonic() < deadline
    finally:
        process.kill()
    process.wait()
    assert seen_of(account) == f"has ended (process {process.pid} on {own.host.split()[0]})"
    elsewhere = Account(1, "another host", process.pid, "", "")
    assert why_silent(elsewhere, 1.0).startswith("did not answer within 1.0 s: busy")


def test_the_place_keeps_nothing_alive() -> None:
    class Held:
        pass

    def stands() -> weakref.ref[Held]:
        held = Held()
        main_thread_place()
        return weakref.ref(held)

    gc.disable()
    try:
        assert stands()() is None
    finally:
        gc.enable()
