"""Ranks of one process group ask each other where they stand, through the group's store: nobody has
to call anything for it, and no collective is used, since one that hangs is why they ask.

    a rank that suspects    asks: counts the questions on
    every rank's thread     looks at the count now and then, and answers with its `Account`
    the one that asked      reads the answers, writes a report of who waits for whom
    whoever waits too       reads the report

                  key           content
    questions     asked         how many so far
    answers       rank RANK     number of the question, account
    reports       report        number of the question, text

The store is reached by a connection of its own, opened at the first look: that of the group is
taken while a rank waits in it. A rank that goes on looks rarely, one that stands still more often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from .accounts import Account, decoded, seen_of, why_silent
from .hang_report import Answer, Silent, hang_report
from .in_flight import REPORTS
from .store_thread import STORE_THREAD

_LOOKS_PER_LIMIT = 25
_LEAST_S, _STILL_S, _BUSY_S = 0.02, 1.0, 5.0
_STILL_AFTER_S, _STILL_SHARE = 2.0, 0.1
_PATIENCE_LOOKS = 4
_ASKED, _REPORT = "asked", "report"


def between_looks_s(limit_s: float, most_s: float) -> float:
    """How long to wait from one look to the next where a group's time limit is `limit_s`."""
    return min(max(limit_s / _LOOKS_PER_LIMIT, _LEAST_S), most_s)


class Inquiry:
    """Of one rank among those of a group. `look` is called by the thread of `STORE_THREAD`.

    store: that of the group; None once the group was destroyed.
    rank: in the group. ranks: global, of all. account: what this rank says of itself.
    moved_s: when a model of the group did something last. limit_s: the group's time limit.
    """

    def __init__(
        self,
        store: Callable[[], dist.Store | None],
        rank: int,
        ranks: Sequence[int],
        *,
        account: Callable[[], Account],
        moved_s: Callable[[], float],
        limit_s: float,
    ) -> None:
        self.look_s = between_looks_s(limit_s, _STILL_S)
        self._busy_s = between_looks_s(limit_s, _BUSY_S)
        self._still_after_s = min(_STILL_AFTER_S, _STILL_SHARE * limit_s)
        self._patience_s = _PATIENCE_LOOKS * self._busy_s
        self._store_of_group, self._rank, self._ranks = store, rank, tuple(ranks)
        self._account, self._moved_s = account, moved_s
        self._store: dist.Store | None = None
        self._is_wanted = threading.Event()
        self._was_looked_since_wanted = False
        self._has_report = threading.Event()
        # What the thread knows.
        self._looked_s = self._wanted_s = self._heard_s = self._asked_s = 0.0
        self._ends_s = self._patience_s
        self._heard = self._own = self._reported = 0
        self._lost = ""
        self._in_store_since_s: float | None = None

    def ask(self, patience_s: float | None = None) -> None:
        """Have the ranks asked where they stand, unless somebody does so now. Waits for nothing.
        patience_s: how long they have to answer, by default some of their looks.
        """
        self._ends_s = self._patience_s if patience_s is None else patience_s
        if not self._is_wanted.is_set():
            self._wanted_s = time.monotonic()
            self._has_report.clear()
            self._was_looked_since_wanted = False
            self._is_wanted.set()
            STORE_THREAD.wake()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the report that was asked for, at most so long; whether it has come."""
        return self._has_report.wait(timeout_s)

    def obstacle(self) -> str:
        """Why no answer comes, if the store is why; empty if not."""
        since_s = self._in_store_since_s
        if self._lost:
            return (
                "the ranks' store is out of reach: its host, mostly rank 0, is gone, or its "
                f"machine ({self._lost})"
            )
        if since_s is not None and time.monotonic() - since_s > self._patience_s:
            return "the ranks' store does not answer: its host, mostly rank 0, is stopped or gone"
        return ""

    # ---- in the thread

    def look(self) -> None:
        """Answer a question, if there is one; ask one, if that is wanted.

        Raises:
            RuntimeError: the store is gone.
        """
        now_s = time.monotonic()
        stands_still = now_s - self._moved_s() > self._still_after_s
        pause_s = self.look_s if stands_still else self._busy_s
        if not self._is_wanted.is_set() and now_s - self._looked_s < pause_s:
            return
        self._looked_s = self._in_store_since_s = now_s
        try:
            if (store := self._connected()) is not None:
                self._talk(store)
        except RuntimeError as error:
            self._lost = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise
        finally:
            self._in_store_since_s = None

    def _connected(self) -> dist.Store | None:
        store = self._store_of_group()
        if store is None:
            return None
        if self._store is None:
            own = dist.PrefixStore("sidestream_inquiry", store.clone())  # type: ignore[attr-defined]
            self._say(own, 0)  # where to look for this process, should it stop
            self._store = own
        return self._store

    def _talk(self, store: dist.Store) -> None:
        now_s = time.monotonic()
        asked = int(store.get(_ASKED)) if store.check([_ASKED]) else 0
        if asked > self._heard:
            self._heard, self._heard_s = asked, now_s
            self._say(store, asked)
        if asked > self._reported:
            self._take_report(store)
        if self._own:
            self._collect(store, now_s)
        elif self._is_wanted.is_set():
            self._was_looked_since_wanted = True
            # One who asks is enough, unless it stops meanwhile.
            under_way = self._heard > self._reported
            if not under_way or now_s - self._heard_s > self._patience_s + 2 * self.look_s:
                self._own = self._heard = store.add(_ASKED, 1)
                self._heard_s = self._asked_s = now_s
                self._say(store, self._own)

    def _say(self, store: dist.Store, number: int) -> None:
        store.set(f"rank {self._rank}", f"{number} {self._account().encoded()}")

    def _take_report(self, store: dist.Store) -> None:
        if store.check([_REPORT]):
            number, _, text = store.get(_REPORT).decode(errors="replace").partition(" ")
            if int(number) > self._reported:
                self._keep(int(number), text)

    def _keep(self, number: int, text: str) -> None:
        self._reported = number
        if self._is_wanted.is_set() and not self._was_looked_since_wanted:
            # It was there at the first look after this rank wanted one, so it tells of before.
            REPORTS.keep(self._heard_s, text)
            return
        REPORTS.keep(max(self._heard_s, self._wanted_s), text)
        self._is_wanted.clear()
        self._has_report.set()

    def _collect(self, store: dist.Store, now_s: float) -> None:
        """Report once all have answered, or do not."""
        said = [_said(store, place) for place in range(len(self._ranks))]
        waited_s = now_s - self._asked_s
        may_come = any(
            number < self._own and (account is None or not seen_of(account))
            for number, account in said
        )
        if may_come and waited_s < self._ends_s:
            return
        answers: dict[int, Answer] = {
            rank: account
            if account is not None and number >= self._own
            else Silent(rank, why_silent(account, waited_s))
            for rank, (number, account) in zip(self._ranks, said, strict=True)
        }
        text, number, self._own = hang_report(answers), self._own, 0
        store.set(_REPORT, f"{number} {text}")
        self._keep(number, text)


def _said(store: dist.Store, place: int) -> tuple[int, Account | None]:
    key = f"rank {place}"
    if not store.check([key]):
        return -1, None
    number, _, text = store.get(key).decode(errors="replace").partition(" ")
    return int(number), decoded(text)
