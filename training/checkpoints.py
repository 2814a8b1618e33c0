"""The folder of a run's checkpoints, which of them a run may resume from, and which are kept.

DIR/step-00000020/       written by `save_checkpoint`, all of it or nothing
DIR/step-00000020.json   written last, see `step_file`; a checkpoint without it is not complete and
                         is never read

DIR is a path or a URL; at a URL nothing but the order in which objects are written is relied on.
"""

import contextlib
import re
from collections.abc import Callable, Mapping

from ..sharding.storage import (
    Location,
    entries_of,
    is_file,
    location_of,
    make_folder,
    remove_all,
)
from .errors import CheckpointError
from .launch.ranks import wait_for_all
from .step_file import (
    INDEX_FILE,
    STEP_DIGITS,
    Defining,
    SavedRun,
    folder_name,
    read_step_file,
    require_same_index,
    step_file_of,
    write_step_file,
)

MAX_SHOWN = 12
MAX_SHOWN_CHARACTERS = 80

_STEP = re.compile(f"step-[0-9]{{{STEP_DIGITS}}}", re.ASCII)
_LEFTOVER = re.compile(rf"\.{_STEP.pattern}(\.json)?\.partial", re.ASCII)
_REPLACED = re.compile(rf"\.({_STEP.pattern})\.replaced", re.ASCII)


def newest_checkpoint(folder: str) -> SavedRun | None:
    """Return the complete checkpoint with the highest step, None where there is none.

    Raises:
        CheckpointError: the file beside it cannot be read as ours, or the folder not at all.
    """
    complete = _complete(_readable(folder))
    return read_step_file(complete[-1]) if complete else None


def checkpoint_to_resume(folder: str, defining: Defining, last_step: int) -> SavedRun:
    """Return the newest complete checkpoint, if it can go on as the run that `defining` describes.

    Raises:
        CheckpointError: there is none, it is of another run or not as it was saved, or the run is
            over already.
    """
    saved = newest_checkpoint(folder)
    if saved is None:
        raise CheckpointError(
            f"expected a complete checkpoint in {folder} to resume from, got none; leave out "
            "--resume to start anew"
        )
    pairs = [
        (name, saved.defining.get(name), defining.get(name))
        for name in sorted({*defining, *saved.defining})
    ]
    differences = [
        f"{_shown(name)}: {_shown(there)} there, {_shown(now)} now"
        for name, there, now in pairs
        if there != now
    ]
    if differences:
        raise CheckpointError(
            f"expected the run that {saved.path} was saved by, got another "
            f"({'; '.join(differences[:MAX_SHOWN])}); give the same options and data, or another "
            "--checkpoint DIR"
        )
    if saved.step >= last_step:
        raise CheckpointError(
            f"expected a checkpoint before step {last_step}, got {saved.path}: the run is "
            "complete, nothing to resume"
        )
    require_same_index(saved)
    return saved


def refuse_to_mix(folder: str) -> None:
    """Refuse a folder that holds checkpoints already when the run does not resume from them.

    Raises:
        CheckpointError: there is a complete checkpoint, or `folder` is a file.
    """
    if is_file(_readable(folder)):
        raise CheckpointError(
            f"expected a folder for --checkpoint, got the file {folder}; give another path"
        )
    saved = newest_checkpoint(folder)
    if saved is not None:
        raise CheckpointError(
            f"expected no checkpoints in {folder} yet, got one of step {saved.step}; pass "
            "--resume to go on from it, or another --checkpoint DIR"
        )


def save_run(
    saved: SavedRun, save: Callable[[Location], None], *, is_first: bool, keep: int | None = None
) -> None:
    """Save one checkpoint; every rank calls this. `save` writes the folder it is given.

    With `keep`, all complete checkpoints but the last `keep` are removed once this one is complete.
    """
    if is_first:
        make_folder(saved.path.parent)
        _remove_leftovers(saved.path.parent)
        _begin_replacing(saved)
    wait_for_all(f"before saving {saved.path.name}")
    save(saved.path)
    if is_first:
        write_step_file(saved)
        if keep is not None:
            _remove_older(saved.path.parent, keep)
    wait_for_all(f"after saving {saved.path.name}")


def checkpoint_path(folder: str, step: int) -> Location:
    """Return where the checkpoint of a step lies."""
    return location_of(folder) / folder_name(step)


def _shown(value: object) -> str:
    """`value` on one line: what a file says may be of any length."""
    return " ".join(str(value)[:MAX_SHOWN_CHARACTERS].split())


def _readable(folder: str) -> Location:
    """The location of `folder`, whose storage answers."""
    try:
        location = location_of(folder)
        entries_of(location)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"expected a folder for --checkpoint that can be read, got {folder}: {error}; give "
            "another one"
        ) from error
    return location


def _complete(folder: Location) -> list[Location]:
    """The complete checkpoints in `folder`, in the order of their steps."""
    found = entries_of(folder)
    return [path for path in _steps(folder, found) if step_file_of(path).name in found]


def _steps(folder: Location, found: Mapping[str, bool]) -> list[Location]:
    names = (name for name, is_folder in found.items() if is_folder and _STEP.fullmatch(name))
    return [folder / name for name in sorted(names)]


def _begin_replacing(saved: SavedRun) -> None:
    """Have what `saved` replaces, if anything, either stay complete or not be taken for it."""
    file = step_file_of(saved.path)
    if not file.is_file():
        return
    try:
        before = read_step_file(saved.path)
        is_ours = before.defining == saved.defining
    except CheckpointError:
        is_ours = False
    if is_ours:
        # It may be all that there is of this run, and its successor takes long to write.
        write_step_file(before, is_being_replaced=True)
    else:
        file.unlink(missing_ok=True)


def _remove_older(folder: Location, keep: int) -> None:
    """Remove all but the last `keep` complete checkpoints, and older ones that a kill left half."""
    kept = [path.name for path in _complete(folder)[-keep:]]
    for path in _steps(folder, entries_of(folder)):
        if path.name not in kept and path.name < kept[-1]:
            # What cannot be removed is no reason to end a training, and the next save tries again.
            with contextlib.suppress(OSError):
                # First: without it nobody reads a folder that a kill leaves half removed.
                step_file_of(path).unlink(missing_ok=True)
                remove_all(path)


def _remove_leftovers(folder: Location) -> None:
    """Remove what saves that were killed have begun; this run saves nothing else at this time."""
    for name in entries_of(folder):
        if _LEFTOVER.fullmatch(name) or _is_replaced(folder / name):
            with contextlib.suppress(OSError):
                remove_all(folder / name)


def _is_replaced(path: Location) -> bool:
    """Whether `path` is what a checkpoint was before another one took its name, which is there."""
    match = _REPLACED.fullmatch(path.name)
    # Where the new one is not there, this is what there is of that step.
    return match is not None and (path.with_name(match[1]) / INDEX_FILE).is_file()
