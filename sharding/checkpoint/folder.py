"""The folder of a checkpoint: its path, whether it can be made, how it replaces another as a whole.

    <name>             the checkpoint
    .<name>.partial    beside it, what is being written; renamed once it is complete
    .<name>.replaced   the one before, until the new one has its name; read after a crash meanwhile

`target` is always what `resolve` made of the user's path. Every rank may read; the first of a
model's ranks alone makes, checks and renames.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..arguments import kind_of

# As in `checkpoint`, what imports torch.distributed.checkpoint waits until it is needed.


def resolve(path: str | os.PathLike[str]) -> Path:
    """The absolute path of the checkpoint that the user calls `path`.

    Raises:
        TypeError: it is no path.
        ValueError: it cannot be one, or is that of a folder without a name.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected text or a pathlib.Path, got {kind_of(path)}")
    try:
        target = Path(path).resolve() if os.fspath(path) else Path("/")
    except ValueError as error:  # a zero byte
        raise ValueError(f"path: expected the path of a folder, got {path!r}: {error}") from error
    if not target.name:
        raise ValueError(f"path: expected a folder with a name, got {path!r}; name the checkpoint")
    return target


def partial_of(target: Path) -> Path:
    """The folder that the checkpoint is written to."""
    return target.with_name(f".{target.name}.partial")


def find(target: Path) -> Path:
    """The folder to read for the checkpoint at `target`.

    Raises:
        FileNotFoundError: there is none.
    """
    from .reader import METADATA_FILE

    for folder in (target, _replaced_of(target)):
        if (folder / METADATA_FILE).is_file():
            return folder
    found = (
        "a folder without one" if target.is_dir() else "a file" if target.exists() else "nothing"
    )
    raise FileNotFoundError(
        f"path: expected a checkpoint at {target}, got {found}; give the folder that "
        "save_checkpoint wrote"
    )


def prepare(target: Path, rank: int) -> None:
    """Make the folder to write to, as `rank`, and finish or undo what a crash left.

    Raises:
        FileExistsError: what is at `target` is no checkpoint.
        OSError: the folder cannot be made.
    """
    try:
        obstacle = _make_room(target)
    except OSError as error:
        raise OSError(
            f"path: expected a place where rank {rank} can make a folder, got {target}, where "
            f"it cannot ({error}); give a path that this user can write to"
        ) from error
    if obstacle is not None:
        raise FileExistsError(
            f"path: expected a checkpoint to replace or nothing at {target}, got {obstacle}; "
            "give another path"
        )


def require_whole(target: Path, rank: int) -> None:
    """Check that `rank`, this one, finds what all ranks have written.

    Raises:
        RuntimeError: something is missing.
    """
    from .reader import CheckpointReader

    if lack := CheckpointReader(partial_of(target)).lack():
        raise RuntimeError(
            f"path: expected a folder that all ranks write to, got {target}, where rank {rank} "
            f"does not find what another one wrote ({lack}); give every rank the same path, on a "
            "file system that they share. Nothing was saved"
        )


def publish(target: Path) -> None:
    """Put what was written in its place, and remove the checkpoint that was there."""
    partial, replaced = partial_of(target), _replaced_of(target)
    _sync(partial)
    if target.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard_partial(target: Path) -> None:
    """Remove what was written and not published, if anything was."""
    shutil.rmtree(partial_of(target), ignore_errors=True)


def _replaced_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _make_room(target: Path) -> str | None:
    """Make `target`'s partial folder; returns what stands at `target` that is no checkpoint."""
    from .reader import METADATA_FILE

    partial, replaced = partial_of(target), _replaced_of(target)
    if not target.exists() and replaced.exists():
        replaced.rename(target)
    if target.exists() and not target.is_dir():
        return "a file"
    if target.exists() and not (target / METADATA_FILE).exists() and any(target.iterdir()):
        return "other files"
    target.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    return None


def _sync(folder: Path) -> None:
    """Bring the names in `folder` to disk, so that a power cut does not undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
