"""Starts the ranks of a run as processes of this machine, forwards what rank 0 says, and ends all
when one fails.

    launcher --stdin pipe--> rank 0   writes to the launcher's own output
             --stdin pipe--> rank 1   writes to a file, whose end is shown if a rank fails

One rank fails, or is not heard of any more: the others are told by the board and have `GRACE_S` to
say what they were waiting for, then they are ended, each by its own pid. The launcher is told to
end: all ranks are ended; ranks that can stop after a step are first told so by one SIGTERM, if that
is what came, and they end themselves. The launcher dies: every rank reads the end of its pipe and
ends itself.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .boards import FolderBoard
from .exit_codes import AGREED, RESUME_TO_DISAMBIGUATE
from .heartbeat import BEAT_S, STARTING, Silence
from .interruption import ENDING_SIGNALS, NotedSignals, noting_signals
from .launch_folder import launch_folder
from .processes import Process, describe_exit, end, exit_code, start, tail_of, watch
from .ranks import INIT_METHOD_VARIABLE
from .remarks import say

GRACE_S = 12.0
TERMINATE_S = 3.0
SHOWN_LINES, SHOWN_BYTES = 25, 64 * 1024
SHOW_CURSOR = "\x1b[?25h"
# The folder of the launcher, where its ranks find the board.
LAUNCHED_VARIABLE = "SIDESTREAM_LAUNCHED"
ASKED_TO_END = frozenset(-number for number in ENDING_SIGNALS)


@dataclass(slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None

    def tail(self) -> str:
        if self.log is None:
            return ""
        lines = tail_of(self.log, SHOWN_BYTES).splitlines()
        return "\n".join(f"  rank {self.rank} | {line}" for line in lines[-SHOWN_LINES:])


def launch(
    command: Sequence[str],
    num_ranks: int,
    *,
    grace_s: float = GRACE_S,
    silence: Silence | None = None,
    can_stop: bool = False,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `command` as `num_ranks` ranks, with `environment` beside the caller's, and return the
    exit code: that of the first rank that failed, or what the ranks have agreed on, 0 mostly.

    A rank ended by signal s counts as 128 + s. With `silence`, ranks have to beat on the board of
    the folder, and one that does not for too long has failed. `can_stop`: ranks take SIGTERM as a
    request to stop after their step, so the first one is passed on to them, and they are never
    ended by it; asking for other hardware then, they have stopped as asked, with 0.

    Raises:
        Interrupted: SIGINT or SIGTERM; every rank has been ended.
    """
    terminate_s = 0.0 if can_stop else TERMINATE_S
    with noting_signals() as signals, launch_folder() as folder:
        ranks: list[_Rank] = []
        environ = {**os.environ, **(environment or {})}
        try:
            for index in range(num_ranks):
                place = rank_environment(environ, index, num_ranks, folder)
                ranks.append(_start(command, index, place, folder))
                signals.raise_noted()
            board = FolderBoard(folder)
            return _Watch(ranks, board, silence, signals, terminate_s, can_stop).run(grace_s)
        finally:
            end(_processes(ranks), terminate_s=terminate_s)
            for rank in ranks:
                if rank.process.stdin is not None:
                    rank.process.stdin.close()
            if sys.stdout.isatty() and any(rank.process.returncode for rank in ranks):
                # A rank that was ended under its progress bar left the cursor hidden, on its line.
                print(SHOW_CURSOR, flush=True)


def rank_environment(
    environ: Mapping[str, str], rank: int, num_ranks: int, folder: Path
) -> dict[str, str]:
    """Return the environment of one rank: its place, the meeting point, loopback and a fair share
    of the cores.

    What the caller's environment says about threads and interfaces stays.
    """
    result = dict(environ)
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
    }
    result.update({name: str(value) for name, value in place.items()})
    result[INIT_METHOD_VARIABLE] = (folder / "rendezvous").as_uri()
    result[LAUNCHED_VARIABLE] = str(folder)
    result.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    if sys.platform == "linux":
        result.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return result


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start(
    command: Sequence[str], rank: int, environment: Mapping[str, str], folder: Path
) -> _Rank:
    log = folder / f"rank-{rank}.log" if rank else None
    process = start(command, log=log, stdin=subprocess.PIPE, environment=environment)
    return _Rank(rank, process, log)


@dataclass(slots=True)
class _Watch:
    """Waits for ranks to end; after the first failure for a while more, then ends the rest."""

    ranks: Sequence[_Rank]
    board: FolderBoard
    silence: Silence | None
    signals: NotedSignals
    terminate_s: float
    can_stop: bool
    was_told_to_stop: bool = False

    def run(self, grace_s: float) -> int:
        """Return the exit code of all."""
        failed = self._wait_for_failure()
        if not failed:
            code = max(rank.process.returncode for rank in self.ranks)
            return 0 if self.was_told_to_stop and code == RESUME_TO_DISAMBIGUATE else code
        first, self.can_stop = failed[0], False
        verdict = self._verdict(failed)
        say(verdict)
        with contextlib.suppress(OSError):  # a full disk: then they hear nothing, and are ended
            self.board.judge(verdict)
        if first.process.poll() in ASKED_TO_END:
            grace_s = 0.0
        running = self._wait_for_others(failed, grace_s)
        places = {rank.rank: self._place(rank) for rank in running}
        for rank in failed:
            rank.process.kill()  # stopped: it would not hear SIGTERM
        end(_processes([*failed, *running]), terminate_s=self.terminate_s)
        for rank in self.ranks:
            code, tail = rank.process.returncode, rank.tail()
            if rank in running and grace_s:
                place = places[rank.rank]
                say(
                    f"rank {rank.rank} was still running{place} {grace_s:g} s later, so it was "
                    "ended"
                )
            elif rank in running:
                continue
            elif code and rank not in failed:
                say(f"rank {rank.rank} {describe_exit(code)}")
            if code and tail:
                say(f"the last lines of rank {rank.rank}:\n{tail}")
        code = first.process.returncode
        return code if code > 0 else 128 - code

    def _wait_for_failure(self) -> list[_Rank]:
        """The first rank that fails, or those that were silent for too long; none once all have
        ended well.
        """
        next_beat_s = time.monotonic()
        for left in watch(_processes(self.ranks)):
            self._heed_signals()
            # All ranks end with a code that they agree on, one after the other.
            failed = [rank for rank in self.ranks if exit_code(rank.process) not in (None, *AGREED)]
            if failed:
                # A signal before an exit code: who was killed is the cause, who raised follows.
                return [min(failed, key=lambda rank: rank.process.returncode > 0)]
            if left and time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + BEAT_S
                if silent := self._silent(_running(self.ranks)):
                    return silent
        return []

    def _wait_for_others(self, failed: Sequence[_Rank], grace_s: float) -> list[_Rank]:
        """Wait for all but `failed`, and return those that still run after `grace_s`."""
        others = [rank for rank in self.ranks if rank not in failed]
        if grace_s and (running := _running(others)):
            say(f"waiting up to {grace_s:g} s for {_names(running)} to end with an error")
            for _ in watch(_processes(running), grace_s):
                self._heed_signals()
        return _running(others)

    def _heed_signals(self) -> None:
        """Pass the first SIGTERM on to ranks that can stop, and SIGUSR1 to rank 0.

        Raises:
            Interrupted: SIGINT, or SIGTERM where they cannot, or once more.
        """
        if self.can_stop and self.signals.take_first(signal.SIGTERM):
            self.can_stop, self.was_told_to_stop = False, True
            running = _running(self.ranks)
            say(
                f"SIGTERM: {_names(running)} to end after a step and its checkpoint; SIGINT, or "
                "SIGTERM again, ends all at once"
            )
            for rank in running:
                rank.process.terminate()
        if self.signals.take_question():
            # The one that is heard, and it asks the others.
            self.ranks[0].process.send_signal(signal.SIGUSR1)
        self.signals.raise_noted()

    def _silent(self, running: Sequence[_Rank]) -> list[_Rank]:
        if self.silence is None:
            return []
        now_s = time.monotonic()
        # All ranks: they started together, so the first beat of any starts the clock of each.
        self.silence.listen(self.board.beats(rank.rank for rank in self.ranks), now_s)
        silent = self.silence.silent([rank.rank for rank in running], now_s)
        return [rank for rank in running if rank.rank in silent]

    def _verdict(self, failed: Sequence[_Rank]) -> str:
        first = failed[0]
        code = first.process.poll()
        if code is None and self.silence is not None:
            return self.silence.verdict([rank.rank for rank in failed], time.monotonic())
        return f"rank {first.rank} {describe_exit(code or 0)}{self._place(first)}"

    def _place(self, rank: _Rank) -> str:
        """Where `rank` was last heard of, for the end of a phrase."""
        if self.silence is None:
            return ""
        beat = self.board.beats([rank.rank]).get(rank.rank)
        return f" ({STARTING})" if beat is None else f" ({beat.place()})"


def _running(ranks: Sequence[_Rank]) -> list[_Rank]:
    return [rank for rank in ranks if exit_code(rank.process) is None]


def _processes(ranks: Sequence[_Rank]) -> list[Process]:
    return [rank.process for rank in ranks]


def _names(ranks: Sequence[_Rank]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank.rank) for rank in ranks)
