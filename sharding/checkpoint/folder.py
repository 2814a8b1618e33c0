"""The folder of a checkpoint: its path, whether it can be made, how it replaces another as a whole.

    <name>             the checkpoint
    .<name>.partial    beside it, what is being written; renamed once it is complete
    .<name>.replaced   the one before, until the new one has its name; read after a crash meanwhile

`target` is always what `resolve` made of the user's path. Every rank may read; the first of a
model's ranks alone makes, checks and renames. No link is followed below `target`'s parent, and none
at its own place unless it leads to a checkpoint: what is written and removed lies in these folders.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ..arguments import kind_of
from ..messages import listed
from ..storage import Location, Url, entries_of, location_of
from ..untrusted import shown, sync_folder
from .manifest import MANIFEST_FILE
from .opening import indices_of

_OWN = re.compile(r"__\d+_\d+\.distcp|\.metadata|sidestream\.json")


def resolve(path: object) -> Location:
    """The absolute path of the checkpoint that the user calls `path`, `~` being the user's home, or
    its URL.

    Raises:
        TypeError: it is no path.
        ValueError: it cannot be one, or is that of a folder without a name, or a URL for which
            there is no driver.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"path: expected text or a pathlib.Path, got {kind_of(path)}")
    try:
        location = location_of(path)
        if isinstance(location, Url):
            assert location.driver is not None, "or it has raised"
            return location
    except ValueError as error:
        raise ValueError(f"path: {error}") from error
    return _resolved(location, path)


def resolve_path(path: object) -> Path:
    """`resolve(path)` where only this machine's file systems will do.

    Raises:
        TypeError: it is no path.
        ValueError: as `resolve`, or it is a URL.
    """
    location = resolve(path)
    if isinstance(location, Url):
        raise ValueError(
            f"path: expected the path of a folder, got the URL {shown(location)}; save there and "
            "copy the files, or use save_checkpoint, which takes URLs"
        )
    return location


def _resolved(location: Path, path: str | os.PathLike[str]) -> Path:
    try:
        target = location.expanduser().resolve() if os.fspath(path) else Path("/")
    except (ValueError, RuntimeError, OSError) as error:  # a zero byte, no home, links in a circle
        raise ValueError(f"path: expected the path of a folder, got {path!r}: {error}") from error
    if not target.name:
        raise ValueError(f"path: expected a folder with a name, got {path!r}; name the checkpoint")
    return target


def resolve_for_writing(path: object) -> Location:
    """`resolve(path)`, where that replaces nothing but a checkpoint through a link.

    Raises:
        FileExistsError: it is a link to something else.
        ValueError: its name is kept for what is being written.
    """
    target = resolve(path)
    if isinstance(target, Url):
        return target
    given = Path(str(path)).expanduser()
    if target.name.startswith(".") and target.suffix in (".partial", ".replaced"):
        raise ValueError(
            f"path: expected a name that is not made from another checkpoint's, got "
            f"{shown(target.name)}, which saving beside it would remove; give another path"
        )
    if os.path.islink(given) and _found(target) is None:
        raise FileExistsError(
            f"path: expected a checkpoint to replace or nothing at {shown(given)}, got a link to "
            f"{shown(target)}, which is no checkpoint; remove the link, or give another path"
        )
    return target


def partial_of(target: Path) -> Path:
    """The folder that the checkpoint is written to."""
    return target.with_name(f".{target.name}.partial")


def find(target: Location) -> Location:
    """The folder to read for the checkpoint at `target`.

    Raises:
        FileNotFoundError: there is none.
    """
    if isinstance(target, Path) and (folder := _found(target)) is not None:
        return folder
    if indices_of(target):
        return target  # whoever opens it will say what is wrong with it
    found = "a folder without one" if entries_of(target) else "nothing"
    if isinstance(target, Path) and target.exists():
        found = "a folder without one" if target.is_dir() else "a file"
    raise FileNotFoundError(
        f"path: expected a checkpoint at {shown(target)}, got {found}; give the folder that "
        "save_checkpoint wrote"
    )


def _found(target: Path) -> Path | None:
    return next(filter(_is_checkpoint, (target, _replaced_of(target))), None)


def prepare(target: Path, rank: int, take: Callable[[], None]) -> None:
    """Make the folder to write to, as `rank`, and finish or undo what a crash left.

    `take` is called once nothing stands in the way.

    Raises:
        FileExistsError: what is at `target` is no checkpoint, or more, or `target` lies in one.
        OSError: the folder cannot be made.
    """
    partial, replaced = partial_of(target), _replaced_of(target)
    try:
        if not os.path.lexists(target) and _is_checkpoint(replaced):
            replaced.rename(target)
        require_room(target)
        take()
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        partial.mkdir()
    except (OSError, RecursionError) as error:
        if isinstance(error, FileExistsError) and error.errno is None:
            raise  # our own, from `require_room`
        raise OSError(
            f"path: expected a place where rank {rank} can make a folder, got {shown(target)}, "
            f"where it cannot ({error}); give a path that this user can write to"
        ) from error


def require_room(target: Path) -> None:
    """Check that a checkpoint at `target` replaces nothing but another.

    Raises:
        FileExistsError: something else would go with it, or it would go with another.
    """
    around = next((folder for folder in target.parents if (folder / MANIFEST_FILE).is_file()), None)
    if around is not None:
        raise FileExistsError(
            f"path: expected a folder outside other checkpoints, got {shown(target)} inside that "
            f"at {shown(around)}, which is replaced as a whole; give every model a folder of its "
            f"own, such as {shown(around / 'generator')} and {shown(around / 'critic')}, and none "
            "the one around them"
        )
    if (obstacle := _obstacle(target)) is not None:
        raise FileExistsError(
            f"path: expected a checkpoint to replace or nothing at {shown(target)}, got {obstacle}"
        )


def publish(target: Path) -> None:
    """Put what was written in its place, and remove the checkpoint that was there.

    Raises:
        FileExistsError: something else is there by now.
    """
    partial, replaced = partial_of(target), _replaced_of(target)
    sync_folder(partial)
    require_room(target)
    _remove(replaced)
    if target.exists():
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    sync_folder(target.parent)
    _remove(replaced, ignore_errors=True)


def discard_partial(target: Path) -> None:
    """Remove what was written and not published, if anything was."""
    _remove(partial_of(target), ignore_errors=True)


def _replaced_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _is_checkpoint(folder: Path) -> bool:
    """Whether `folder` itself, no link to one, is a checkpoint's."""
    return not os.path.islink(folder) and any(path.is_file() for path in indices_of(folder))


def _obstacle(target: Path) -> str | None:
    """What is at `target` and would be lost, and the way out; None where that is nothing."""
    if target.is_symlink():
        return "a link; remove it, or give another path"
    if not target.exists():
        return None
    if not target.is_dir():
        return "a file; give another path"
    folders = [part for part in target.iterdir() if part.is_dir() and not part.is_symlink()]
    inside = next((part for part in sorted(folders) if _is_checkpoint(part)), None)
    if inside is not None:
        return (
            f"a folder around other checkpoints, such as {shown(inside)}; give a sub-folder beside "
            "them"
        )
    others = [part.name for part in target.iterdir() if not _OWN.fullmatch(part.name)]
    if others or (not _is_checkpoint(target) and any(target.iterdir())):
        return (
            f"other files ({listed([shown(name) for name in sorted(others)])}); give another path"
        )
    return None


def _remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove the folder, file or link at `path`, if there is one; what a link leads to stays."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=ignore_errors)
        return
    with contextlib.suppress(OSError if ignore_errors else FileNotFoundError):
        path.unlink()
