"""Shows how far something long is, on the error output, so that a table on the other can be kept.

shown    of a known number of things: a bar on a terminal, some lines elsewhere
line     of an unknown number: one line of a terminal, nothing elsewhere
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
def line() -> Iterator[Callable[[str], None]]:
    """Give a function to call with what is done now; the line is cleared at the end."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def tell(text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        tell("")


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
