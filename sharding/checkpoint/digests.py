"""Checksums of files: made while they are written, compared before they are read.

A large piece is summed by a thread while the system copies it, so that the sum costs little time
where there is a second core.
"""

from __future__ import annotations

import io
import os
import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from .files import open_regular
from .stored import SEGMENT_BYTES, BadCheckpoint, Digest, Ints

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LARGE_BYTES = 1 << 20  # below, a thread costs more than it saves
_PIECE_BYTES = 1 << 18  # stays in the cache between its reading and its sum
_MAX_THREADS = 8


class DigestedFile(io.FileIO):
    """A new file, written from the first byte to the last; `digest` tells what was written so far,
    `error` why it took no more.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Make it.

        Raises:
            FileExistsError: there is one, or a link, which is not followed.
        """
        self.error: BaseException | None = None
        super().__init__(path, "x")
        self._num_bytes = 0
        self._crc32s: Ints = ()

    def write(self, content: ReadableBuffer) -> int:
        """Append `content`, or the first part of it; returns how many bytes."""
        try:
            return self._write(memoryview(content).cast("B"))
        except BaseException as error:
            self.error = error
            raise

    def _write(self, view: memoryview) -> int:
        if len(view) < _LARGE_BYTES:
            written = super().write(view)
            self._crc32s = self._with(view[:written])
        else:
            crc32s: list[Ints] = []
            # No pool: those take no work once the interpreter ends, when a save may be under way.
            summing = threading.Thread(target=lambda: crc32s.append(self._with(view)))
            summing.start()
            try:
                written = super().write(view)
            finally:
                summing.join()  # `content` is only there during this call
            self._crc32s = crc32s[0] if written == len(view) else self._with(view[:written])
        self._num_bytes += written
        return written

    def _with(self, content: memoryview) -> Ints:
        """The sums with `content` behind what was written."""
        crc32s, place = list(self._crc32s), self._num_bytes
        while content:
            if place % SEGMENT_BYTES == 0:
                crc32s.append(0)
            piece = content[: SEGMENT_BYTES - place % SEGMENT_BYTES]
            crc32s[-1] = zlib.crc32(piece, crc32s[-1])
            place, content = place + len(piece), content[len(piece) :]
        return tuple(crc32s)

    def close(self) -> None:
        """Bring the file to disk, then close it."""
        if not self.closed:
            os.fsync(self.fileno())
        super().close()

    def digest(self) -> Digest:
        """Size and checksum of what was written."""
        return Digest(self._num_bytes, self._crc32s)


def statuses_of(folder: Path, sizes: Mapping[str, int], *, exact: bool) -> list[os.stat_result]:
    """The status of each file of `folder` that `sizes` names, which has as many bytes, or, unless
    `exact`, at least as many.

    Raises:
        BadCheckpoint: one is missing or has another size.
        OSError: one cannot be opened.
    """
    statuses = []
    for name, size in sorted(sizes.items()):
        with open_regular(folder / name) as file:
            status = os.fstat(file.fileno())
        if status.st_size < size or (exact and status.st_size > size):
            expected = f"{size} bytes" if exact else f"at least {size} bytes"
            raise BadCheckpoint(f"expected {name} of {expected}, got {status.st_size}")
        statuses.append(status)
    return statuses


def require_sums(folder: Path, expected: Mapping[str, Digest], rank: int, world_size: int) -> None:
    """Compare this rank's share of the sums of files of `folder`, whose sizes are right.

    Raises:
        BadCheckpoint: one is missing or another one.
        OSError: one cannot be read.
    """
    segments = [
        (name, place, crc32)
        for name, digest in sorted(expected.items())
        for place, crc32 in enumerate(digest.crc32s)
    ][rank::world_size]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda segment: _crc32_of(folder / segment[0], segment[1]), segments)
        for (name, _, crc32), actual in zip(segments, found, strict=True):
            if actual != crc32:
                pool.shutdown(wait=False, cancel_futures=True)  # the rest need not be read
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
