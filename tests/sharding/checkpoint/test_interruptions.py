"""Checkpoints that a full disk or an interruption ends: plain words on every rank, the old one
stays.
"""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import sidestream as ss
from sidestream.sharding.checkpoint import folder as checkpoint_folder
from sidestream.sharding.checkpoint import plain_values
from sidestream.sharding.checkpoint.read import Contents
from sidestream.tests.ranks import run_on_ranks

LIMIT_BYTES = 50_000


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 200))
    optimizer = torch.optim.AdamW(model.parameters())
    ss.fully_shard(model, optimizer)
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    return model, optimizer


def fills_the_disk(rank: int, world_size: int, folder: str) -> tuple[str, Any, list[str]]:
    model, optimizer = make()
    ss.save_checkpoint(folder, model, optimizer, extra="old")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    with pytest.raises(OSError) as caught:
        ss.save_checkpoint(folder, model, optimizer, extra="new")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    extra = ss.load_checkpoint(folder, model, optimizer)
    return str(caught.value), extra, os.listdir(Path(folder).parent)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_full_disk_is_told_on_every_rank_and_nothing_is_published(
    world_size: int, tmp_path: Path
) -> None:
    results = run_on_ranks(fills_the_disk, world_size, str(tmp_path / "c"))
    for message, extra, left in results:
        assert f"writing {tmp_path / 'c'} failed on rank {world_size - 1}: " in message
        assert f" MiB free in {tmp_path}; make room, or lift the limit on the size" in message
        assert "unexpected pos" not in message
        assert extra == "old" and left == ["c"]


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


INTERRUPTED: dict[str, Callable[[], Any]] = {
    "while looking": lambda: mock.patch.object(plain_values, "require_plain", interrupt),
    "while writing": lambda: mock.patch.object(dcp.FileSystemWriter, "write_data", interrupt),
    "while publishing": lambda: mock.patch.object(checkpoint_folder, "publish", interrupt),
}


def is_interrupted_while_saving(rank: int, world_size: int, folder: str, when: str) -> str:
    model, optimizer = make()
    ss.save_checkpoint(folder, model, optimizer, extra="old")
    interrupted = 0 if when == "while publishing" else world_size - 1
    with (
        INTERRUPTED[when]() if rank == interrupted else mock.MagicMock(),
        pytest.raises(BaseException) as caught,
    ):
        ss.save_checkpoint(folder, model, optimizer, extra="new")
    assert caught.type is (KeyboardInterrupt if rank == interrupted else RuntimeError)
    assert ss.load_checkpoint(folder, model, optimizer) == "old"
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("when", INTERRUPTED)
def test_an_interruption_of_one_rank_stays_one_and_the_others_are_told(
    when: str, world_size: int, tmp_path: Path
) -> None:
    messages = run_on_ranks(is_interrupted_while_saving, world_size, str(tmp_path / "c"), when)
    interrupted = 0 if when == "while publishing" else world_size - 1
    for rank, message in enumerate(messages):
        if rank != interrupted:
            assert f"rank {interrupted}: interrupted by KeyboardInterrupt" in message
    assert os.listdir(tmp_path) == ["c"]


def is_interrupted_while_loading(rank: int, world_size: int, folder: str, method: str) -> None:
    model, optimizer = make()
    ss.save_checkpoint(folder, model, optimizer, extra=rank)
    patch = mock.patch.object(Contents, method, interrupt)
    with (
        patch if rank == world_size - 1 else mock.MagicMock(),
        pytest.raises(BaseException) as caught,
    ):
        ss.load_checkpoint(folder, model, optimizer)
    if rank == world_size - 1:
        assert caught.type is KeyboardInterrupt
    else:
        assert caught.type is RuntimeError
        assert f"rank {world_size - 1}: interrupted by KeyboardInterrupt" in str(caught.value)
    assert ss.load_checkpoint(folder, model, optimizer) == rank


@pytest.mark.parametrize("method", ["values", "fill"])
def test_an_interruption_while_loading_stays_one(method: str, tmp_path: Path) -> None:
    for world_size in (1, 2):
        run_on_ranks(is_interrupted_while_loading, world_size, str(tmp_path / "c"), method)
