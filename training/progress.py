"""Shows a run while it goes on: a live bar on a terminal, a line now and then elsewhere, nothing
on the other ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_LINES = 20


class Reporter(Protocol):
    """Takes the figures of each step."""

    def step(self, step: int, loss: float, tokens_per_s: float, peak_mib: float) -> None:
        """Show one step."""

    def note(self, text: str) -> None:
        """Show a remark above the figures."""


class SilentReporter:
    """Of every rank but the first."""

    def step(self, step: int, loss: float, tokens_per_s: float, peak_mib: float) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


class PlainReporter:
    """About 20 lines a run, for logs and pipes."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._every = max(1, last_step // PLAIN_LINES)

    def step(self, step: int, loss: float, tokens_per_s: float, peak_mib: float) -> None:
        """Print every few steps, and the first and the last one."""
        if step == 1 or step == self._last_step or step % self._every == 0:
            self.note(
                f"step {step:>{len(str(self._last_step))}}/{self._last_step}  loss {loss:.4f}  "
                f"{tokens_per_s:,.0f} tokens/s  {peak_mib:,.0f} MiB"
            )

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)


class BarReporter:
    """A live bar with loss, speed and memory."""

    def __init__(self, progress: Progress, first_step: int, last_step: int) -> None:
        self._progress = progress
        self._task = progress.add_task(
            "", total=last_step, completed=first_step - 1, figures="starting"
        )

    def step(self, step: int, loss: float, tokens_per_s: float, peak_mib: float) -> None:
        """Move the bar."""
        figures = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {peak_mib:,.0f} MiB"
        self._progress.update(self._task, completed=step, figures=figures)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def reporter_for(*, is_first: bool, first_step: int, last_step: int) -> Iterator[Reporter]:
    """Give the reporter that suits this rank and its standard output."""
    if not is_first:
        yield SilentReporter()
    elif not sys.stdout.isatty() or find_spec("rich") is None:
        # The check on a GPU runs with what a machine has: training must not need rich.
        yield PlainReporter(last_step)
    else:
        with _bar() as progress:
            yield BarReporter(progress, first_step, last_step)


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=Console(),
    )
