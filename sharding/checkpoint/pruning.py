"""Removes checkpoints that are no longer wanted, and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ..arguments import require_number
from ..storage import Location, Url, entries_of
from .background import wait_for_save
from .folder import partial_of, resolve
from .manifest import MANIFEST_FILE
from .url_folder import REMOVING_FILE, order_of, remove_checkpoint


def remove_old_checkpoints(folder: str | os.PathLike[str], *, keep: int) -> list[Location]:
    """Remove all but the last `keep` checkpoints in `folder`; returns which.

    They are folders directly in `folder`, a path or a URL, that `save_checkpoint` wrote, in the
    order in which they were written. Links, hidden folders and all else stay. An asynchronous save
    of this process is waited for. One rank calls it, after a save; where several do, the first to
    come removes.

    Raises:
        TypeError, ValueError: `folder` is no path, or `keep` no whole number from 1 on.
        OSError: a checkpoint cannot be removed.
    """
    require_number("keep", keep, "a whole number >= 1", lambda n: isinstance(n, int) and n >= 1)
    place = resolve(folder)
    wait_for_save()
    if isinstance(place, Url):
        return _remove_old_at(place, keep)
    written: dict[Path, int] = {}
    for path in place.iterdir() if place.is_dir() else ():
        manifest = path / MANIFEST_FILE
        with contextlib.suppress(FileNotFoundError):
            if not (path.name.startswith(".") or path.is_symlink()) and manifest.is_file():
                written[path] = manifest.stat().st_mtime_ns
    ordered = sorted(written, key=lambda path: (written[path], path.name))
    return [path for path in ordered[: len(ordered) - keep] if _remove(path)]


def _remove_old_at(place: Url, keep: int) -> list[Location]:
    names = {
        place / name: [*entries_of(place / name)]
        for name, is_folder in entries_of(place).items()
        if is_folder and not name.startswith(".")
    }
    for folder, inside in names.items():
        if REMOVING_FILE in inside and MANIFEST_FILE not in inside:
            remove_checkpoint(folder)
    saved = [folder for folder, inside in names.items() if MANIFEST_FILE in inside]
    ordered = sorted(saved, key=lambda folder: (order_of(names[folder]), folder.name))
    for folder in ordered[: len(ordered) - keep]:
        remove_checkpoint(folder)
    return [*ordered[: len(ordered) - keep]]


def _remove(path: Path) -> bool:
    aside = partial_of(path)
    if os.path.lexists(aside):  # of a killed save, or of a removal
        shutil.rmtree(aside, ignore_errors=True)
    try:
        path.rename(aside)  # under this name nobody reads it, wherever the removal ends
    except FileNotFoundError:
        return False
    shutil.rmtree(aside)
    return True
