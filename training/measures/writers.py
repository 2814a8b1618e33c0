"""Where the figures of a run go: lines of JSON, TensorBoard, or several of them.

    with closing(SeveralWriters([JsonLinesWriter("run.jsonl"), TensorBoardWriter("runs/a")])) as w:
        w.add_scalar("loss", 2.5, step=1)

Who resumes names the step that the run goes on from: what was written of later steps is dropped,
since they are made again. One rank writes, usually the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TakesScalars(Protocol):
    """What figures are given to; TensorBoard's SummaryWriter is one."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Take the value that `tag` has at a step."""


class MetricsWriter(TakesScalars, Protocol):
    """Takes figures and keeps them."""

    def flush(self) -> None:
        """Hand all that was taken to the operating system."""

    def close(self) -> None:
        """Flush, and take no more."""


class TensorBoardWriter:
    """Event files for TensorBoard in `folder`, of torch.utils.tensorboard, which is imported here.
    resumed_step: the step that a resumed run goes on from, whose later ones TensorBoard hides.
    None: there must be no event files yet, which TensorBoard would show as one run with these.

    Raises:
        UsageError: there are event files of another run.
        ModuleNotFoundError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path, *, resumed_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError(
                f"expected TensorBoard to write {folder}, got none ({error}); pip install "
                "'sidestream[tensorboard]'",
                name="tensorboard",
            ) from error
        if resumed_step is None:
            require_no_events(folder)
        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer: SummaryWriter = SummaryWriter(str(folder), purge_step=purge_step)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Take the value that `tag` has at a step, NaN and infinity too."""
        self._writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        """Write all that was taken to the event file."""
        self._writer.flush()

    def close(self) -> None:
        """Flush, and take no more."""
        self._writer.close()


def require_no_events(folder: str | Path) -> None:
    """Refuse to write where another run's event files are; those of folders inside are others'.

    Raises:
        UsageError: there is one.
    """
    if found := sorted(Path(folder).glob("*tfevents*")):
        raise UsageError(
            f"expected no event files in {folder} yet, got {found[0].name}; pass a folder of this "
            "run's own"
        )


class SeveralWriters:
    """Hands all it takes to each of `writers`, of which there may be none."""

    def __init__(self, writers: Sequence[MetricsWriter]) -> None:
        self._writers = tuple(writers)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Give each the value that `tag` has at a step."""
        for writer in self._writers:
            writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        """Flush each."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Close each, also when another one fails."""
        with ExitStack() as closing:
            for writer in self._writers:
                closing.callback(writer.close)
