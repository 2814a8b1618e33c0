"""Reads files that somebody else may have put there: only regular ones, and never waiting."""

from __future__ import annotations

import io
import os
import stat
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .stored import BadCheckpoint, Digest

_PIECE_BYTES = 1 << 20
_MAX_THREADS = 8


def shown(path: Path) -> str:
    """`path` for a message, with escapes where it could not be printed."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def open_regular(path: Path) -> io.FileIO:
    """Open `path`, or the file that it links to, for reading.

    Raises:
        BadCheckpoint: there is no such file, or it is a folder, a pipe, a device or the like.
        OSError: it cannot be opened.
    """
    try:
        kind = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadCheckpoint(f"expected a file {path.name}, got none") from error
    if not stat.S_ISREG(kind):
        raise BadCheckpoint(f"expected a file {path.name}, got {_KINDS[stat.S_IFMT(kind)]}")
    # What is there may have changed since: a pipe without a writer must not keep us.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return io.FileIO(descriptor)


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def read_whole(path: Path) -> bytes:
    """The content of `path`, likewise."""
    with open_regular(path) as file:
        return file.read()


def digest_of(path: Path) -> Digest:
    """Size and sum of `path`, likewise."""
    piece = bytearray(_PIECE_BYTES)
    num_bytes = crc32 = 0
    with open_regular(path) as file:
        while count := file.readinto(piece):
            crc32 = zlib.crc32(memoryview(piece)[:count], crc32)
            num_bytes += count
    return Digest(num_bytes, crc32)


def require_sizes(folder: Path, expected: Iterable[tuple[str, Digest]]) -> None:
    """Compare the sizes of files of `folder` with what is known of them.

    Raises:
        BadCheckpoint: one is missing or has another size.
        OSError: one cannot be opened.
    """
    for name, digest in expected:
        with open_regular(folder / name) as file:
            num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != digest.num_bytes:
            raise BadCheckpoint(f"expected {name} of {digest.num_bytes} bytes, got {num_bytes}")


def require_digests(folder: Path, expected: Iterable[tuple[str, Digest]]) -> None:
    """Compare files of `folder` with what is known of them.

    Raises:
        BadCheckpoint: one is missing or another one.
        OSError: one cannot be read.
    """
    expected = list(expected)
    require_sizes(folder, expected)  # costs nothing
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(digest_of, [folder / name for name, _ in expected])
        for (name, digest), actual in zip(expected, found, strict=True):
            if actual != digest:
                raise BadCheckpoint(
                    f"expected {name} as it was written, got a damaged file or one of another "
                    "checkpoint"
                )
