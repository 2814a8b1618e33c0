"""Opens and reads files of a checkpoint, which somebody else may have put there."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

from .. import untrusted
from .stored import BadCheckpoint

_MAX_INDEX_BYTES = 1 << 30


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
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise BadCheckpoint(f"expected a file {path.name}, got links in a circle") from error
    except ValueError as error:
        raise BadCheckpoint(str(error)) from error


def read_whole(path: Path) -> bytes:
    """The content of `path`, an index.

    Raises:
        BadCheckpoint: there is no such regular file, or it is too large to be one.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > _MAX_INDEX_BYTES:
            raise BadCheckpoint(
                f"expected {path.name} of at most {_MAX_INDEX_BYTES} bytes, got {num_bytes}"
            )
        return file.read() or b""  # None: what only looks like a file has nothing to say now
