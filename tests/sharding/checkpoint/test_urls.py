"""Checkpoints at URLs, over memory://: found and refused as those on disks are, replaced whole."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.distributed import checkpoint as dcp

import sidestream as ss
from sidestream.sharding.checkpoint import url_folder
from sidestream.sharding.storage import Url, location_of
from sidestream.tests.sharding.checkpoint.whole import EXTRA, Case, everything, make

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def files() -> Iterator[dict[str, Any]]:
    store = fsspec.filesystem("memory").store
    store.clear()
    yield store
    store.clear()


@pytest.fixture
def case(files: dict[str, Any]) -> Case:
    model, optimizer = make(0)
    ss.save_checkpoint("memory://run/c", model, optimizer, extra=EXTRA)
    other, other_optimizer = make(1)
    ss.save_checkpoint("memory://run/before", other, other_optimizer)
    folder: Any = location_of("memory://run/c")
    case = Case(folder, EXTRA, everything(model, optimizer), other, other_optimizer)
    assert case.try_to_load(folder) == "loaded"
    return case


def contents(files: dict[str, Any], folder: str = "c") -> dict[str, bytes]:
    start = f"/run/{folder}/"
    return {
        name.removeprefix(start): file.getvalue()
        for name, file in files.items()
        if name.startswith(start)
    }


def put(name: str, content: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(f"/run/{name}", content)


@pytest.mark.parametrize("kind", ["manifest", "data"])
def test_damage_is_refused(case: Case, files: dict[str, Any], kind: str) -> None:
    rng = random.Random(0)
    name, whole = next(
        (name, content)
        for name, content in contents(files).items()
        if name.endswith(".json" if kind == "manifest" else ".distcp")
    )
    for _ in range(20):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        put(f"c/{name}", bytes(changed))
        assert "Nothing was loaded" in case.try_to_load(case.folder)
    put(f"c/{name}", whole[: rng.randrange(len(whole))])
    assert "Nothing was loaded" in case.try_to_load(case.folder)
    fsspec.filesystem("memory").rm_file(f"/run/c/{name}")
    assert "expected" in case.try_to_load(case.folder)
    put(f"c/{name}", whole)
    assert case.try_to_load(case.folder) == "loaded"


def ends(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "extra"),
    [
        ("sidestream.sharding.checkpoint.writer.CheckpointWriter.write_data", EXTRA),
        ("torch.distributed.checkpoint.FileSystemWriter.finish", EXTRA),
        ("sidestream.sharding.checkpoint.save.write_manifest", EXTRA),
        ("sidestream.sharding.checkpoint.url_folder.UrlTarget.publish", "new"),
    ],
    ids=["while data is written", "before .metadata", "before the manifest", "after it"],
)
def test_a_save_that_ends_anywhere_leaves_one_whole(
    case: Case, files: dict[str, Any], where: str, extra: Any
) -> None:
    model, optimizer = make(1)
    # Nothing after that point is run, as where the process is killed.
    with mock.patch(where, ends), pytest.raises(KeyboardInterrupt):
        ss.save_checkpoint("memory://run/c", model, optimizer, extra="new")
    assert ss.load_checkpoint("memory://run/c", model, optimizer) == extra
    ss.save_checkpoint("memory://run/c", model, optimizer, extra="newer")
    assert ss.load_checkpoint("memory://run/c", model, optimizer) == "newer"
    kinds = sorted(name[24:] if name.endswith(".distcp") else name for name in contents(files))
    assert kinds == [".metadata", "__0_0.distcp", "sidestream.json"]


def test_a_first_save_that_ends_is_nothing(files: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    target = "sidestream.sharding.checkpoint.save.write_manifest"
    with mock.patch(target, ends), pytest.raises(KeyboardInterrupt):
        ss.save_checkpoint("memory://run/c", model)
    with pytest.raises(ValueError, match=r"expected sidestream.json beside .metadata"):
        ss.load_checkpoint("memory://run/c", model)
    ss.save_checkpoint("memory://run/c", model)
    assert len(contents(files)) == 3


def test_other_readers_find_it(case: Case) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    state = {"model": {"first.weight": nn.Linear(6, 5).weight.detach()}}
    reader = FsspecReader("memory://run/c")
    dcp.load(state, storage_reader=reader, no_dist=True)
    whole, optimizer = make(0)
    ss.load_checkpoint("memory://run/c", whole, optimizer)
    expected = ss.full_state_dict(whole)["first.weight"]
    assert (state["model"]["first.weight"] == expected).all()


def test_what_is_no_checkpoint_is_not_replaced(files: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    put("c/notes.txt", b"mine")
    with pytest.raises(FileExistsError, match=r"other objects \(notes.txt\)"):
        ss.save_checkpoint("memory://run/c", model)
    with pytest.raises(FileExistsError, match="got an object"):
        ss.save_checkpoint("memory://run/c/notes.txt", model)
    ss.save_checkpoint("memory://run/d", model)
    with pytest.raises(FileExistsError, match="inside that at memory://run/d"):
        ss.save_checkpoint("memory://run/d/e", model)
    with pytest.raises(FileNotFoundError, match="got nothing"):
        ss.load_checkpoint("memory://run/e", model)
    with pytest.raises(FileNotFoundError, match="got a folder without one"):
        ss.load_checkpoint("memory://run/c", model)


def test_old_ones_are_removed_in_the_order_of_their_saves(files: dict[str, Any]) -> None:
    for name in ["9", "10", "11", "2"]:
        ss.save_checkpoint(f"memory://run/{name}", nn.Linear(2, 2))
    put("notes/a", b"mine")
    removed = ss.remove_old_checkpoints("memory://run", keep=2)
    assert removed == [Url("memory", f"run/{name}") for name in ("9", "10")]
    left = {name.split("/")[2] for name in files}
    assert left == {"11", "2", "notes"}


def test_a_removal_that_ends_is_finished_by_the_next(files: dict[str, Any]) -> None:
    for name in "ab":
        ss.save_checkpoint(f"memory://run/{name}", nn.Linear(2, 2))
    with mock.patch.object(url_folder, "remove_files", ends), pytest.raises(KeyboardInterrupt):
        ss.remove_old_checkpoints("memory://run", keep=1)
    with pytest.raises(ValueError, match=r"expected sidestream\.json"):
        ss.load_checkpoint("memory://run/a", nn.Linear(2, 2))
    assert ss.remove_old_checkpoints("memory://run", keep=1) == []
    assert {name.split("/")[2] for name in files} == {"b"}


def test_exports_refuse_urls(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got the URL memory://run/c"):
        ss.save_safetensors("memory://run/c", nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got the URL"):
        ss.load_safetensors("memory://run/c", nn.Linear(2, 2))
