"""What `make gpu-check` is made of: steps of commands, side by side, in the time that is left.

    Step      commands with a limit, and what is made of their outcomes
    Outcome   how one command ended, what it said, what it wrote to the file that it was given
    Result    a row of the table: "ok", "failed" or "not run"

A step is not run where the machine lacks what it needs, or no time is left. That says nothing of
the code, so only "failed" fails the check.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..training.launch.processes import end, exit_code, start, watch

ROOT = Path(__file__).resolve().parents[1]
OK, FAILED, NOT_RUN = "ok", "failed", "not run"
NO_TIME = "no time left"
# In a command or a variable: a folder that is deleted when it has ended, and the file in it that is
# read then.
FOLDER = "{folder}"
FILE = f"{FOLDER}/written"
# What a program takes to load torch: with less, nothing comes of it.
LEAST_S = 5.0
_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True)
class Outcome:
    """How one command ended. code: None when it ran out of time; whole_check: the check's, not its
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
class Result:
    """What came of it. detail: for people, its first line in the table. values: for the file."""

    status: str
    detail: str
    values: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Step:
    """Commands that may run side by side, and what is made of their outcomes, in order.

    variables: of the environment, for the commands alone.
    """

    name: str
    commands: Sequence[Sequence[str]]
    judge: Callable[[Sequence[Outcome]], Result]
    limit_s: float = 0.0
    variables: Mapping[str, str] = field(default_factory=dict)


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
        """End every command that runs, and let none start."""
        self._end = time.monotonic()

    def run(self, step: Step, command: Sequence[str]) -> Outcome:
        """Run one of a step's commands in the checkout, and end with it what it has started."""
        limit_s = self.limit(step.limit_s)
        if self.left_s < min(LEAST_S, limit_s):
            return Outcome(None, "", 0.0, whole_check=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sidestream-gpu-check-") as folder:
            log, written = Path(folder, "log"), Path(FILE.replace(FOLDER, folder))
            variables = {
                name: value.replace(FOLDER, folder) for name, value in step.variables.items()
            }
            process = start(
                [part.replace(FOLDER, folder) for part in command],
                log=log,
                environment={**os.environ, **variables},
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
                whole_check=not self.left_s,
            )


def unfinished(outcome: Outcome) -> Result | None:
    """What is said of a command that did not come to its end; None for one that did."""
    if outcome.code is not None:
        return None
    if not outcome.whole_check:
        return Result(FAILED, f"over its limit, {outcome.tail}")
    after = f": ended after {outcome.seconds:.0f} s" if outcome.seconds else ""
    return Result(NOT_RUN, NO_TIME + after)


def attempt(name: str, step: Callable[[], Result]) -> Result:
    """The result of `step`; failed where it raises, so that the others still have theirs."""
    began = time.monotonic()
    try:
        result = step()
    except Exception as error:  # noqa: BLE001 - whatever it is belongs into the table
        result = Result(FAILED, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    return replace(result, name=name, seconds=time.monotonic() - began)


def side_by_side(
    budget: Budget, steps: Sequence[Step], tell: Callable[[Result], None], *, cores_each: int = 1
) -> list[Result]:
    """Run the commands of `steps`, the first first, as many at a time as there are cores for.

    For what is right or wrong; what takes times comes alone. `tell` hears each result.
    """
    results = []
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // cores_each)) as pool:
        try:
            begun = [
                [pool.submit(budget.run, step, one) for one in step.commands] for step in steps
            ]
            for step, futures in zip(steps, begun, strict=True):
                outcomes = [future.result() for future in futures]
                result = attempt(step.name, partial(step.judge, outcomes))
                seconds = max((outcome.seconds for outcome in outcomes), default=0.0)
                results.append(replace(result, seconds=seconds))
                tell(results[-1])
        except BaseException:
            budget.stop()
            raise
    return results
