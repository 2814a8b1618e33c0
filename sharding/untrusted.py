"""Reads what somebody else may have put there: only regular files, only JSON, never waiting."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path
from typing import Any

_MAX_LINE = 2_000
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def open_regular(path: Path) -> io.FileIO:
    """Open `path`, or the file that it links to, for reading.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is a folder, a pipe, a device or the like.
        OSError: it cannot be opened.
    """
    # Looked at before: opening a device may act on it. What is there may have changed since, and a
    # pipe without a writer must not keep us.
    _require_regular(path.stat(), path)
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        _require_regular(os.fstat(file.fileno()), path)
    except ValueError:
        file.close()
        raise
    return file


def read_at(file: io.FileIO, memory: memoryview, position: int) -> memoryview:
    """Fill `memory` from byte `position` of `file` on; returns the rest, which lies beyond its end.

    Raises:
        OSError: it cannot be read.
    """
    while memory and (count := os.preadv(file.fileno(), [memory], position)):
        memory, position = memory[count:], position + count
    return memory


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ValueError(f"expected a file {shown(path.name)}, got {kind}")


def parse_object(content: bytes) -> dict[str, Any]:
    """The JSON object in `content`, in UTF-8, with finite numbers and every name once.

    Raises:
        ValueError: it is none.
    """
    try:
        parsed = json.loads(
            content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse
        )
    except RecursionError as error:
        raise ValueError("objects nested too deeply") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"a {type(parsed).__name__} instead of an object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"'{shown(name)}' twice in one object")
        found[name] = value
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant}, which is no number of JSON")


def shown(value: object) -> str:
    """`value` for a message, with escapes where it could not be printed."""
    text = str(value)
    return text if text.isprintable() else ascii(text)


def one_line(error: BaseException) -> str:
    """What `error` says in one line, not longer than a screen, with escapes where it could not be
    printed.
    """
    text = " ".join(str(error).split())
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]} ..."


def sync_folder(folder: Path) -> None:
    """Bring the names in `folder` to disk, so that a power cut does not undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
