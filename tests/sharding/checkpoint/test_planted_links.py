"""What is in the way when a checkpoint is saved: links, pipes, other models, leftovers."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sidestream as ss
from sidestream.sharding.checkpoint import folder as checkpoint_folder
from sidestream.tests.ranks import run_on_ranks

pytestmark = pytest.mark.timeout(60)


def save(path: Any, extra: str) -> None:
    ss.save_checkpoint(path, nn.Linear(2, 2), extra=extra)


def load(path: Any) -> Any:
    return ss.load_checkpoint(path, nn.Linear(2, 2))


def contents(folder: Path) -> dict[str, bytes | str]:
    """All below `folder`: what files hold, where links lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else ""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside that of the checkpoints, with files that somebody wants to lose."""
    folder = tmp_path / "elsewhere"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("precious")
    save(folder / "foreign", "foreign")
    return folder


DESTINATIONS: dict[str, str] = {
    "folder": "inner",
    "file": "inner/file",
    "checkpoint": "foreign",
    "dangling": "nothing/here",
    "to itself": "../run/LINK",
}


@pytest.mark.parametrize("destination", DESTINATIONS.values(), ids=DESTINATIONS)
@pytest.mark.parametrize("name", [".c.partial", ".c.replaced"], ids=["partial", "replaced"])
@pytest.mark.parametrize("is_there", [True, False], ids=["replacing", "new"])
def test_links_at_the_names_of_temporary_folders_are_removed_and_not_followed(
    is_there: bool, name: str, destination: str, elsewhere: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if is_there:
        save(run / "c", "old")
    (run / name).symlink_to(elsewhere / destination.replace("LINK", name))
    before = contents(elsewhere)
    if not is_there:
        with pytest.raises(FileNotFoundError):
            load(run / "c")
    save(run / "c", "new")
    assert contents(elsewhere) == before
    assert os.listdir(run) == ["c"] and load(run / "c") == "new"


@pytest.mark.parametrize("destination", ["inner", "inner/file", "nothing", "../run/c"])
def test_a_link_to_something_else_at_the_path_is_refused(
    destination: str, elsewhere: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "c").symlink_to(elsewhere / destination)
    before = contents(elsewhere), contents(run)
    with pytest.raises((FileExistsError, ValueError), match="path: expected") as caught:
        save(run / "c", "new")
    assert "got a link to" in str(caught.value) or "loop" in str(caught.value)
    assert (contents(elsewhere), contents(run)) == before


def test_a_link_to_a_checkpoint_stays_and_leads_to_the_new_one(tmp_path: Path) -> None:
    save(tmp_path / "disk" / "c", "old")
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "c")
    save(tmp_path / "latest", "new")
    assert (tmp_path / "latest").is_symlink() and load(tmp_path / "latest") == "new"
    assert os.listdir(tmp_path / "disk") == ["c"]
    # As a kill between the two renames leaves it.
    (tmp_path / "disk" / "c").rename(tmp_path / "disk" / ".c.replaced")
    assert load(tmp_path / "latest") == "new"
    save(tmp_path / "latest", "newer")
    assert load(tmp_path / "disk" / "c") == "newer"


def test_a_link_that_is_planted_while_writing_is_not_followed(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    before = contents(elsewhere)
    publish = checkpoint_folder.publish

    def plant(target: Path) -> None:
        target.symlink_to(elsewhere / "inner")
        publish(target)

    monkeypatch.setattr(checkpoint_folder, "publish", plant)
    with pytest.raises(FileExistsError, match="got a link; remove it, or give another path"):
        save(run / "c", "new")
    assert contents(elsewhere) == before and os.listdir(run) == ["c"]


def test_what_killed_saves_left_is_removed(tmp_path: Path) -> None:
    for leftover in (".c.partial", ".c.replaced"):
        (tmp_path / leftover / "deep").mkdir(parents=True)
        (tmp_path / leftover / "deep" / "__0_0.distcp").write_text("half")
        os.mkfifo(tmp_path / leftover / "pipe")
    save(tmp_path / "c", "first")
    assert os.listdir(tmp_path) == ["c"]


def plant_pipe_inside(path: Path) -> None:
    save(path, "old")
    os.mkfifo(path / "pipe")


def plant_device_inside(path: Path) -> None:
    save(path, "old")
    (path / "device").symlink_to("/dev/zero")


@pytest.mark.parametrize("plant", [plant_pipe_inside, plant_device_inside], ids=["pipe", "device"])
def test_pipes_and_devices_in_the_folder_that_would_be_replaced_are_refused_at_once(
    plant: Callable[[Path], None], tmp_path: Path
) -> None:
    plant(tmp_path / "c")
    with pytest.raises(FileExistsError, match="got other files"):
        save(tmp_path / "c", "new")
    assert load(tmp_path / "c") == "old" and os.listdir(tmp_path) == ["c"]


def pipe_as_metadata(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / ".metadata")


IN_THE_WAY: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe as metadata": pipe_as_metadata,
    "folder around checkpoints": lambda path: save(path / "generator", "inner"),
    "checkpoint with a folder": lambda path: (save(path, "old"), (path / "mine").mkdir()),
}


@pytest.mark.parametrize("plant", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_anything_else_than_a_checkpoint_at_the_path_is_refused_at_once(
    plant: Callable[[Path], Any], tmp_path: Path
) -> None:
    plant(tmp_path / "c")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="expected a checkpoint to replace or nothing"):
        save(tmp_path / "c", "new")
    assert contents(tmp_path) == before


def test_several_models_in_one_folder_have_sub_folders(tmp_path: Path) -> None:
    for _ in range(2):
        save(tmp_path / "c" / "generator", "generator")
        save(tmp_path / "c" / "critic", "critic")
    with pytest.raises(
        FileExistsError, match=r"around other checkpoints, such as .*c/critic; give a sub-folder"
    ):
        save(tmp_path / "c", "both")
    with pytest.raises(FileExistsError, match=r"got .*generator/inner inside that at .*generator,"):
        save(tmp_path / "c" / "generator" / "inner", "inner")
    assert load(tmp_path / "c" / "generator") == "generator"
    assert load(tmp_path / "c" / "critic") == "critic"


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    save("~/run/c", "home")
    save(Path("~/run/c"), "sweet home")
    assert load(tmp_path / "home" / "run" / "c") == load("~/run/c") == "sweet home"
    assert os.listdir(tmp_path) == ["home"]
    for call in (lambda path: save(path, ""), load):
        with pytest.raises(ValueError, match="path: expected the path of a folder, got '~nobody-"):
            call("~nobody-of-this-name/c")


NAMES = {"not UTF-8": os.fsdecode(b"r\xffn"), "escapes": "r\x1b[2Jn\n", "lone half": "r\ud800n"}


def fails_with_a_strange_name(rank: int, world_size: int, folder: str, name: str) -> list[str]:
    path = os.path.join(folder, name)
    messages = []
    calls: list[Callable[[], Any]] = [
        lambda: load(path),
        lambda: ss.save_checkpoint(path if rank else path + "2", nn.Linear(2, 2)),
        lambda: ss.save_checkpoint(path, nn.Linear(2, 2), extra=threading.Lock()),
    ]
    if "\ud800" not in name:
        Path(path).mkdir(exist_ok=True)
        Path(path, "file").touch()
        calls.append(lambda: save(path, "new"))
        save(os.path.join(path, "inner"), "works")
        assert load(os.path.join(path, "inner")) == "works"
    for call in calls:
        with pytest.raises((OSError, TypeError, ValueError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_that_cannot_be_printed_are_escaped_in_errors(name: str, tmp_path: Path) -> None:
    for messages in run_on_ranks(fails_with_a_strange_name, 2, str(tmp_path), name):
        for message in messages:
            assert message.isprintable(), ascii(message)
            message.encode()


def test_a_checkpoint_with_files_of_others_in_it_is_not_replaced(tmp_path: Path) -> None:
    ss.save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra="old")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"got other files \(notes.txt\); give another"):
        ss.save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra="new")
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
    assert ss.load_checkpoint(tmp_path / "c", nn.Linear(2, 2)) == "old"
