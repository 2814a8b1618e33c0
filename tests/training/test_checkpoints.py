import json

import pytest

from sidestream.training.checkpoints import (
    checkpoint_path,
    checkpoint_to_resume,
    newest_checkpoint,
    refuse_to_mix,
    save_run,
)
from sidestream.training.errors import CheckpointError
from sidestream.training.step_file import SavedRun, sealed

DEFINING = {"seed": 1, "lr": 0.5}


def _index(path, content):
    path.mkdir(exist_ok=True)
    (path / "sidestream.json").write_text(content)


def _save(folder, step, *, fail=False):
    def save(path):
        _index(path, f"{step} {fail}")
        if fail:
            raise RuntimeError("disk full")

    saved = SavedRun(checkpoint_path(str(folder), step), step, 2, 5.5, DEFINING)
    save_run(saved, save, is_first=True)
    return saved


def test_newest_complete_checkpoint_is_found(tmp_path):
    _save(tmp_path, 9)
    newest = _save(tmp_path, 10)
    with pytest.raises(RuntimeError):
        _save(tmp_path, 11, fail=True)
    assert newest_checkpoint(str(tmp_path)) == newest
    assert (newest.path / "sidestream.json").read_text() == "10 False"


def test_unfinished_save_is_replaced(tmp_path):
    with pytest.raises(RuntimeError):
        _save(tmp_path, 3, fail=True)
    assert newest_checkpoint(str(tmp_path)) is None
    assert _save(tmp_path, 3) == newest_checkpoint(str(tmp_path))


def test_a_checkpoint_that_is_replaced_by_its_own_run_stays_complete(tmp_path):
    before = _save(tmp_path, 3)
    with pytest.raises(RuntimeError):
        _save(tmp_path, 3, fail=True)  # behind the place of its folder's index, before its file
    assert checkpoint_to_resume(str(tmp_path), DEFINING, last_step=4) == before
    _save(tmp_path, 3)
    (before.path / "sidestream.json").write_text("other")
    with pytest.raises(CheckpointError, match="with another checksum"):
        checkpoint_to_resume(str(tmp_path), DEFINING, last_step=4)


def test_what_is_left_of_another_run_is_not_taken_for_what_replaces_it(tmp_path):
    other = SavedRun(checkpoint_path(str(tmp_path), 3), 3, 2, 5.5, {"seed": 2})
    save_run(other, lambda path: _index(path, "other"), is_first=True)
    with pytest.raises(RuntimeError):
        _save(tmp_path, 3, fail=True)
    assert newest_checkpoint(str(tmp_path)) is None


def test_run_that_agrees_resumes(tmp_path):
    saved = _save(tmp_path, 3)
    assert checkpoint_to_resume(str(tmp_path), DEFINING, last_step=4) == saved


@pytest.mark.parametrize(
    ("defining", "last_step", "expected"),
    [
        ({"seed": 2, "lr": 0.5}, 9, "seed: 1 there, 2 now"),
        ({"lr": 0.5}, 9, "seed: 1 there, None now"),
        (DEFINING, 3, "nothing to resume"),
    ],
    ids=["other_seed", "no_seed", "complete"],
)
def test_other_runs_do_not_resume(tmp_path, defining, last_step, expected):
    _save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=expected):
        checkpoint_to_resume(str(tmp_path), defining, last_step)


def test_nothing_to_resume_from_is_refused(tmp_path):
    for name in ("missing", "m" * 300, "zero\0byte"):
        with pytest.raises(CheckpointError, match="got none; leave out --resume"):
            checkpoint_to_resume(str(tmp_path / name), DEFINING, last_step=4)


def test_a_new_run_does_not_mix_into_an_old_one(tmp_path):
    refuse_to_mix(str(tmp_path))
    _save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="got one of step 3; pass --resume"):
        refuse_to_mix(str(tmp_path))


FIELDS = {
    "format_version": 2,
    "step": 3,
    "world_size": 2,
    "loss_first": 5.5,
    "defining": {},
    "index_sha256": "0" * 64,
}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"format_version": 99}),
        json.dumps({"format_version": 2}),
        json.dumps(FIELDS),
        json.dumps(sealed({**FIELDS, "step": "three"})),
        json.dumps(sealed({**FIELDS, "defining": 3})),
    ],
    ids=[
        "broken",
        "no_object",
        "later_format",
        "fields_missing",
        "checksum_missing",
        "step",
        "defining",
    ],
)
def test_foreign_run_file_is_refused(tmp_path, content):
    path = _save(tmp_path, 3).path
    path.with_suffix(".json").write_text(content)
    with pytest.raises(CheckpointError, match="as this release writes it"):
        newest_checkpoint(str(tmp_path))


def test_checkpoint_whose_folder_was_removed_is_passed_over(tmp_path):
    older = _save(tmp_path, 3)
    newer = _save(tmp_path, 4)
    (newer.path / "sidestream.json").unlink()
    newer.path.rmdir()
    assert newest_checkpoint(str(tmp_path)) == older


def test_a_file_in_place_of_the_folder_is_refused_before_the_run(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(CheckpointError, match="expected a folder for --checkpoint"):
        refuse_to_mix(str(path))
