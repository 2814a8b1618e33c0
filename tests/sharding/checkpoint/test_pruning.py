"""Removing old checkpoints: the last stay, and so does all that is no checkpoint of ours."""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from torch import nn
from torch.distributed import checkpoint as dcp

import sidestream as ss

pytestmark = pytest.mark.timeout(60)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_last_written_stay_whatever_their_names(tmp_path: Path) -> None:
    for step in (9, 10, 11, 2):
        ss.save_checkpoint(tmp_path / f"step-{step}", nn.Linear(2, 2), extra=step)
    removed = ss.remove_old_checkpoints(tmp_path, keep=2)
    assert [path.name for path in removed] == ["step-9", "step-10"]
    assert names(tmp_path) == ["step-11", "step-2"]
    assert ss.load_checkpoint(tmp_path / "step-2", nn.Linear(2, 2)) == 2
    assert ss.remove_old_checkpoints(tmp_path, keep=2) == []
    assert ss.remove_old_checkpoints(tmp_path / "absent", keep=1) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_else_is_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    ss.save_checkpoint(outside, nn.Linear(2, 2))
    folder = tmp_path / "runs"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "thesis.tex").write_text("years of work")
    (folder / "notes").write_text("text")
    (folder / "link").symlink_to(outside)
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=folder / "plain")
    shutil.copytree(outside, folder / ".hidden")
    for step in range(3):
        ss.save_checkpoint(folder / f"{step}", nn.Linear(2, 2))
    before = names(folder)
    assert [path.name for path in ss.remove_old_checkpoints(folder, keep=1)] == ["0", "1"]
    assert names(folder) == [name for name in before if name not in ("0", "1")]
    assert (outside / "sidestream.json").is_file()


def test_a_removal_that_is_cut_off_leaves_nothing_that_loads_half(tmp_path: Path) -> None:
    for step in range(2):
        ss.save_checkpoint(tmp_path / f"{step}", nn.Linear(2, 2))
    with (
        mock.patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        ss.remove_old_checkpoints(tmp_path, keep=1)
    with pytest.raises(FileNotFoundError, match="got nothing"):
        ss.load_checkpoint(tmp_path / "0", nn.Linear(2, 2))
    ss.save_checkpoint(tmp_path / "0", nn.Linear(2, 2))
    assert names(tmp_path) == ["0", "1"]


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "3", None], ids=repr)
def test_bad_counts_are_refused(keep: object, tmp_path: Path) -> None:
    ss.save_checkpoint(tmp_path / "0", nn.Linear(2, 2))
    with pytest.raises((TypeError, ValueError), match="keep: expected a whole number >= 1"):
        ss.remove_old_checkpoints(tmp_path, keep=keep)  # type: ignore[arg-type]
    assert names(tmp_path) == ["0"]
