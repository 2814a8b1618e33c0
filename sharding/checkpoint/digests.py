"""Checksums of files, made while they are written."""

from __future__ import annotations

import io
import os
import zlib
from typing import TYPE_CHECKING

from .stored import Digest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class DigestedFile(io.BufferedWriter):
    """A new file, written from the first byte to the last; `digest` tells what was written so far.

    Raises:
        FileExistsError: there is one, or a link, which is not followed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "x"))
        self._num_bytes = 0
        self._crc32 = 0

    def write(self, content: ReadableBuffer) -> int:
        """Append `content`."""
        self._crc32 = zlib.crc32(content, self._crc32)
        written = super().write(content)
        self._num_bytes += written
        return written

    def digest(self) -> Digest:
        """Size and checksum of what was written."""
        return Digest(self._num_bytes, self._crc32)
