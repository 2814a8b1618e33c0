"""The folder of a run's checkpoints, and which of them a run may resume from.

DIR/step-00000020/       written by `save_checkpoint`, all of it or nothing
DIR/step-00000020.json   step, first loss and the options that define the run; written last,
                         so a checkpoint without it is not complete and is never read
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError
from .ranks import wait_for_all

FORMAT_VERSION = 1
STEP_DIGITS = 8


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A complete checkpoint: where it is, after which step, and of which run."""

    path: Path
    step: int
    world_size: int
    loss_first: float
    defining: Mapping[str, str | int | float]


def newest_checkpoint(folder: str) -> SavedRun | None:
    """Return the complete checkpoint with the highest step, None where there is none.

    Raises:
        CheckpointError: the file beside it cannot be read as ours.
    """
    files = (
        []
        if not os.path.isdir(folder)
        else [
            file
            for file in sorted(Path(folder).glob(f"step-{'[0-9]' * STEP_DIGITS}.json"))
            if file.with_suffix("").is_dir()
        ]
    )
    if not files:
        return None
    newest = files[-1]
    try:
        content = json.loads(newest.read_text())
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {content['format_version']}, not {FORMAT_VERSION}")
        return SavedRun(
            path=newest.with_suffix(""),
            step=int(content["step"]),
            world_size=int(content["world_size"]),
            loss_first=float(content["loss_first"]),
            defining=dict(content["defining"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"expected {newest} as this release writes it, got {error!r}; move it away to resume "
            "from an older one"
        ) from error


def checkpoint_to_resume(
    folder: str, defining: Mapping[str, str | int | float], last_step: int
) -> SavedRun:
    """Return the newest complete checkpoint, if it can go on as the run that `defining` describes.

    Raises:
        CheckpointError: there is none, it is of another run, or the run is over already.
    """
    saved = newest_checkpoint(folder)
    if saved is None:
        raise CheckpointError(
            f"expected a complete checkpoint in {folder} to resume from, got none; leave out "
            "--resume to start anew"
        )
    names = sorted({*defining, *saved.defining})
    differences = [
        f"{name}: {saved.defining.get(name)} there, {defining.get(name)} now"
        for name in names
        if saved.defining.get(name) != defining.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"expected the run that {saved.path} was saved by, got another "
            f"({'; '.join(differences)}); "
            "give the same options and data, or another --checkpoint DIR"
        )
    if saved.step >= last_step:
        raise CheckpointError(
            f"expected a checkpoint before step {last_step}, got {saved.path}: the run is "
            "complete, nothing to resume"
        )
    return saved


def refuse_to_mix(folder: str) -> None:
    """Refuse a folder that holds checkpoints already when the run does not resume from them.

    Raises:
        CheckpointError: there is a complete checkpoint, or `folder` is a file.
    """
    if os.path.isfile(folder):
        raise CheckpointError(
            f"expected a folder for --checkpoint, got the file {folder}; give another path"
        )
    saved = newest_checkpoint(folder)
    if saved is not None:
        raise CheckpointError(
            f"expected no checkpoints in {folder} yet, got one of step {saved.step}; pass "
            "--resume to go on from it, "
            "or another --checkpoint DIR"
        )


def save_run(saved: SavedRun, save: Callable[[Path], None], *, is_first: bool) -> None:
    """Save one checkpoint; every rank calls this. `save` writes the folder it is given."""
    if is_first:
        saved.path.parent.mkdir(parents=True, exist_ok=True)
    wait_for_all(f"before saving {saved.path.name}")
    save(saved.path)
    if is_first:
        content = {
            "format_version": FORMAT_VERSION,
            "step": saved.step,
            "world_size": saved.world_size,
            "loss_first": saved.loss_first,
            "defining": dict(saved.defining),
        }
        final = saved.path.with_suffix(".json")
        partial = final.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(partial, final)
    wait_for_all(f"after saving {saved.path.name}")


def checkpoint_path(folder: str, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return Path(folder) / f"step-{step:0{STEP_DIGITS}d}"
