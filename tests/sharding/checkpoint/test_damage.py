"""Damaged checkpoints: refused with one line and nothing changed, or loaded exactly.

Every kind is tried on a checkpoint of ours, which has a manifest, and on a plain one of
torch.distributed.checkpoint, which has but the checksums inside its archives.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidestream.tests.sharding.checkpoint.whole import Case, damaged

pytestmark = pytest.mark.timeout(120)


def names_in(case: Case, *, index: bool) -> list[str]:
    files = sorted(os.listdir(case.folder))
    return [name for name in files if name.endswith(".distcp") != index]


def flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize(("index", "count"), [(True, 300), (False, 100)], ids=["index", "data"])
def test_a_flipped_bit(case: Case, index: bool, count: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    told: list[str] = []
    for number in range(count):
        names = names_in(case, index=index)
        name = names[number % len(names)]
        content = flipped((case.folder / name).read_bytes(), rng)
        told.append(damaged(case, name, content, tmp_path))
    if case.extra is not None:
        assert "loaded" not in told, "a manifest finds every flipped bit"
    assert set(told) != {"loaded"}


def test_a_truncated_file(case: Case, tmp_path: Path) -> None:
    rng = random.Random(1)
    for number in range(40):
        names = sorted(os.listdir(case.folder))
        name = names[number % len(names)]
        content = (case.folder / name).read_bytes()
        assert damaged(case, name, content[: rng.randrange(len(content))], tmp_path) != "loaded"


@pytest.mark.parametrize("case", ["ours"], indirect=True)
def test_another_files_content_in_place_of_a_file(case: Case, tmp_path: Path) -> None:
    """What a later step or another rank wrote, whole in itself; a plain checkpoint has no sums."""
    later = case.folder.with_name("before")
    for name in sorted(os.listdir(case.folder)):
        told = damaged(case, name, (later / name).read_bytes(), tmp_path)
        assert "expected" in told and told != "loaded", name


ODD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "got a pipe"),
    "folder": (Path.mkdir, "got a folder"),
    "link to a device": (lambda file: file.symlink_to("/dev/zero"), "got a device"),
    "link to nothing": (lambda file: file.symlink_to("nowhere"), "got none"),
    "link to itself": (lambda file: file.symlink_to(file), ""),
    "nothing": (lambda file: None, "got "),
}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_file_is_refused_and_never_waited_for(
    case: Case, kind: str, tmp_path: Path
) -> None:
    make_odd, message = ODD_FILES[kind]
    for name in sorted(os.listdir(case.folder)):
        folder = tmp_path / name
        shutil.copytree(case.folder, folder)
        (folder / name).unlink()
        make_odd(folder / name)
        told = case.try_to_load(folder)
        assert told != "loaded" and message in told, (name, told)
