"""Checksums of files, made while they are written.

A large piece is summed by a thread while the system copies it, so that the sum costs little time
where there is a second core.
"""

from __future__ import annotations

import io
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from .stored import SEGMENT_BYTES, Digest, Ints

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LARGE_BYTES = 1 << 20  # below, a thread costs more than it saves


class DigestedFile(io.FileIO):
    """A new file, written from the first byte to the last; `digest` tells what was written so far.

    Raises:
        FileExistsError: there is one, or a link, which is not followed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "x")
        self._num_bytes = 0
        self._crc32s: Ints = ()
        self._summing = ThreadPoolExecutor(1)

    def write(self, content: ReadableBuffer) -> int:
        """Append `content`, or the first part of it; returns how many bytes."""
        view = memoryview(content).cast("B")
        if len(view) < _LARGE_BYTES:
            written = super().write(view)
            self._crc32s = self._with(view[:written])
        else:
            summed = self._summing.submit(self._with, view)
            try:
                written = super().write(view)
            finally:
                crc32s = summed.result()  # `content` is only there during this call
            self._crc32s = crc32s if written == len(view) else self._with(view[:written])
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
        """Close the file."""
        self._summing.shutdown()
        super().close()

    def digest(self) -> Digest:
        """Size and checksum of what was written."""
        return Digest(self._num_bytes, self._crc32s)
