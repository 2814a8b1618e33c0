"""Files of a checkpoint, which somebody else may have put there: their bytes, sizes and sums."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import untrusted
from .stored import SEGMENT_BYTES, BadCheckpoint, Digest

_PIECE_BYTES = 1 << 18  # stays in the cache between its reading and its sum
_MAX_THREADS = 8


def open_regular(path: Path) -> io.FileIO:
    """Open `path`, or the file that it links to, for reading.

    Raises:
        BadCheckpoint: there is no such file, or it is a folder, a pipe, a device or the like.
        OSError: it cannot be opened.
    """
    try:
        return untrusted.open_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadCheckpoint(f"expected a file {path.name}, got none") from error
    except ValueError as error:
        raise BadCheckpoint(str(error)) from error


def read_whole(path: Path) -> bytes:
    """The content of `path`, likewise."""
    with open_regular(path) as file:
        return file.read()


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


def require_sums(folder: Path, expected: Mapping[str, Digest], rank: int, world_size: int) -> None:
    """Compare this rank's share of the sums of files of `folder` with what is known of them.

    Raises:
        BadCheckpoint: one is missing or another one.
        OSError: one cannot be read.
    """
    require_sizes(folder, expected.items())
    segments = [
        (name, place, crc32)
        for name, digest in sorted(expected.items())
        for place, crc32 in enumerate(digest.crc32s)
    ][rank::world_size]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda segment: _crc32_of(folder / segment[0], segment[1]), segments)
        for (name, _, crc32), actual in zip(segments, found, strict=True):
            if actual != crc32:
                raise BadCheckpoint(
                    f"expected {name} as it was written, got a damaged file or one of another "
                    "checkpoint"
                )


def _crc32_of(path: Path, segment: int) -> int:
    piece, crc32, rest = bytearray(_PIECE_BYTES), 0, SEGMENT_BYTES
    with open_regular(path) as file:
        file.seek(segment * SEGMENT_BYTES)
        while rest and (count := file.readinto(memoryview(piece)[:rest])):
            crc32 = zlib.crc32(memoryview(piece)[:count], crc32)
            rest -= count
    return crc32
