import json
import math
import os
import random
from dataclasses import replace

import pytest

from sidestream.training.checkpoints import (
    checkpoint_path,
    checkpoint_to_resume,
    newest_checkpoint,
    save_run,
)
from sidestream.training.errors import CheckpointError
from sidestream.training.step_file import (
    CHECKSUM,
    SavedRun,
    read_step_file,
    require_same_index,
    sealed,
    write_step_file,
)

DEFINING = {"seed": 1, "lr": 0.5, "data_sha256": "00ff"}


def _save(folder, step, *, keep=None, loss_first=5.5):
    def save(path):
        path.mkdir(exist_ok=True)
        (path / "sidestream.json").write_text(f"index of {step}")
        (path / "__0_0.distcp").write_text("data")

    saved = SavedRun(checkpoint_path(str(folder), step), step, 2, loss_first, DEFINING)
    save_run(saved, save, is_first=True, keep=keep)
    return saved


def _resume(folder):
    return checkpoint_to_resume(str(folder), DEFINING, last_step=99)


def _refused(folder, expected="as this release writes it"):
    before = sorted(folder.rglob("*"))
    with pytest.raises(CheckpointError, match=expected) as caught:
        _resume(folder)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000 and "move " in text
    assert sorted(folder.rglob("*")) == before
    return text


def _file(folder):
    return folder / "step-00000003.json"


@pytest.mark.parametrize("loss", [5.5, math.nan, math.inf, -math.inf], ids=str)
def test_what_was_written_is_read_back(loss, tmp_path):
    saved = _save(tmp_path, 3, loss_first=loss)
    read = _resume(tmp_path)
    assert repr(read.loss_first) == repr(loss)
    assert replace(read, loss_first=0.0) == replace(saved, loss_first=0.0)
    json.loads(_file(tmp_path).read_text(), parse_constant=pytest.fail)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003", "step-00000003.json"}


CONTENTS = {
    "empty": "",
    "cut": '{"format_version": 2, "st',
    "list": "[]",
    "number": "3",
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "huge": " " * (1 << 20) + "{}",
    "digits": '{"step": ' + "9" * 5000 + "}",
    "no utf-8": b"\xff\xfe{}",
    "surrogate": '{"format_version": 2, "\\ud800": 1}',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_other_content_is_refused(content, tmp_path):
    _save(tmp_path, 3)
    _file(tmp_path).write_bytes(content if isinstance(content, bytes) else content.encode())
    _refused(tmp_path)


FIELDS = {
    "format_version": [1, "2", None, 2.5],
    "step": ["x" * 10**5, {"a" * 10**5: 1}, 0, -3, 4, 10**8, 10**400, True, "3", 3.0, None],
    "world_size": [0, -1, 10**30, True, "2", 2.0],
    "loss_first": [5, "x", None, True],
    "defining": [[], None, {"seed": None}, {"seed": True}, {"seed": {}}],
    "index_sha256": ["0", None, 1, ["0"] * 64],
    "more": [1],
    "more" * 10**4 + "\n": [1],
}


@pytest.mark.parametrize("name", FIELDS, ids=lambda name: name[:20].strip())
def test_other_values_and_names_are_refused(name, tmp_path):
    _save(tmp_path, 3)
    whole = json.loads(_file(tmp_path).read_text())
    changed = [{**whole, name: value} for value in FIELDS[name]]
    changed += (
        [{key: value for key, value in whole.items() if key != name}] if name in whole else []
    )
    for content in changed:
        _file(tmp_path).write_text(json.dumps(sealed(content)))
        assert CHECKSUM not in _refused(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number, tmp_path):
    _save(tmp_path, 3)
    text = _file(tmp_path).read_text()
    _file(tmp_path).write_text(text.replace("5.5", number))
    _refused(tmp_path)


def test_another_run_of_long_names_is_told_in_one_line(tmp_path):
    _save(tmp_path, 3)
    whole = json.loads(_file(tmp_path).read_text())
    whole["defining"] = {f"{number}\n" * 10**3: "x\n" * 10**3 for number in range(50)}
    _file(tmp_path).write_text(json.dumps(sealed(whole)))
    with pytest.raises(CheckpointError, match="got another") as caught:
        _resume(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 5000


def test_a_name_twice_is_refused(tmp_path):
    _save(tmp_path, 3)
    text = _file(tmp_path).read_text()
    _file(tmp_path).write_text(text.replace('"step": 3', '"step": 4,\n"step": 3'))
    assert "'step' twice" in _refused(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "gone", "loop"])
def test_what_is_no_ordinary_file_is_refused_and_not_waited_for(kind, tmp_path):
    _save(tmp_path, 3)
    file = _file(tmp_path)
    file.unlink()
    {
        "pipe": lambda: os.mkfifo(file),
        "folder": file.mkdir,
        "device": lambda: file.symlink_to("/dev/zero"),
        "gone": lambda: file.symlink_to(tmp_path / "nowhere"),
        "loop": lambda: file.symlink_to(file),
    }[kind]()
    _refused(tmp_path)


def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    saved = _save(tmp_path, 3)
    whole = _file(tmp_path).read_bytes()
    for flip in random.Random(0).sample(range(8 * len(whole)), 500):
        flipped = bytearray(whole)
        flipped[flip // 8] ^= 1 << flip % 8
        _file(tmp_path).write_bytes(flipped)
        try:
            read = _resume(tmp_path)
        except CheckpointError as error:
            assert "\n" not in str(error)
        else:
            assert read == saved  # for example spaces that became line ends


# ---- step, folder and contents agree


def test_a_file_of_another_step_is_refused(tmp_path):
    _save(tmp_path, 2)
    _save(tmp_path, 3)
    _file(tmp_path).write_bytes((tmp_path / "step-00000002.json").read_bytes())
    assert "step 2, which belongs to step-00000002" in _refused(tmp_path)


def _swap(folder):
    metadata = folder / "step-00000003" / "sidestream.json"
    metadata.write_bytes((folder / "step-00000002" / "sidestream.json").read_bytes())


def _pipe(folder):
    (folder / "step-00000003/sidestream.json").unlink()
    os.mkfifo(folder / "step-00000003/sidestream.json")


CHANGES = {
    "other step": _swap,
    "one byte": lambda folder: (folder / "step-00000003/sidestream.json").write_text("index of 4"),
    "longer": lambda folder: (folder / "step-00000003/sidestream.json").write_text("index of 30"),
    "gone": lambda folder: (folder / "step-00000003/sidestream.json").unlink(),
    "a pipe": _pipe,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_folder_that_is_not_as_it_was_saved_is_refused(change, tmp_path):
    _save(tmp_path, 2)
    _save(tmp_path, 3)
    change(tmp_path)
    _refused(tmp_path, "as it was saved")


# ---- keeping the last ones


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_all_are_kept_where_nobody_says(tmp_path):
    for step in range(1, 5):
        _save(tmp_path, step)
    assert len(_names(tmp_path)) == 8


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_the_last_ones_are_kept(keep, tmp_path):
    for step in range(1, 6):
        _save(tmp_path, step, keep=keep)
        kept = range(max(1, step + 1 - keep), step + 1)
        assert _names(tmp_path) == sorted(
            f"step-{number:08d}{end}" for number in kept for end in ("", ".json")
        )
    assert newest_checkpoint(str(tmp_path)).step == 5


def test_what_is_removed_has_no_file_before_it_loses_its_folder(tmp_path, monkeypatch):
    _save(tmp_path, 1)
    seen = []

    def killed(path):
        seen.append(_names(tmp_path))
        raise OSError("killed")

    monkeypatch.setattr("shutil.rmtree", killed)
    _save(tmp_path, 2, keep=1)
    assert seen == [["step-00000001", "step-00000002", "step-00000002.json"]]
    monkeypatch.undo()
    _save(tmp_path, 3, keep=1)
    assert _names(tmp_path) == ["step-00000003", "step-00000003.json"]


def test_what_stands_beside_the_checkpoints_is_not_touched(tmp_path):
    strange = [
        "step-0000001",
        "step-000000011",
        "step-" + 8 * "\N{ARABIC-INDIC DIGIT ONE}",
        "notes",
        ".step-1.partial",
    ]
    for name in strange:
        (tmp_path / name).mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "step-00000001").symlink_to(tmp_path / "target")
    for step in (2, 3):
        _save(tmp_path, step, keep=1)
    assert {*strange, "target", "step-00000003"} <= {*_names(tmp_path)}


def test_leftovers_of_killed_saves_are_removed_by_the_next_one(tmp_path):
    (tmp_path / ".step-00000007.partial").mkdir()
    (tmp_path / ".step-00000007.partial" / "__0_0.distcp").write_text("half")
    (tmp_path / ".step-00000007.json.partial").write_text("{")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / ".step-00000008.partial").symlink_to(tmp_path / "elsewhere")
    _save(tmp_path, 9)
    assert _names(tmp_path) == ["elsewhere", "step-00000009", "step-00000009.json"]
    assert (tmp_path / "elsewhere" / "file").exists()


def test_a_planted_link_is_not_written_through(tmp_path):
    saved = _save(tmp_path, 3)
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / ".step-00000003.json.partial").symlink_to(victim)
    write_step_file(saved)
    assert victim.read_text() == "kept"
    assert read_step_file(saved.path) == saved


def test_what_was_read_once_is_compared_whatever_the_file_is_by_then(tmp_path):
    _save(tmp_path, 3)
    saved = read_step_file(tmp_path / "step-00000003")
    _file(tmp_path).unlink()
    require_same_index(saved)
    (saved.path / "sidestream.json").write_text("index of 4")
    with pytest.raises(CheckpointError, match="another checksum"):
        require_same_index(saved)


def test_the_name_of_a_step_file_is_on_disk_before_an_older_checkpoint_goes(tmp_path, monkeypatch):
    _save(tmp_path, 1)
    seen = []
    monkeypatch.setattr(
        "sidestream.sharding.storage.local.sync_folder",
        lambda folder: seen.append((folder, _names(folder))),
    )
    _save(tmp_path, 2, keep=1)
    both = [f"step-{step:08d}{end}" for step in (1, 2) for end in ("", ".json")]
    assert seen == [(tmp_path, both)]
    assert _names(tmp_path) == both[2:]


def test_what_a_checkpoint_replaced_goes_once_that_is_there(tmp_path):
    for step in (3, 4):
        replaced = tmp_path / f".step-0000000{step}.replaced"
        replaced.mkdir()
        (replaced / "sidestream.json").write_text("the one before")
    (tmp_path / "step-00000003").mkdir()
    _save(tmp_path, 8)  # nothing but what was replaced is whole
    assert {".step-00000003.replaced", ".step-00000004.replaced"} <= {*_names(tmp_path)}
    (tmp_path / "step-00000003" / "sidestream.json").write_text("the new one, without its file")
    _save(tmp_path, 9)
    names = _names(tmp_path)
    assert ".step-00000003.replaced" not in names and ".step-00000004.replaced" in names
    assert (tmp_path / "step-00000003").is_dir()
    assert newest_checkpoint(str(tmp_path)).step == 9
