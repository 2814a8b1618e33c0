"""An export that replaces another: as a whole or not at all, whatever ends it, and nothing else."""

import contextlib
import itertools
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sidestream as ss
from sidestream.sharding.safetensors import files as safetensors_files
from sidestream.sharding.safetensors import save as safetensors_save
from sidestream.tests.ranks import RanksFailed, run_on_ranks

pytestmark = pytest.mark.timeout(60)

TWO = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
FILES = {1000: ["model.safetensors"], 40: [*TWO, INDEX]}


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))


def three() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 2, bias=False) for _ in range(3)))


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def loaded(folder: Path) -> nn.Module:
    model = make(99)
    ss.load_safetensors(folder, model)
    return model


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_at(step: int) -> Iterator[None]:
    """The process ends before it changes the folder for the `step`-th time."""
    steps = itertools.count()
    with contextlib.ExitStack() as patches:
        for name in ("replace", "unlink", "hardlink_to", "open"):
            original = getattr(Path, name)

            def stepped(*args: Any, _original: Any = original, **options: Any) -> Any:
                if next(steps) >= step:  # what cleans up does not run either
                    raise Killed
                return _original(*args, **options)

            patches.enter_context(mock.patch.object(Path, name, stepped))
        yield


@pytest.mark.parametrize("new", FILES, ids=["to one file", "to two files"])
@pytest.mark.parametrize("old", FILES, ids=["from one file", "from two files"])
def test_a_kill_at_any_step_leaves_the_old_export_or_the_new_one(
    old: int, new: int, tmp_path: Path
) -> None:
    before, after = make(0), make(1)
    outcomes = []
    for step in range(100):
        folder = tmp_path / f"{step}"
        ss.save_safetensors(folder, before, max_shard_bytes=old)
        try:
            with killed_at(step):
                ss.save_safetensors(folder, after, max_shard_bytes=new)
        except Killed:
            found = loaded(folder)
            outcomes.append(same(found, after))
            assert outcomes[-1] or same(found, before)
        else:
            break
        ss.save_safetensors(folder, before, max_shard_bytes=new)
        assert sorted(os.listdir(folder)) == FILES[new]
        assert same(loaded(folder), before)
    assert outcomes == sorted(outcomes), "old first, then new"
    assert len(outcomes) > 3 and not outcomes[0]
    assert sorted(os.listdir(folder)) == FILES[new]


@pytest.mark.parametrize("new", FILES, ids=["to one file", "to two files"])
def test_no_file_of_a_longer_export_stays(new: int, tmp_path: Path) -> None:
    ss.save_safetensors(tmp_path, three(), max_shard_bytes=24)
    assert len([*tmp_path.glob("model-*-of-00003.safetensors")]) == 3
    ss.save_safetensors(tmp_path, make(0), max_shard_bytes=new)
    assert sorted(os.listdir(tmp_path)) == FILES[new]


def test_files_of_others_stay(tmp_path: Path) -> None:
    others = ["config.json", "tokenizer.json", "model.bin", ".model.safetensors.partial.txt"]
    for name in others:
        (tmp_path / name).write_text("theirs")
    for limit in FILES:
        ss.save_safetensors(tmp_path, make(0), max_shard_bytes=limit)
        assert sorted(os.listdir(tmp_path)) == sorted([*others, *FILES[limit]])
    assert all((tmp_path / name).read_text() == "theirs" for name in others)


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_an_export_over_linked_files_leaves_what_they_lead_to(links: bool, tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    ss.save_safetensors(blobs, make(0), max_shard_bytes=40)
    folder.mkdir()
    for name in FILES[40]:
        (folder / name).symlink_to(blobs / name)
    for name in (*FILES[40], "model.safetensors"):
        (folder / f".{name}.partial").symlink_to(blobs / "planted")
    with contextlib.ExitStack() as patches:
        if not links:
            refuse = mock.patch.object(Path, "hardlink_to", side_effect=OSError("no links"))
            patches.enter_context(refuse)
        ss.save_safetensors(folder, make(1), max_shard_bytes=40)
    assert same(loaded(folder), make(1)) and same(loaded(blobs), make(0))
    assert sorted(os.listdir(blobs)) == FILES[40]
    assert not any((folder / name).is_symlink() for name in FILES[40])


OBSTACLES = ["the folder", "model.safetensors", INDEX]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_no_file_is_not_replaced(obstacle: str, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    if obstacle == "the folder":
        folder.write_text("theirs")
    else:
        (folder / obstacle).mkdir(parents=True)
    with pytest.raises(FileExistsError, match="got something else; give another path"):
        ss.save_safetensors(folder, make(0))
    assert folder.is_file() or os.listdir(folder) == [obstacle]


class Model(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        for param in self.parameters():
            nn.init.constant_(param, fill)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def sharded(fill: float, zero: int = 3, **options: Any) -> nn.Module:
    model = Model(fill)
    ss.fully_shard(model, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero, **options)
    return model


def fill_disk(rank: int, world_size: int, folder: Path) -> None:
    for zero in range(4):
        ss.save_safetensors(folder, sharded(1.0, zero), max_shard_bytes=20_000)
        if rank == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        torch.distributed.barrier()
        with pytest.raises(OSError, match="expected room for the export"):
            ss.save_safetensors(folder, sharded(2.0, zero), max_shard_bytes=20_000)
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        model = sharded(0.0)
        ss.load_safetensors(folder, model)
        assert all((value == 1).all() for value in ss.full_state_dict(model).values())
        assert not [*folder.glob(".*")]


def test_a_full_disk_is_told_on_every_rank_and_the_old_export_stays(tmp_path: Path) -> None:
    run_on_ranks(fill_disk, 2, tmp_path / "export")


def run_out_of_memory(rank: int, world_size: int, folder: Path) -> None:
    """While the others gather, a rank cannot copy its part, or not write what was gathered."""
    failures = [
        (1, torch.Tensor, "copy_", 3),
        (0, torch.Tensor, "copy_", 3),
        (0, safetensors_files.Staging, "elements", 3),
        (0, safetensors_files.Staging, "elements", 0),
    ]
    for failing, owner, method, zero in failures:
        ss.save_safetensors(folder, sharded(1.0, zero), max_shard_bytes=20_000)
        model = sharded(2.0, zero)
        with contextlib.ExitStack() as patches:
            if rank == failing:
                full = mock.patch.object(owner, method, side_effect=MemoryError("no room"))
                patches.enter_context(full)
            kind, by = (MemoryError, "") if rank == failing else (RuntimeError, f"rank {failing}: ")
            with pytest.raises(kind, match=f"^{by}no room") as failure:
                ss.save_safetensors(folder, model, max_shard_bytes=20_000)
        assert not isinstance(failure.value, ss.CommunicationError)
        model = sharded(0.0, zero)
        ss.load_safetensors(folder, model)
        assert all((value == 1).all() for value in ss.full_state_dict(model).values())
        assert not [*folder.glob(".*")]


def test_an_error_amid_the_gathers_is_told_on_every_rank(tmp_path: Path) -> None:
    run_on_ranks(run_out_of_memory, 2, tmp_path / "export", timeout_s=40)


def die_while_writing(rank: int, world_size: int, folder: Path) -> str:
    ss.save_safetensors(folder, sharded(1.0))
    model = sharded(2.0)
    if rank == 0:
        writes = itertools.count()
        original = safetensors_save._Sink.write

        def dying(*args: Any) -> None:
            if next(writes) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            original(*args)

        safetensors_save._Sink.write = dying  # type: ignore[method-assign]
    with pytest.raises(ss.CommunicationError) as failure:
        ss.save_safetensors(folder, model)
    return str(failure.value)


def save_again(rank: int, world_size: int, folder: Path) -> list[str]:
    model = sharded(0.0)
    ss.load_safetensors(folder, model)
    assert all((value == 1).all() for value in ss.full_state_dict(model).values())
    ss.save_safetensors(folder, model)
    return sorted(os.listdir(folder))


def test_other_ranks_are_told_when_the_writer_dies_and_the_old_export_stays(
    tmp_path: Path,
) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(die_while_writing, 3, tmp_path, timeout_s=40)
    assert failed.value.failures.keys() == {0} and "SIGKILL" in failed.value.failures[0]
    assert len(failed.value.values) == 2
    assert run_on_ranks(save_again, 2, tmp_path) == [["model.safetensors"]] * 2


def differ(rank: int, world_size: int, folder: Path) -> None:
    model = sharded(1.0)
    other = sharded(1.0)
    if rank == 1:
        other.register_buffer("more", torch.ones(2))
    cases: list[tuple[str, str, nn.Module, dict[str, Any]]] = [
        ("path", f"export{rank}", model, {}),
        ("dtype", "export", model, {"dtype": torch.bfloat16 if rank else None}),
        ("max_shard_bytes", "export", model, {"max_shard_bytes": 100 + rank}),
        ("module", "export", other, {}),
    ]
    for what, name, module, options in cases:
        with pytest.raises(ValueError, match=f"^{what}: expected the same on every rank"):
            ss.save_safetensors(folder / name, module, **options)
    with (
        ss.gathered(model),
        pytest.raises(RuntimeError, match="save_safetensors"),
    ):
        ss.save_safetensors(folder / "export", model)
    with ss.gathered(model), pytest.raises(RuntimeError, match="load_safetensors"):
        ss.load_safetensors(folder / "export", model)


def test_ranks_that_mean_different_exports_are_refused(tmp_path: Path) -> None:
    run_on_ranks(differ, 2, tmp_path)
    assert [*tmp_path.iterdir()] == []


def save_stages_at_one_path(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]
    model = sharded(float(rank), device_mesh=mesh)
    if rank == 0:
        ss.save_safetensors(folder, model)
    torch.distributed.barrier()
    if rank == 1:
        with pytest.raises(ValueError, match="no other model of this job"):
            ss.save_safetensors(folder, model)
        ss.load_safetensors(folder, model)
        assert not any(value.any() for value in ss.full_state_dict(model).values())


def test_a_stage_does_not_replace_the_export_of_another(tmp_path: Path) -> None:
    run_on_ranks(save_stages_at_one_path, 2, tmp_path / "export")
