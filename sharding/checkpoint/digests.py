"""Checksums of files, made while they are written.

A thread reads behind the writer, from the system's cache, so that the sum costs no time where there
is a second core: it runs while the writer copies, and while the disk takes the file.
"""

from __future__ import annotations

import io
import os
import threading
import zlib
from typing import TYPE_CHECKING

from .stored import Digest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CHUNK_BYTES = 1 << 20


class DigestedFile(io.FileIO):
    """A new file, written from the first byte to the last; once it is closed `digest` is known.

    Raises:
        FileExistsError: there is one, or a link, which is not followed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "x+")
        self._crc32 = 0
        self._num_bytes = 0
        self._is_complete = False
        self._changed = threading.Condition()
        self._error: OSError | None = None
        self._reader = threading.Thread(target=self._read_behind, daemon=True)
        self._reader.start()

    def write(self, content: ReadableBuffer) -> int:
        """Append `content`, or the first part of it; returns how many bytes."""
        written = super().write(content)
        with self._changed:
            self._num_bytes += written
            self._changed.notify()
        return written

    def close(self) -> None:
        """Wait for the sum, then close: what reads behind uses this file's descriptor."""
        if not self.closed:
            with self._changed:
                self._is_complete = True
                self._changed.notify()
            self._reader.join()
        super().close()

    def digest(self) -> Digest:
        """Size and checksum of all that was written.

        Raises:
            OSError: it could not be read.
        """
        assert self.closed, "the sum may not be complete"
        if self._error is not None:
            raise self._error
        return Digest(self._num_bytes, self._crc32)

    def _read_behind(self) -> None:
        buffer, place = memoryview(bytearray(_CHUNK_BYTES)), 0
        try:
            while (end := self._wait_beyond(place)) > place:
                part = buffer[: end - place]
                got = os.preadv(self.fileno(), [part], place)
                if not got:
                    raise OSError(f"the file ends at byte {place} of {end} that were written")
                self._crc32 = zlib.crc32(part[:got], self._crc32)
                place += got
        except OSError as error:
            self._error = error

    def _wait_beyond(self, place: int) -> int:
        """How many bytes were written: more than `place`, or all."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes > place or self._is_complete)
            return self._num_bytes
