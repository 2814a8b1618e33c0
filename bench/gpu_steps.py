"""Owns what the steps of `make gpu-check` are made of: the time that is left, programs with a
limit, results.

A step ends "ok", "failed" or "not run": where the machine lacks what it needs, or no time is left.
Neither of these two says anything of the code, so only "failed" fails the check.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OK, FAILED, NOT_RUN = "ok", "failed", "not run"
NO_TIME = "no time left"
# What a program takes to load torch: with less, nothing comes of it.
LEAST_S = 5.0
# Each compiles, or is several ranks.
_CORES_A_STEP = 4
_FAREWELL_S = 5.0
_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True)
class StepResult:
    """One step. `detail`: for people, the first line in the table; `values`: for the file."""

    name: str
    status: str
    seconds: float
    detail: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How one program ended. code: None when it ran out of time; whole_check: the check's, not its
    own.
    """

    code: int | None
    output: str
    seconds: float
    whole_check: bool = False

    @property
    def tail(self) -> str:
        """The exit code and the end of the output."""
        end = self.output.strip()[-_SHOWN_CHARACTERS:]
        how = f"exit {self.code}" if self.code is not None else f"ended after {self.seconds:.0f} s"
        return f"{how}: {end.rpartition(chr(10))[2]}\n{end}"


class Budget:
    """The time that is left to the whole check, and the programs that run in it. patience: what
    this and every limit are multiplied by, for a machine that they are not made for.
    """

    def __init__(self, seconds: float, *, patience: float = 1.0) -> None:
        self._end = time.monotonic() + seconds * patience
        self._patience = patience
        self._running: set[subprocess.Popen[str]] = set()

    @property
    def left_s(self) -> float:
        """Seconds until the check should have ended; 0 from then on."""
        return max(0.0, self._end - time.monotonic())

    def limit(self, seconds: float) -> float:
        """What this machine is given where one that limits are made for is given `seconds`."""
        return seconds * self._patience

    def run(
        self, command: Sequence[str], *, limit_s: float, variables: Mapping[str, str] | None = None
    ) -> Outcome:
        """Run `command` in the checkout, for at most `limit_s` and what is left of the budget."""
        left = self.left_s
        limit_s = self.limit(limit_s)
        if left < min(LEAST_S, limit_s):
            return Outcome(None, "", 0.0, whole_check=True)
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # In a group of its own, so that what it started in turn ends with it.
            start_new_session=True,
        )
        self._running.add(process)
        try:
            output, _ = process.communicate(timeout=min(limit_s, left))
            return Outcome(process.returncode, output, time.monotonic() - start)
        except subprocess.TimeoutExpired:
            # Where only its ranks hang on, a program that failed is told by its exit code.
            code = process.poll() or None
            output = _end(process)
            return Outcome(code, output, time.monotonic() - start, whole_check=left < limit_s)
        finally:
            self._running.discard(process)
            _end_group(process)

    def stop(self) -> None:
        """End every program, and let none start."""
        self._end = time.monotonic()
        for process in list(self._running):
            _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    """End the program with all that it started, which may outlive it."""
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> str:
    """End the program with all that it started; what they had said."""
    _end_group(process)
    try:
        return process.communicate(timeout=_FAREWELL_S)[0]
    except subprocess.TimeoutExpired:
        return ""  # somebody left the group and holds the pipe


def unfinished(name: str, outcome: Outcome) -> StepResult | None:
    """The result of a program that did not come to its end; None for one that did."""
    if outcome.code is not None:
        return None
    if not outcome.whole_check:
        return StepResult(name, FAILED, outcome.seconds, f"over its limit, {outcome.tail}")
    after = f": ended after {outcome.seconds:.0f} s" if outcome.seconds else ""
    return StepResult(name, NOT_RUN, outcome.seconds, NO_TIME + after)


Step = Callable[[], StepResult]


def attempt(name: str, step: Step) -> StepResult:
    """The result of `step`; failed where it raises, so that the others still have theirs."""
    start = time.monotonic()
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - whatever it is belongs into the table
        detail = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return StepResult(name, FAILED, time.monotonic() - start, detail)


def together(budget: Budget, steps: Mapping[str, Step]) -> list[StepResult]:
    """Side by side, as far as there are cores; their results in order. For what is right or wrong,
    not for times.
    """
    workers = max(1, len(os.sched_getaffinity(0)) // _CORES_A_STEP)
    with ThreadPoolExecutor(max_workers=min(len(steps), workers)) as pool:
        try:
            return list(pool.map(lambda name: attempt(name, steps[name]), steps))
        except BaseException:
            budget.stop()
            raise


def module(name: str) -> list[str]:
    """The command that runs a module of this package as a program."""
    assert __package__
    return [sys.executable, "-m", f"{__package__}.{name}"]


def sidestream(*arguments: str) -> list[str]:
    """The command line of sidestream."""
    assert __package__
    return [sys.executable, "-m", __package__.rpartition(".")[0], *arguments]
