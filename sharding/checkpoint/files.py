"""Opens and reads files of a checkpoint, which somebody else may have put there."""

from __future__ import annotations

import errno

from ..storage import File, Location, open_file
from .stored import BadCheckpoint

_MAX_INDEX_BYTES = 1 << 30


def open_regular(path: Location) -> File:
    """Open the file at `path` for reading.

    Raises:
        BadCheckpoint: there is no such file, or it is a folder, a pipe, a device or the like.
        OSError: it cannot be opened.
    """
    try:
        return open_file(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadCheckpoint(f"expected a file {path.name}, got none") from error
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise BadCheckpoint(f"expected a file {path.name}, got links in a circle") from error
    except ValueError as error:
        raise BadCheckpoint(str(error)) from error


def read_whole(path: Location) -> bytes:
    """The content of `path`, an index.

    Raises:
        BadCheckpoint: there is no such regular file, or it is too large to be one.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        if file.num_bytes > _MAX_INDEX_BYTES:
            raise BadCheckpoint(
                f"expected {path.name} of at most {_MAX_INDEX_BYTES} bytes, got {file.num_bytes}"
            )
        content = bytearray(file.num_bytes)
        rest = file.read_at(memoryview(content), 0)
        return bytes(content[: len(content) - len(rest)])
