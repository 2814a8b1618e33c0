"""What one rank alone sees wrong: all refuse, nothing changes, and training goes on as it was."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.checkpoint import load as checkpoint_load
from sidestream.sharding.checkpoint import ranks as checkpoint_ranks
from sidestream.sharding.checkpoint.opening import open_checkpoint
from sidestream.sharding.optim import state as optimizer_state
from sidestream.tests.ranks import run_on_ranks

pytestmark = pytest.mark.timeout(120)


class WithHook(nn.Linear):
    """Its extra state may refuse to be set."""

    refuses = False

    def get_extra_state(self) -> Any:
        return (1,)

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise RuntimeError("not now")


def make(zero: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(WithHook(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ss.fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return ss.full_state_dict(model)


def damage(folder: Path, rank_of_file: int) -> None:
    """Turn a bit of what that rank wrote, within an element of a tensor."""
    stored = open_checkpoint(folder)
    name = f"__{rank_of_file}_0.distcp"
    place = next(place for key, place in stored.places() if place.file == name and "exp" in key)
    content = bytearray((folder / name).read_bytes())
    content[place.start + place.num_bytes // 2] ^= 1
    (folder / name).write_bytes(content)


def refuses_and_trains_on(rank: int, world_size: int, folder: str) -> None:
    for zero in range(4):
        path = Path(folder, str(zero))
        ss.save_checkpoint(path, *make(zero, seed=1))
        if rank == 0:
            damage(path, rank_of_file=1)
        torch.distributed.barrier()
        model, optimizer = make(zero)
        twin, twin_optimizer = make(zero)
        with pytest.raises(ValueError, match="Nothing was loaded"):
            ss.load_checkpoint(path, model, optimizer)
        after, expected = step(model, optimizer), step(twin, twin_optimizer)
        for name, value in expected.items():
            if isinstance(value, Tensor):
                assert torch.equal(after[name], value), (zero, name)


def test_after_damage_in_one_ranks_share_all_train_on_as_before(tmp_path: Path) -> None:
    for world_size in (2, 3):
        (tmp_path / f"{world_size}").mkdir()
        run_on_ranks(refuses_and_trains_on, world_size, str(tmp_path / f"{world_size}"))


def loads_from_its_own_disk(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = make(3)
    ss.save_checkpoint(f"{folder}/shared", model, optimizer)
    own = Path(folder, f"disk{rank}", "c")
    shutil.copytree(f"{folder}/shared", own)
    ss.load_checkpoint(own, model, optimizer)
    if rank == 1:
        for place in range(world_size):  # whoever's share of the sums it would have been
            damage(own, rank_of_file=place)
    before = ss.full_state_dict(model)
    with pytest.raises(ValueError, match=r"expected __\d_0.distcp as it was written"):
        ss.load_checkpoint(own, model, optimizer)
    after = ss.full_state_dict(model)
    assert all(torch.equal(after[k], v) for k, v in before.items() if isinstance(v, Tensor))


def test_copies_on_several_disks_are_each_compared(tmp_path: Path) -> None:
    run_on_ranks(loads_from_its_own_disk, 2, str(tmp_path))


def out_of_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("no memory for moments")


def fails_late(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer = make(2)
    ss.save_checkpoint(folder, model, optimizer)
    told = []
    model[0].refuses = rank == 1
    with pytest.raises(RuntimeError) as caught:
        ss.load_checkpoint(folder, model, optimizer)
    told.append(str(caught.value))
    model[0].refuses = False
    patch = mock.patch.object(checkpoint_load, "prepare_state", out_of_memory)
    with patch if rank == 1 else mock.MagicMock(), pytest.raises(RuntimeError) as caught:
        ss.load_checkpoint(folder, model, optimizer)
    told.append(str(caught.value))
    ss.load_checkpoint(folder, model, optimizer)
    return told


def test_what_fails_after_the_checks_is_told_on_every_rank_as_half_loaded(tmp_path: Path) -> None:
    assert optimizer_state.prepare_state is checkpoint_load.prepare_state
    for rank, told in enumerate(run_on_ranks(fails_late, 2, str(tmp_path / "c"), timeout_s=60)):
        for message, reason in zip(told, ["not now", "no memory for moments"], strict=True):
            assert reason in message and "are half loaded" in message
            assert message.startswith("rank 1: " if rank == 0 else "checkpoint ")


def test_a_file_that_is_cut_after_the_checks_is_told_as_half_loaded(tmp_path: Path) -> None:
    model, optimizer = make(0)
    ss.save_checkpoint(tmp_path / "c", model, optimizer)
    data = tmp_path / "c" / "__0_0.distcp"
    prepare = checkpoint_load.prepare_state

    def changes(*args: Any, **kwargs: Any) -> None:
        os.truncate(data, 100)
        prepare(*args, **kwargs)

    with (
        mock.patch.object(checkpoint_load, "prepare_state", changes),
        mock.patch.object(checkpoint_load.Contents, "require_sound"),
        pytest.raises(OSError, match=r"c: expected .*half loaded: load a checkpoint again"),
    ):
        ss.load_checkpoint(tmp_path / "c", model, optimizer)


class Gone:
    """The job's store once its host is."""

    def compare_set(self, *_: object) -> bytes:
        raise dist.DistNetworkError("Connection was likely closed.")


def saves_without_a_store(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = make(3)
    path = Path(folder, "saved")
    with (
        mock.patch.object(checkpoint_ranks, "_get_default_store", Gone),
        pytest.raises(ss.CommunicationError, match=r"claim of .*saved in the store of the job"),
    ):
        ss.save_checkpoint(path, model, optimizer)
    assert not path.exists()
    step(model, optimizer)
    ss.save_checkpoint(path, model, optimizer)


def test_a_store_that_is_gone_is_told_by_all_as_a_failed_communication(tmp_path: Path) -> None:
    run_on_ranks(saves_without_a_store, 2, str(tmp_path))
