"""Figures as strict JSON, a step a line, that a killed and resumed run goes on with.

    {"step": 20, "loss": 2.31, "lr": 0.0003, "grad_norm": "nan"}

JSON has no NaN and no infinity: they are the texts "nan", "inf" and "-inf", which Python's float()
reads. A line is handed to the operating system whole, so that kill -9 loses none; a power cut may.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from reprlib import repr as short

from ...sharding.storage import write_whole
from ..errors import UsageError


class JsonLinesWriter:
    """Writes the figures of one step after the other into the file at `path`.

    resumed_step: the step that a resumed run goes on from, 0 where it begins anew: lines of later
    steps are dropped, and with them a last line that a kill has torn. None: there must be no such
    file, or an empty one, so that no other run's figures are lost.

    Raises:
        UsageError: there is a file of another run, or its lines are not what this class writes, or
            it cannot be written.
    """

    def __init__(self, path: str | Path, *, resumed_step: int | None = None) -> None:
        self._path = Path(path)
        if resumed_step is None:
            require_no_metrics(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.is_file() and resumed_step is not None:
                _drop_later(self._path.resolve(), resumed_step)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"expected a file for metrics at {path}, got {error}; give another path"
            ) from error
        self._step: int | None = None
        self._figures: dict[str, float | str] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Take the value that `tag` has at a step; a tensor of one element is read, which waits for
        its device. The line of a step is written when another step's first value comes, or a
        second one of the tag, or by `flush`.

        Raises:
            ValueError: the tag is "step".
        """
        if tag == "step":
            raise ValueError("tag: expected another name than 'step', which each line has; rename")
        if step != self._step or tag in self._figures:
            self.flush()
        self._step = step
        self._figures[tag] = _strict(value)

    def flush(self) -> None:
        """Write the line of the step so far; more values of it make another line.

        Raises:
            OSError: the disk is full, say; it names the file.
        """
        try:
            if self._figures:
                line = {"step": self._step, **self._figures}
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
                self._figures = {}
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Write the last line, and take no more. Raises as `flush` does."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            with suppress(OSError):  # `flush` tells
                self._file.close()


def require_no_metrics(path: str | Path) -> None:
    """Refuse to write where another run's figures are.

    Raises:
        UsageError: there is a file, and not an empty one.
    """
    try:
        size = os.stat(path).st_size
    except OSError:
        return  # there is none; or it cannot be written, which who opens it is told
    if size:
        raise UsageError(
            f"expected no metrics at {path} yet, got a file of {size} bytes; pass another path, or "
            "move it away"
        )


def _strict(value: float) -> float | str:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _drop_later(path: Path, resumed_step: int) -> None:
    """Leave the lines of steps up to `resumed_step`; a kill leaves the file as it is or as it
    shall be.
    """
    write_whole(path, b"".join(line for line, step in _lines(path) if step <= resumed_step))


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each whole line with its step; the last one may be torn and is then left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                step = json.loads(line)["step"]
                if type(step) is not int:
                    raise ValueError(f"step {short(step)}")
            except (ValueError, TypeError, KeyError) as error:
                if line.endswith(b"\n"):
                    raise UsageError(
                        f"expected line {number} of {path} to be an object with a whole 'step', "
                        f"got {short(line)} ({error}); move the file away to start another"
                    ) from error
                return
            yield line if line.endswith(b"\n") else line + b"\n", step
