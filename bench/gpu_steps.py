"""What `make gpu-check` is made of: programs with a limit, side by side, in the time that is left.

    Program   a command, and how long it may take
    Outcome   how it ended, what it said, what it wrote to the file that it was given
    Step      programs, and what their outcomes say: a Finding

A step ends "ok", "failed" or "not run": where the machine lacks what it needs, or no time is left.
Neither of these two says anything of the code, so only "failed" fails the check.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..training.processes import end, exit_code, start, watch

ROOT = Path(__file__).resolve().parents[1]
OK, FAILED, NOT_RUN = "ok", "failed", "not run"
NO_TIME = "no time left"
# In a command: a folder that is deleted when it has ended, and the file in it that is read then.
FOLDER = "{folder}"
FILE = f"{FOLDER}/written"
# What a program takes to load torch: with less, nothing comes of it.
LEAST_S = 5.0
_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True)
class Program:
    """A command, run in the checkout, and the `variables` of its environment that are its own."""

    command: Sequence[str]
    limit_s: float
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How one program ended. code: None when it ran out of time; whole_check: the check's, not its
    own. written: to `FILE`.
    """

    code: int | None
    output: str
    seconds: float
    written: str | None = None
    whole_check: bool = False

    @property
    def tail(self) -> str:
        """The exit code and the end of the output."""
        shown = self.output.strip()[-_SHOWN_CHARACTERS:]
        how = f"exit {self.code}" if self.code is not None else f"ended after {self.seconds:.0f} s"
        return f"{how}: {shown.rpartition(chr(10))[2]}\n{shown}"


@dataclass(frozen=True)
class Finding:
    """What came of it. `detail`: for people, the first line in the table; `values`: for the file."""

    status: str
    detail: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Programs that may run side by side, and what their outcomes, in order, say."""

    name: str
    programs: Sequence[Program]
    judge: Callable[[Sequence[Outcome]], Finding]


@dataclass(frozen=True)
class StepResult:
    """One row of the table."""

    name: str
    status: str
    seconds: float
    detail: str
    values: Mapping[str, Any] = field(default_factory=dict)


class Budget:
    """The time that is left to the whole check. patience: what this and every limit are multiplied
    by, for a machine that they are not made for.
    """

    def __init__(self, seconds: float, *, patience: float = 1.0) -> None:
        self._end = time.monotonic() + seconds * patience
        self._patience = patience

    @property
    def left_s(self) -> float:
        """Seconds until the check should have ended; 0 from then on."""
        return max(0.0, self._end - time.monotonic())

    def limit(self, seconds: float) -> float:
        """What this machine is given where one that limits are made for is given `seconds`."""
        return seconds * self._patience

    def stop(self) -> None:
        """End every program that runs, and let none start."""
        self._end = time.monotonic()

    def run(self, program: Program) -> Outcome:
        """Run `program` for at most its limit and what is left; end what it started with it."""
        left_s, limit_s = self.left_s, self.limit(program.limit_s)
        if left_s < min(LEAST_S, limit_s):
            return Outcome(None, "", 0.0, whole_check=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sidestream-gpu-check-") as folder:
            log, written = Path(folder, "log"), Path(FILE.replace(FOLDER, folder))
            process = start(
                [part.replace(FOLDER, folder) for part in program.command],
                log=log,
                environment={**os.environ, **program.variables},
                folder=ROOT,
                own_group=True,
            )
            try:
                for _ in watch([process], limit_s):
                    if not self.left_s:
                        break
                code = exit_code(process)
            finally:
                end([process], groups=True)
            return Outcome(
                code,
                log.read_text(errors="replace"),
                time.monotonic() - began,
                written.read_text() if written.exists() else None,
                whole_check=code is None and not self.left_s,
            )


def unfinished(outcome: Outcome) -> Finding | None:
    """What is said of a program that did not come to its end; None for one that did."""
    if outcome.code is not None:
        return None
    if not outcome.whole_check:
        return Finding(FAILED, f"over its limit, {outcome.tail}")
    return Finding(
        NOT_RUN, NO_TIME + f": ended after {outcome.seconds:.0f} s" * bool(outcome.seconds)
    )


def attempt(name: str, find: Callable[[], Finding], seconds: float | None = None) -> StepResult:
    """The result of `find`; failed where it raises, so that the others still have theirs."""
    began = time.monotonic()
    try:
        found = find()
    except Exception as error:  # noqa: BLE001 - whatever it is belongs into the table
        found = Finding(FAILED, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    took = time.monotonic() - began if seconds is None else seconds
    return StepResult(name, found.status, took, found.detail, found.values)


def side_by_side(
    budget: Budget,
    steps: Sequence[Step],
    tell: Callable[[StepResult], None],
    *,
    cores_each: int = 1,
) -> list[StepResult]:
    """Run the programs of `steps`, the first first, as many at a time as there are cores for.

    For what is right or wrong; what takes times comes alone. `tell` hears each result.
    """
    workers = max(1, len(os.sched_getaffinity(0)) // cores_each)
    with ThreadPoolExecutor(workers) as pool:
        try:
            begun = [[pool.submit(budget.run, one) for one in step.programs] for step in steps]
            results = []
            for step, futures in zip(steps, begun, strict=True):
                outcomes = [future.result() for future in futures]
                seconds = max(outcome.seconds for outcome in outcomes)
                results.append(attempt(step.name, partial(step.judge, outcomes), seconds))
                tell(results[-1])
        except BaseException:
            budget.stop()
            raise
    return results


def sidestream(*arguments: str) -> list[str]:
    """The command line of sidestream."""
    assert __package__
    return [sys.executable, "-m", __package__.rpartition(".")[0], *arguments]
