"""Processes that this one started: their output, one deadline for all, an end for each, what they
answered.

    command     --start-->  a file for its output, or ours      exit code, end of the output
    a function  --answer->  its value or its traceback, in a folder that both know

Commands are `subprocess.Popen`, functions are processes of `multiprocessing`; all else is alike.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

Process = subprocess.Popen[bytes] | BaseProcess

POLL_S = 0.05
TAIL_BYTES = 4000


def start(
    command: Sequence[str],
    *,
    log: Path | None = None,
    stdin: int | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    own_group: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `command`; all it says goes to the file `log`, by default to where ours goes.

    own_group: what it starts in turn can be ended with it; a Ctrl-C in a terminal does not reach
    either.
    """
    with contextlib.ExitStack() as stack:
        stream = None if log is None else stack.enter_context(log.open("wb"))
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=stdin,
            stdout=stream,
            stderr=None if stream is None else subprocess.STDOUT,
            start_new_session=own_group,
        )


def exit_code(process: Process) -> int | None:
    """How `process` ended, by minus the number of a signal; None while it runs."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def running(processes: Iterable[Process]) -> list[Process]:
    """Those that have not ended."""
    return [process for process in processes if exit_code(process) is None]


def watch(processes: Iterable[Process], timeout_s: float = math.inf) -> Iterator[list[Process]]:
    """Which of `processes` run, again and again: at last none, or those late by then."""
    deadline = time.monotonic() + timeout_s
    while (left := running(processes)) and (left_s := deadline - time.monotonic()) > 0.0:
        yield left
        # A function's end is heard at once; a command's is looked for.
        ends = [process.sentinel for process in left if isinstance(process, BaseProcess)]
        connection.wait(ends, min(POLL_S, left_s))
    yield left


def wait_for(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait for all to end; those that still run after `timeout_s`."""
    (late,) = deque(watch(processes, timeout_s), maxlen=1)
    return late


def end(processes: Sequence[Process], *, terminate_s: float = 0.0, groups: bool = False) -> None:
    """End and collect `processes`, each by its own pid; those never started are passed over.

    They have `terminate_s` to end by SIGTERM, then they are killed. groups: each leads a group, and
    what it started in turn is killed with it, also where it has ended itself.
    """
    started = [process for process in processes if process.pid is not None]
    if terminate_s:
        for process in running(started):
            process.terminate()
        wait_for(started, terminate_s)
    for process in started:
        if groups:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)
        elif exit_code(process) is None:
            process.kill()
    for process in started:
        if isinstance(process, subprocess.Popen):
            process.wait()
        else:
            process.join()


def describe_exit(code: int) -> str:
    """Say how a process with this exit code ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def tail_of(log: Path, num_bytes: int = TAIL_BYTES) -> str:
    """The end of what was written to `log`; nothing where there is no such file."""
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - num_bytes))
        return stream.read().decode(errors="replace")


# Functions: each answers with a file.


def answer(folder: Path, rank: int, work: Callable[[], Any]) -> None:
    """Be process `rank`: leave what `work` returns in `folder`, or its traceback, and then exit."""
    try:
        value = work()
        torch.save(value, unfinished := folder / f"saving_{rank}")
        unfinished.rename(folder / f"value_{rank}")
    except BaseException:  # noqa: BLE001 - whatever ends a process is told
        (folder / f"error_{rank}").write_text(traceback.format_exc())
        sys.exit(1)


def has_answered(folder: Path, rank: int) -> bool:
    """Whether process `rank` has left its value."""
    return (folder / f"value_{rank}").exists()


def answers(folder: Path, processes: Sequence[Process]) -> tuple[dict[int, Any], dict[int, str]]:
    """By rank, the values that were left in `folder`, and why those that ended without one did.

    Whose exit code is not 0 has failed, whatever it left; who still runs is in neither.
    """
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    for rank, process in enumerate(processes):
        code, error = exit_code(process), folder / f"error_{rank}"
        if has_answered(folder, rank) and not code:
            values[rank] = torch.load(folder / f"value_{rank}", weights_only=False)
        elif error.exists():
            failures[rank] = error.read_text()
        elif code is not None:
            failures[rank] = f"{describe_exit(code)} before it returned"
    return values, failures
