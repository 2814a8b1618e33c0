"""Tells within seconds, by name and place, that a rank has stopped or was never there.

    main thread  --sets-->  Whereabouts.doing
    heart        --each BEAT_S-->  its beat to the board; the others' beats from there
    judge        --each BEAT_S-->  who has not been heard of for `limit_s`? the verdict ends all

                      board             who listens
    our launcher      a file a rank     the launcher to all ranks
    torchrun, ...     TCPStore          rank 0 to all the others, these to rank 0

A beat is a counter, so no clocks are compared. It comes from a thread: a long step, save or load
beats on. What does not beat is a process that is stopped, gone, or holds Python's lock.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from .boards import Beat, Board
from .remarks import say

BEAT_S = 1.0
# The main thread's own error says more than the verdict: it has this long to come.
VERDICT_GRACE_S = 3.0
# Beats that are missing in one's own rhythm: this process was stopped too, as by Ctrl-Z.
OWN_GAP_S = 5.0
STARTING = "starting"
ENDED = "ended"
EXIT_FAILURE = 1


@dataclass(slots=True)
class Whereabouts:
    """What this rank is doing, in words that go on "rank 1 has stopped": set on its way.

    `explanation` makes more words, once there is a model.
    """

    doing: str = STARTING
    explanation: Callable[[], object] | None = None

    def told(self, rank: int) -> str:
        """All that is known."""
        said = f"rank {rank} is {self.doing}"
        return said if self.explanation is None else f"{said}\n{self.explanation()}"


@dataclass(slots=True)
class Silence:
    """How long each rank has not been heard of.

    One that never was counts from `started_s`, by default from the first beat of any other, and has
    `start_limit_s`: ranks of many machines start at different times.
    """

    limit_s: float
    start_limit_s: float
    started_s: float | None = None
    beats: dict[int, Beat] = field(default_factory=dict)
    _heard_s: dict[int, float] = field(default_factory=dict)
    _looked_s: float | None = None

    def listen(self, beats: Mapping[int, Beat], now_s: float) -> None:
        """Take the beats that are on the board at `now_s`."""
        self._forgive_own_gap(now_s)
        for rank, beat in beats.items():
            if self.beats.get(rank) != beat:
                self.beats[rank] = beat
                self._heard_s[rank] = now_s
        if self.started_s is None and self._heard_s:
            self.started_s = now_s

    def since_s(self, rank: int, now_s: float) -> float:
        """For how long `rank` has not been heard of; 0 while nobody has been."""
        return now_s - self._heard_s.get(rank, now_s if self.started_s is None else self.started_s)

    def silent(self, ranks: Iterable[int], now_s: float) -> list[int]:
        """Those of `ranks` that were silent for too long, and did not say that they end.

        Once there is one, those that will be in a moment belong to it.
        """
        over_s = {
            rank: self.since_s(rank, now_s)
            - (self.limit_s if rank in self._heard_s else self.start_limit_s)
            for rank in ranks
            if self.place(rank) != ENDED
        }
        if max(over_s.values(), default=0.0) <= 0:
            return []
        return [rank for rank, beyond_s in over_s.items() if beyond_s > -1.5 * BEAT_S]

    def late(self, ranks: Iterable[int], now_s: float) -> list[int]:
        """Those of `ranks` that were silent for the limit, and may still be starting."""
        return [rank for rank in ranks if self.since_s(rank, now_s) > self.limit_s]

    def place(self, rank: int) -> str:
        """Where `rank` stood when it was last heard of."""
        beat = self.beats.get(rank)
        return STARTING if beat is None else beat.doing

    def verdict(self, ranks: Sequence[int], now_s: float) -> str:
        """The sentence that names `ranks` as stopped."""
        named = ", ".join(
            f"rank {rank} has not been heard of for {self.since_s(rank, now_s):.0f} s "
            f"({self.place(rank)})"
            for rank in ranks
        )
        return (
            f"{named}: stopped, gone or without Python's lock; look there, or pass a larger "
            "--heartbeat-limit-s"
        )

    def _forgive_own_gap(self, now_s: float) -> None:
        if self._looked_s is not None and (gap_s := now_s - self._looked_s) > OWN_GAP_S:
            self._heard_s = {rank: heard_s + gap_s for rank, heard_s in self._heard_s.items()}
            if self.started_s is not None:
                self.started_s += gap_s
        self._looked_s = now_s


class Heart:
    """The threads of one rank that beat, listen to `others` and end the process on a verdict.

    `open_board` may block or fail: what it waits for is another rank, which is then named.
    """

    def __init__(
        self,
        rank: int,
        whereabouts: Whereabouts,
        open_board: Callable[[], Board],
        others: Sequence[int],
        silence: Silence,
    ) -> None:
        self._rank = rank
        self._whereabouts = whereabouts
        self._open_board = open_board
        self._others = tuple(others)
        self._silence = silence
        self._board: Board | None = None
        self._news: Mapping[int, Beat] = {}
        self._verdict = ""
        self._since_s = time.monotonic()
        self._told: set[int] = set()
        self._ended = threading.Event()
        self._once = threading.Lock()
        self._heart = threading.Thread(target=self._beat, name="heart", daemon=True)

    def start(self) -> None:
        """Start both threads."""
        # Two: a store whose host is stopped answers nothing, and whoever asks it waits.
        self._heart.start()
        threading.Thread(target=self._judge, name="judge", daemon=True).start()

    def leave(self) -> None:
        """Say goodbye and listen no more: from here on other ranks may end, and well."""
        self._ended.set()
        # A thread that is inside the store would not survive the end of the interpreter.
        if self._heart.is_alive():
            self._heart.join(2 * BEAT_S)

    def give_up(self, reason: str) -> None:
        """Tell the others why this rank ends, which is about to do so in good order."""
        self._judge_by(f"rank {self._rank} failed {self._whereabouts.doing}: {reason}")
        self.leave()

    def end(self, text: str) -> NoReturn:
        """Tell `text` and end the process at once; the first to come, of all threads, is heard."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()
        say(text)
        self._judge_by(text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_FAILURE)

    @property
    def verdict(self) -> str:
        """Why all ranks end, where the board says so; empty elsewhere."""
        return self._verdict

    def whereabouts_of_others(self, world_size: int) -> str:
        """Where the ranks stand that have not failed, for the error of this one, which has; or
        that nobody can tell.
        """
        if self._board is None:
            return ""
        self._whereabouts.doing = f"failed {self._whereabouts.doing}"
        # Rank 0 stays longer: it may be the store's host.
        time.sleep((2 if self._rank else 3) * BEAT_S)
        try:
            found = self._board.beats(range(world_size))
        except _OUT_OF_REACH:
            return (
                f"nothing is known: {self._board.name} does not answer, so that machine, or what "
                "ran there, is gone"
            )
        standing = [
            f"rank {rank} was last heard of {beat.place()}"
            for rank, beat in found.items()
            if rank != self._rank and not beat.doing.startswith("failed")
        ]
        return "; ".join(standing)

    def _beat(self) -> None:
        count, doing = 0, self._whereabouts.doing
        while True:
            count += 1
            said = ENDED if self._ended.is_set() else self._whereabouts.doing
            if said != doing:
                doing, self._since_s = said, time.monotonic()
            with _out_of_reach():
                if self._board is None:
                    self._board = self._open_board()
                doing_s = int(time.monotonic() - self._since_s)
                self._board.post(self._rank, Beat(count, doing_s, doing))
                self._news = self._board.beats(self._others)
                self._verdict = self._board.verdict()
            if said == ENDED:
                return
            self._ended.wait(BEAT_S)

    def _judge(self) -> None:
        while not self._ended.wait(BEAT_S):
            now_s = time.monotonic()
            self._silence.listen(self._news, now_s)
            self._tell_of_late(now_s)
            silent = self._silence.silent(self._others, now_s)
            if not self._verdict and not silent:
                continue
            verdict, grace_s = self._verdict, VERDICT_GRACE_S
            if not verdict:
                verdict = self._silence.verdict(silent, now_s)
                say(verdict)
                self._judge_by(verdict)
                # Longer than those stay who read it: this may be the store's host.
                grace_s += 2 * BEAT_S
            if not self._ended.wait(grace_s):
                self.end(
                    f"rank {self._rank} failed {self._whereabouts.doing} (there for "
                    f"{time.monotonic() - self._since_s:.0f} s, at {_main_line()}, with no error "
                    f"of its own): {verdict}"
                )

    def _judge_by(self, verdict: str) -> None:
        """Leave the verdict on the board, if there is none and the board is within reach."""

        def post() -> None:
            with _out_of_reach():
                if self._board is not None:
                    self._board.judge(verdict)

        if not self._verdict:
            # The board may answer nothing, for the very reason that is told.
            poster = threading.Thread(target=post, name="verdict", daemon=True)
            poster.start()
            poster.join(BEAT_S)

    def _tell_of_late(self, now_s: float) -> None:
        if self._silence.start_limit_s <= self._silence.limit_s:
            return
        for rank in self._silence.late(self._others, now_s):
            if rank not in self._silence.beats and rank not in self._told:
                self._told.add(rank)
                say(
                    f"rank {self._rank} has not heard of rank {rank} for "
                    f"{self._silence.limit_s:g} s: it has not started, or was ended {STARTING}; "
                    f"waiting up to {self._silence.start_limit_s:g} s for it"
                )


_OUT_OF_REACH = (RuntimeError, OSError, KeyError, ValueError)
"""What a board raises that cannot be reached: to be silent is what is seen of it."""


def _out_of_reach() -> contextlib.suppress:
    return contextlib.suppress(*_OUT_OF_REACH)


def _main_line() -> str:
    """The line at which the main thread stands."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "its end" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
