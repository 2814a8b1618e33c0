"""Shows how far a long compilation is: a bar on a terminal, some lines elsewhere; on the error
output, so that the table can be kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

PLAIN_LINES = 10


@contextmanager
def shown(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Give a function to call with the name of each of `total` things that is done."""
    if sys.stderr.isatty() and find_spec("rich") is not None:
        with _bar(total, what) as step:
            yield step
        return
    every = max(1, total // PLAIN_LINES)
    done = 0

    def step_plainly(name: str) -> None:
        nonlocal done
        done += 1
        if total > 1 and (done % every == 0 or done == total):
            print(f"{what} {done}/{total}: {name}", file=sys.stderr, flush=True)

    yield step_plainly


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(what),
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, name="")
        yield lambda name: progress.update(task, advance=1, name=name)
