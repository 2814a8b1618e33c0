import os

import pytest

from sidestream.training.errors import OptionsError
from sidestream.training.options import TrainOptions
from sidestream.training.paths import require_writable_file, require_writable_folder
from sidestream.training.plan import plan_run


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("folder", "expected a file for --json, got the folder .*; name a file"),
        ("absent/file", "expected --json in a folder that exists, got .*; make the folder first"),
        ("file/below", "expected --json in a folder that exists"),
        ("f" * 300, "expected a place to write to for --json, got f+: .*File name too long"),
        ("zero\0byte", "expected a place to write to for --json, got .*embedded null byte"),
        ("loop", "expected a place to write to for --json, got .*symbolic links"),
        ("/proc/nobody-can-make-this", "expected a place to write to for --json, got /proc: "),
    ],
    ids=["folder", "absent", "below a file", "long", "zero byte", "loop", "proc"],
)
def test_a_file_that_cannot_be_written_is_refused(path, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder")
    os.symlink("loop", "loop")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OptionsError, match=expected):
        plan_run(TrainOptions(json=path), 1)
    assert sorted(os.listdir()) == ["file", "folder", "loop"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("kept")
    require_writable_file("there", "--json")
    require_writable_file("new", "--json")
    require_writable_file("/dev/null", "--json")
    assert os.listdir() == ["there"]
    assert (tmp_path / "there").read_text() == "kept"


@pytest.mark.parametrize("path", ["file/below", "f" * 300, "/proc/x", "zero\0byte"])
def test_a_folder_that_cannot_be_written_to_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionsError, match="expected a place to write to for --checkpoint, got"):
        plan_run(TrainOptions(checkpoint=path), 1)
    assert os.listdir() == ["file"]


def test_a_folder_is_made_and_left_empty(tmp_path):
    require_writable_folder(str(tmp_path / "a" / "b"), "--checkpoint")
    assert os.listdir(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("option", ["json", "metrics", "tensorboard"])
def test_results_go_to_paths_alone(option):
    with pytest.raises(
        OptionsError, match=f"expected a path on this machine for --{option}, got the URL s3://a/b"
    ):
        plan_run(TrainOptions(**{option: "s3://a/b"}), 1)


def test_checkpoints_that_end_with_the_process_are_refused():
    with pytest.raises(OptionsError, match=r"got memory://a/b: memory:// lasts as long as one"):
        plan_run(TrainOptions(checkpoint="memory://a/b"), 1)
