"""The folder of a run's checkpoints: one sub-folder a step, complete or not there at all, and what
it may resume.

DIR/step-00000020/run.json    step, first loss and the options that define the run
DIR/step-00000020/...         written by `save_checkpoint`
DIR/step-00000040.partial/    a save that did not end; never read, replaced by the next one
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError
from .ranks import wait_for_all

RUN_FILE = "run.json"
FORMAT_VERSION = 1


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
        CheckpointError: its run.json cannot be read as ours.
    """
    files = sorted(Path(folder).glob(f"step-{'[0-9]' * 8}/{RUN_FILE}"))
    if not files:
        return None
    try:
        content = json.loads(files[-1].read_text())
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format_version {content['format_version']}, this release reads {FORMAT_VERSION}"
            )
        return SavedRun(
            files[-1].parent,
            content["step"],
            content["world_size"],
            content["loss_first"],
            content["defining"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"expected a run.json of sidestream in {files[-1].parent}, got {error!r}; move that "
            "folder away"
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
        CheckpointError: there is a complete checkpoint.
    """
    saved = newest_checkpoint(folder)
    if saved is not None:
        raise CheckpointError(
            f"expected no checkpoints in {folder} yet, got one of step {saved.step}; pass "
            "--resume to go on from it, "
            "or another --checkpoint DIR"
        )


def save_run(folder: str, saved: SavedRun, save: Callable[[Path], None], *, is_first: bool) -> None:
    """Write one checkpoint; every rank calls this. `save` fills a folder that gets its name only
    once it is complete.
    """
    partial = saved.path.with_name(saved.path.name + ".partial")
    if is_first:
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    wait_for_all(f"before saving {saved.path.name}")
    save(partial)
    wait_for_all(f"after saving {saved.path.name}")
    if is_first:
        content = {
            "format_version": FORMAT_VERSION,
            "step": saved.step,
            "world_size": saved.world_size,
            "loss_first": saved.loss_first,
            "defining": dict(saved.defining),
        }
        (partial / RUN_FILE).write_text(json.dumps(content, indent=2) + "\n")
        os.replace(partial, saved.path)
    wait_for_all(f"after naming {saved.path.name}")


def checkpoint_path(folder: str, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return Path(folder) / f"step-{step:08d}"
