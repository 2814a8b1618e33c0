"""The checksums that a checkpoint holds of its files."""

import io
import json
import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.sharding.checkpoint import digests
from sidestream.sharding.checkpoint.digests import DigestedFile, require_sums
from sidestream.sharding.checkpoint.stored import BadCheckpoint, Digest
from sidestream.tests.ranks import run_on_ranks

SEGMENT = 1 << 20


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
        assert listed == [len(content), [zlib.crc32(content)]]


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [1], [3, 1 << 20], [3 << 20, 1, 5], [7] * 999, [SEGMENT * 3], [SEGMENT + 1, 1 << 20]],
    ids=lambda sizes: f"{len(sizes)} pieces, {sum(sizes)} bytes",
)
def test_sums_are_those_of_the_whole_file_and_are_compared(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SEGMENT_BYTES", SEGMENT)
    num_threads = threading.active_count()
    file = DigestedFile(tmp_path / "file")
    with io.BufferedWriter(file) as stream:
        for size in sizes:
            stream.write(os.urandom(size))
    content = (tmp_path / "file").read_bytes()
    pieces = [content[start : start + SEGMENT] for start in range(0, len(content), SEGMENT)]
    assert file.digest() == Digest(sum(sizes), tuple(map(zlib.crc32, pieces)))
    assert threading.active_count() == num_threads
    expected = {"file": file.digest()}
    for rank in range(3):
        require_sums(tmp_path, expected, rank, 3)
    for place in range(0, len(content), max(1, len(content) // 3)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (tmp_path / "file").write_bytes(damaged)
        told = 0
        for rank in range(3):
            try:
                require_sums(tmp_path, expected, rank, 3)
            except BadCheckpoint:
                told += 1
        assert told == 1, "one rank, whose share it is"


def test_a_digested_file_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling", "victim"):
        with pytest.raises(FileExistsError):
            DigestedFile(tmp_path / name)
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "nothing").exists()


EXITS = """
import sys, time
from unittest import mock
from torch import nn
from torch.distributed import checkpoint as dcp
import sidestream as ss

write = dcp.FileSystemWriter.write_data
dcp.FileSystemWriter.write_data = lambda *args: time.sleep(0.5) or write(*args)
ss.save_checkpoint(sys.argv[1], nn.Linear(1024, 1024), asynchronous=True)
"""


def test_large_files_are_summed_while_the_interpreter_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS, str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    ss.load_checkpoint(tmp_path / "c", nn.Linear(1024, 1024))
