"""Starts the ranks of a run as processes of this machine, forwards what rank 0 says, and ends all
when one fails.

    launcher --stdin pipe--> rank 0   writes to the launcher's own output
             --stdin pipe--> rank 1   writes to a file, whose end is shown if a rank fails

One rank fails: the others have `GRACE_S` to say what they were waiting for, then they are ended,
each by its own pid. The launcher dies: every rank reads the end of its pipe and ends itself.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from .ranks import INIT_METHOD_VARIABLE

GRACE_S = 12.0
TERMINATE_S = 3.0
POLL_S = 0.05
SHOWN_LINES = 25
LAUNCHED_VARIABLE = "SIDESTREAM_LAUNCHED"


@dataclass(slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None

    def tail(self) -> str:
        if self.log is None:
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  rank {self.rank} | {line}" for line in lines[-SHOWN_LINES:])


def launch(command: Sequence[str], num_ranks: int, *, grace_s: float = GRACE_S) -> int:
    """Run `command` as `num_ranks` ranks and return the exit code: 0, or that of the first rank
    that failed.

    A rank ended by signal s counts as 128 + s. KeyboardInterrupt (SIGINT, SIGTERM) ends every
    rank, then goes on.
    """
    folder = Path(tempfile.mkdtemp(prefix="sidestream-ranks-"))
    ranks: list[_Rank] = []
    try:
        with _terminate_as_interrupt():
            for index in range(num_ranks):
                ranks.append(_start(command, index, num_ranks, folder))
            return _watch(ranks, grace_s)
    finally:
        _end(_running(ranks))
        for rank in ranks:
            if rank.process.stdin is not None:
                rank.process.stdin.close()
        shutil.rmtree(folder, ignore_errors=True)


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
    result[LAUNCHED_VARIABLE] = "1"
    result.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    if sys.platform == "linux":
        result.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return result


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_exit(code: int) -> str:
    """Say how a process with this `Popen.returncode` ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _start(command: Sequence[str], rank: int, num_ranks: int, folder: Path) -> _Rank:
    environment = rank_environment(os.environ, rank, num_ranks, folder)
    if rank == 0:
        return _Rank(rank, subprocess.Popen(command, env=environment, stdin=subprocess.PIPE), None)
    log = folder / f"rank-{rank}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT
        )
    return _Rank(rank, process, log)


def _watch(ranks: Sequence[_Rank], grace_s: float) -> int:
    """Wait for all ranks; after the first failure for at most `grace_s` more, then end the rest."""
    first = _wait_for_failure(ranks)
    if first is None:
        return 0
    _say(f"rank {first.rank} {describe_exit(first.process.returncode)}")
    running = _running(ranks)
    if running:
        _say(f"waiting up to {grace_s:g} s for {_names(running)} to end with an error")
    deadline = time.monotonic() + grace_s
    while running and time.monotonic() < deadline:
        time.sleep(POLL_S)
        running = _running(ranks)
    _end(running)
    for rank in ranks:
        tail = rank.tail()
        if rank in running:
            _say(f"rank {rank.rank} was still running {grace_s:g} s later, so it was ended")
        elif rank.process.returncode and rank is not first:
            _say(f"rank {rank.rank} {describe_exit(rank.process.returncode)}")
        if rank.process.returncode and tail:
            _say(f"the last lines of rank {rank.rank}:\n{tail}")
    code = first.process.returncode
    return code if code > 0 else 128 - code


def _wait_for_failure(ranks: Sequence[_Rank]) -> _Rank | None:
    """Return the first rank that fails, None once all have ended well."""
    while True:
        failed = [rank for rank in ranks if rank.process.poll()]
        if failed:
            # A signal before an exit code: who was killed is the cause, who raised follows.
            return min(failed, key=lambda rank: rank.process.returncode > 0)
        if not _running(ranks):
            return None
        time.sleep(POLL_S)


def _running(ranks: Sequence[_Rank]) -> list[_Rank]:
    return [rank for rank in ranks if rank.process.poll() is None]


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.process.terminate()
    deadline = time.monotonic() + TERMINATE_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()


def _names(ranks: Sequence[_Rank]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank.rank) for rank in ranks)


def _say(text: str) -> None:
    print(f"sidestream: {text}", file=sys.stderr, flush=True)


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that a launcher that is told to end takes its ranks
    with it.
    """

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
