"""Where a checkpoint is saved to: what has to happen there before ranks write, and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..storage import Location, Url
from . import folder as checkpoint_folder
from .url_folder import UrlTarget


class Target(Protocol):
    """Every rank has it; the first of a model's ranks alone calls `prepare` and `publish`."""

    @property
    def location(self) -> Location:
        """Of the checkpoint."""

    @property
    def draft(self) -> Location:
        """What ranks write to, the manifest last."""

    def prepare(self, rank: int, take: Callable[[], None]) -> None:
        """Have `draft` be ready, as `rank`; `take` is called once nothing stands in the way."""

    def publish(self) -> None:
        """Have `location` be what was written, which is complete."""

    def discard(self) -> None:
        """Remove what was written and not published, where that can be known."""


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """A folder that takes its place by its name."""

    location: Path

    @property
    def draft(self) -> Path:
        """Beside it, under a name that nobody reads."""
        return checkpoint_folder.partial_of(self.location)

    def prepare(self, rank: int, take: Callable[[], None]) -> None:
        """As `folder.prepare`."""
        checkpoint_folder.prepare(self.location, rank, take)

    def publish(self) -> None:
        """As `folder.publish`."""
        checkpoint_folder.publish(self.location)

    def discard(self) -> None:
        """As `folder.discard_partial`."""
        checkpoint_folder.discard_partial(self.location)


def target_of(path: object) -> Target:
    """Where the checkpoint that the user calls `path` is saved to.

    Raises:
        FileExistsError, TypeError, ValueError: as `folder.resolve_for_writing`.
    """
    location = checkpoint_folder.resolve_for_writing(path)
    return UrlTarget(location) if isinstance(location, Url) else LocalTarget(location)
