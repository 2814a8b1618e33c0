"""The checksums that a checkpoint holds of its files."""

import io
import json
import os
import threading
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.sharding.checkpoint.digests import DigestedFile
from sidestream.sharding.checkpoint.stored import Digest
from sidestream.tests.ranks import run_on_ranks


def saves(rank: int, world_size: int, folder: str) -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50))
    optimizer = torch.optim.AdamW(model.parameters())
    ss.fully_shard(model, optimizer)
    for _ in range(2):
        ss.save_checkpoint(folder, model, optimizer, extra=rank)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_file_is_listed_with_its_size_and_checksum(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(saves, world_size, str(tmp_path / "c"))
    files = json.loads((tmp_path / "c" / "sidestream.json").read_text())["checkpoint"]["digests"]
    assert sorted([*files, "sidestream.json"]) == sorted(os.listdir(tmp_path / "c"))
    assert ".metadata" in files and len(files) == 1 + world_size
    for name, listed in files.items():
        content = (tmp_path / "c" / name).read_bytes()
        assert listed == [len(content), zlib.crc32(content)]


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [1], [3, 1 << 20], [3 << 20, 1, 5], [7] * 999],
    ids=lambda sizes: f"{len(sizes)} pieces, {sum(sizes)} bytes",
)
def test_a_digest_is_that_of_the_whole_file(sizes: list[int], tmp_path: Path) -> None:
    file = DigestedFile(tmp_path / "file")
    with io.BufferedWriter(file) as stream:
        for size in sizes:
            stream.write(os.urandom(size))
    content = (tmp_path / "file").read_bytes()
    assert file.digest() == Digest(sum(sizes), zlib.crc32(content))
    assert threading.active_count() == 1


def test_a_digested_file_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling", "victim"):
        with pytest.raises(FileExistsError):
            DigestedFile(tmp_path / name)
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "nothing").exists()
