"""Checkpoints of models that are sharded over a part of the job's ranks."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sidestream as ss
from sidestream.sharding.checkpoint.ranks import in_ranges
from sidestream.tests.ranks import run_on_ranks

pytestmark = pytest.mark.timeout(120)
LEVELS = (0, 1, 2, 3)


def make(
    mesh: DeviceMesh | None, zero: int = 3, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if mesh is not None:
        ss.fully_shard(
            model,
            optimizer,
            device_mesh=mesh,
            dp_shard_dim=mesh.mesh_dim_names[0] if mesh.mesh_dim_names else None,
            fsdp_unit_modules=[nn.Linear],
            zero_dp_strategy=zero,
        )
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def stages() -> tuple[int, DeviceMesh]:
    """This rank's pipeline stage of two, and the mesh of that."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return mesh.get_local_rank("pp"), mesh["dp"]


def saves_a_path_per_stage(rank: int, world_size: int, folder: str) -> None:
    stage, mesh = stages()
    for zero in LEVELS:
        model, optimizer = make(mesh, zero, seed=stage)
        plain, plain_optimizer = make(None, seed=stage)
        train(model, optimizer, seed=stage)
        train(plain, plain_optimizer, seed=stage)
        path = Path(folder, f"zero{zero}", f"stage{stage}")
        ss.save_checkpoint(path, model, optimizer, extra=rank)
        fresh, fresh_optimizer = make(mesh, zero, seed=9)
        assert ss.load_checkpoint(path, fresh, fresh_optimizer) == rank
        assert same(ss.full_state_dict(model), ss.full_state_dict(fresh))
        for pair in ((model, optimizer), (fresh, fresh_optimizer), (plain, plain_optimizer)):
            train(*pair, seed=5)
        assert same(ss.full_state_dict(model), ss.full_state_dict(fresh))
        for got, expected in zip(
            ss.full_state_dict(fresh).values(), plain.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(got, expected)


def test_pipeline_stages_save_at_the_same_time_to_a_path_each(tmp_path: Path) -> None:
    run_on_ranks(saves_a_path_per_stage, 4, str(tmp_path))
    assert sorted(os.listdir(tmp_path / "zero3")) == ["stage0", "stage1"]


def saves_to_one_path(rank: int, world_size: int, folder: str, at_once: bool) -> Any:
    stage, mesh = stages()
    model, optimizer = make(mesh, seed=stage)
    if not at_once and stage == 1:
        dist.barrier()
    try:
        ss.save_checkpoint(Path(folder, "c"), model, optimizer, extra=stage)
        outcome = "saved"
    except ValueError as error:
        outcome = str(error)
    if not at_once and stage == 0:
        dist.barrier()
    dist.barrier()
    if outcome == "saved":
        assert ss.load_checkpoint(Path(folder, "c"), model, optimizer) == stage
        ss.save_checkpoint(Path(folder, "c"), model, optimizer, extra=stage)
    return outcome


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after the other"])
def test_two_stages_at_one_path_are_refused_with_the_way_out(at_once: bool, tmp_path: Path) -> None:
    outcomes = run_on_ranks(saves_to_one_path, 4, str(tmp_path), at_once)
    refused = [outcome for outcome in outcomes if outcome != "saved"]
    assert len(refused) == 2 and (at_once or outcomes[:2] == ["saved", "saved"])
    for message in refused:
        assert "ranks 0-1" in message and "ranks 2-3" in message
        assert "give every model or pipeline stage a path of its own" in message
    assert os.listdir(tmp_path) == ["c"]


def saves_on_a_part(rank: int, world_size: int, folder: str) -> None:
    mesh = DeviceMesh("cpu", [1, 2])
    path = Path(folder, "c")
    for zero in LEVELS:
        if rank > 0:
            model, optimizer = make(mesh, zero)
            train(model, optimizer, seed=1)
            ss.save_checkpoint(path, model, optimizer, extra=f"of {rank}")
            whole = ss.full_state_dict(model)
            fresh, fresh_optimizer = make(mesh, zero, seed=9)
            assert ss.load_checkpoint(path, fresh, fresh_optimizer) == f"of {rank}"
            assert same(whole, ss.full_state_dict(fresh))
            if rank == 1:
                torch.save(whole, Path(folder, "whole"))
        dist.barrier()
        # The others read what the part has saved, here over all ranks.
        everywhere, its_optimizer = make(init_device_mesh("cpu", (world_size,)), zero, seed=9)
        assert ss.load_checkpoint(path, everywhere, its_optimizer) == "of 1"
        assert same(ss.full_state_dict(everywhere), torch.load(Path(folder, "whole")))
        dist.barrier()


def test_a_part_of_the_ranks_saves_and_loads_while_the_others_do_not_call(tmp_path: Path) -> None:
    run_on_ranks(saves_on_a_part, 3, str(tmp_path))


def fails_on_one_rank(rank: int, world_size: int, folder: str) -> list[str]:
    stage, mesh = stages()
    model, optimizer = make(mesh, seed=stage)
    path = Path(folder, f"stage{stage}")
    ss.save_checkpoint(path, model, optimizer, extra="old")
    messages = []

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    writes = mock.patch.object(dcp.FileSystemWriter, "write_data", full)
    for extra, patch in ((print, mock.MagicMock()), ("new", writes)):
        if rank == 3:
            with patch, pytest.raises((TypeError, OSError)) as caught:
                ss.save_checkpoint(path, model, optimizer, extra=extra)
        elif stage == 1:
            with pytest.raises((TypeError, OSError)) as caught:
                ss.save_checkpoint(path, model, optimizer, extra="new")
        else:
            ss.save_checkpoint(path, model, optimizer, extra="new")
            continue
        messages.append(str(caught.value))
    assert ss.load_checkpoint(path, model, optimizer) == ("old" if stage == 1 else "new")
    return messages


def test_an_error_names_the_rank_in_the_job_and_stays_in_its_group(tmp_path: Path) -> None:
    messages = run_on_ranks(fails_on_one_rank, 4, str(tmp_path))
    assert messages[:2] == [[], []]
    assert messages[2][0].startswith("rank 3: extra: expected numbers")
    for of_rank in messages[2:]:
        assert "stage1 failed on rank 3: no space" in of_rank[1]


def holds_parts_on_different_ranks(rank: int, world_size: int, folder: str) -> None:
    one = make(DeviceMesh("cpu", [0]))[0] if rank == 0 else None
    if rank == 1:
        DeviceMesh("cpu", [0])
    both = make(init_device_mesh("cpu", (world_size,)))[0]
    if one is not None:
        with pytest.raises(
            ValueError, match=r"got parts on rank 0 and on ranks 0-1; save and load"
        ):
            ss.save_checkpoint(Path(folder, "c"), nn.ModuleList([one, both]))
    assert not os.listdir(folder)


def test_a_module_with_parts_on_different_ranks_is_refused(tmp_path: Path) -> None:
    run_on_ranks(holds_parts_on_different_ranks, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((0,), "0"), ((0, 1, 2, 3), "0-3"), ((0, 2, 4, 5), "0, 2, 4-5"), ((1, 2, 7), "1-2, 7")],
    ids=str,
)
def test_ranks_in_short(numbers: tuple[int, ...], text: str) -> None:
    assert in_ranges(numbers) == text
