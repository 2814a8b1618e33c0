"""Files of this machine's file systems, opened and written with care for who else writes there."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import ClassVar

from ..untrusted import open_regular, read_at, sync_folder


class LocalFile:
    """A regular file that is read at any byte; `identity` tells it from copies on other disks."""

    piece_bytes: ClassVar[int] = 1 << 18
    """How many bytes at a time are read with profit: those stay in the cache until their sum."""

    def __init__(self, path: Path) -> None:
        """Open it, or what it links to.

        Raises:
            FileNotFoundError, ValueError, OSError: as `open_regular`.
        """
        self._file = open_regular(path)
        status = os.fstat(self._file.fileno())
        self.num_bytes = status.st_size
        self.identity: tuple[int, ...] = (status.st_ino, status.st_size, status.st_mtime_ns)

    def read_at(self, memory: memoryview, position: int) -> memoryview:
        """Fill `memory` from byte `position` on; returns the rest, which lies beyond the end."""
        return read_at(self._file, memory, position)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class NewLocalFile(io.FileIO):
    """A new file, on disk when it is closed."""

    def __init__(self, path: Path) -> None:
        """Make it.

        Raises:
            FileExistsError: there is one, or a link, which is not followed.
        """
        super().__init__(path, "x")

    def abandon(self) -> None:
        """What was written so far stays, where nobody looks for it."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Bring the file to disk, then close it."""
        if not self.closed:
            os.fsync(self.fileno())
        super().close()


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path`, which has it whole or not at all, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # of a killed run, or a link that somebody has put there
    with NewLocalFile(partial) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
    os.replace(partial, path)
    sync_folder(path.parent)


def entries_of(folder: Path) -> dict[str, bool]:
    """What is directly in `folder`, and whether each is a folder; nothing where there is none."""
    if not os.path.isdir(folder):
        return {}
    return {name: os.path.isdir(folder / name) for name in os.listdir(folder)}


def remove_all(path: Path) -> None:
    """Remove the file, link or folder at `path` with all below; nothing there is fine."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
        return
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
