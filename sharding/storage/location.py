"""A place in some storage, a path or a URL, and what can be done there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol

from . import local
from .url import NewUrlFile, Url, UrlFile, is_url

Location = Path | Url
_FILES = "file://"


class File(Protocol):
    """A file that is read at any byte. `identity`: ints that tell whether ranks see the same one.
    `piece_bytes`: how many bytes at a time are read with profit.
    """

    piece_bytes: ClassVar[int]
    num_bytes: int
    identity: tuple[int, ...]

    def read_at(self, memory: memoryview, position: int) -> memoryview:
        """Fill `memory` from byte `position` on; returns the rest, which lies beyond the end.

        Raises:
            OSError: it cannot be read.
        """

    def __enter__(self) -> File: ...

    def __exit__(self, *_: object) -> None: ...


class NewFile(Protocol):
    """A file that is being written from the first byte to the last."""

    def write(self, content: memoryview, /) -> int:
        """Append `content`, or the first part of it; returns how many bytes."""

    def close(self) -> None:
        """Have what was written be kept, also after a power cut."""

    def abandon(self) -> None:
        """Before `close`: something went wrong, and what was written need not be kept."""

    def __enter__(self) -> NewFile: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def location_of(path: str | os.PathLike[str]) -> Location:
    """The location that a user's text or path names; `file:///` URLs are paths, with no character
    decoded.

    Raises:
        ValueError: it begins as a URL and names no place, as one that a Path has spoiled.
    """
    if isinstance(path, Url):
        return path
    text = os.fspath(path)
    if not is_url(text):
        return Path(text)
    scheme, place = text[: len(_FILES)].lower(), text[len(_FILES) :]
    return Path(place) if scheme == _FILES and place.startswith("/") else Url.of(text)


def open_file(location: Location) -> File:
    """Open what is at `location` for reading.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is no regular file.
        OSError: it cannot be opened.
    """
    return UrlFile(location) if isinstance(location, Url) else local.LocalFile(location)


def create_file(location: Location) -> NewFile:
    """Begin a file at `location`. A path must be free; a URL's object is replaced at the end."""
    return NewUrlFile(location) if isinstance(location, Url) else local.NewLocalFile(location)


def write_whole(location: Location, content: bytes) -> None:
    """Put `content` at `location`, which has it whole or not at all."""
    return (
        location.write(content)
        if isinstance(location, Url)
        else local.write_whole(location, content)
    )


def entries_of(folder: Location) -> dict[str, bool]:
    """What is directly in `folder`, and whether each is a folder; nothing where there is none."""
    return folder.entries() if isinstance(folder, Url) else local.entries_of(folder)


def remove_all(location: Location) -> None:
    """Remove the file or folder at `location` with all below; nothing there is fine."""
    return location.remove() if isinstance(location, Url) else local.remove_all(location)


def read_first(location: Location, max_bytes: int) -> bytes:
    """At most the first `max_bytes` bytes at `location`.

    Raises:
        FileNotFoundError, ValueError, OSError: as `open_file`.
    """
    with open_file(location) as file:
        content = bytearray(min(max_bytes, file.num_bytes))
        rest = file.read_at(memoryview(content), 0)
        return bytes(content[: len(content) - len(rest)])


def is_there(location: Location) -> bool:
    """Whether something is at `location`, be it a link to nothing."""
    return location.is_file() if isinstance(location, Url) else os.path.lexists(location)


def remove_files(folder: Location, names: Iterable[str]) -> None:
    """Remove the files `names` directly in `folder`; those that are not there are fine."""
    if isinstance(folder, Url):
        folder.remove_files([*names])
        return
    for name in names:
        (folder / name).unlink(missing_ok=True)


def is_file(location: Location) -> bool:
    """Whether a file is at `location`; never for a path that there cannot be."""
    return location.is_file() if isinstance(location, Url) else os.path.isfile(location)


def make_folder(location: Location) -> None:
    """Make the folder at `location` and those around it, where storage has such."""
    if isinstance(location, Path):
        location.mkdir(parents=True, exist_ok=True)
