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
from typing import TYPE_CHECKING

from ..storage import Location, create_file
from .files import open_regular
from .stored import SEGMENT_BYTES, BadCheckpoint, Digest, Ints

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LARGE_BYTES = 1 << 20  # below, a thread costs more than it saves
_MAX_THREADS = 8


class DigestedFile(io.RawIOBase):
    """A new file, written from the first byte to the last; `digest` tells what was written so far,
    `error` why it took no more.
    """

    def __init__(self, path: Location) -> None:
        """Make it.

        Raises:
            FileExistsError: there is one, or a link, which is not followed. (A URL's is replaced.)
        """
        super().__init__()
        self.error: BaseException | None = None
        self._file = create_file(path)
        self._num_bytes = 0
        self._crc32s: Ints = ()

    def writable(self) -> bool:
        """It is written."""
        return True

    def tell(self) -> int:
        """How many bytes were written."""
        return self._num_bytes

    def write(self, content: ReadableBuffer) -> int:
        """Append `content`, or the first part of it; returns how many bytes."""
        try:
            return self._write(memoryview(content).cast("B"))
        except BaseException as error:
            self.error = error
            raise

    def _write(self, view: memoryview) -> int:
        if len(view) < _LARGE_BYTES:
            written = self._file.write(view)
            self._crc32s = self._with(view[:written])
        else:
            crc32s: list[Ints] = []
            # No pool: those take no work once the interpreter ends, when a save may be under way.
            summing = threading.Thread(target=lambda: crc32s.append(self._with(view)))
            summing.start()
            try:
                written = self._file.write(view)
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

    def abandon(self) -> None:
        """Before `close`: what was written need not be kept."""
        self._file.abandon()

    def close(self) -> None:
        """Have it be kept, on disk or in its storage."""
        if not self.closed:
            try:
                self._file.close()
            finally:
                super().close()

    def digest(self) -> Digest:
        """Size and checksum of what was written."""
        return Digest(self._num_bytes, self._crc32s)


def identities_of(
    folder: Location, sizes: Mapping[str, int], *, exact: bool
) -> tuple[tuple[int, ...], ...]:
    """The identity of each file of `folder` that `sizes` names, which has as many bytes, or, unless
    `exact`, at least as many.

    Raises:
        BadCheckpoint: one is missing or has another size.
        OSError: one cannot be opened.
    """
    identities = []
    for name, size in sorted(sizes.items()):
        with open_regular(folder / name) as file:
            identities.append(file.identity)
        if file.num_bytes < size or (exact and file.num_bytes > size):
            expected = f"{size} bytes" if exact else f"at least {size} bytes"
            raise BadCheckpoint(f"expected {name} of {expected}, got {file.num_bytes}")
    return tuple(identities)


def require_sums(
    folder: Location, expected: Mapping[str, Digest], rank: int, world_size: int
) -> None:
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


def _crc32_of(path: Location, segment: int) -> int:
    crc32, position = 0, segment * SEGMENT_BYTES
    with open_regular(path) as file:
        end = min(position + SEGMENT_BYTES, file.num_bytes)
        piece = bytearray(min(file.piece_bytes, end - position))
        while position < end:
            wanted = memoryview(piece)[: end - position]
            rest = file.read_at(wanted, position)
            if len(rest) == len(wanted):
                break
            found = wanted[: len(wanted) - len(rest)]
            crc32, position = zlib.crc32(found, crc32), position + len(found)
    return crc32
