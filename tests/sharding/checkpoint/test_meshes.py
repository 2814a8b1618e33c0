"""Checkpoints, exports and state dicts of models on every mesh, read on every other one: the same
bits, each element written once.
"""

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import sidestream as ss
from sidestream.sharding.checkpoint.state import names_of_params
from sidestream.sharding.optim.state import named_state
from sidestream.tests.ranks import preload, run_on_ranks
from sidestream.tests.sharding.meshes import CASES, MESHES, WORLD, options_of
from sidestream.tests.sharding.trainer import Block, Job, Transformer, make_optimizer, run_step

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
preload("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")
Both = tuple[nn.Module, torch.optim.Optimizer]
# Also read by other numbers of ranks, and trained on.
SAVED_FOR_OTHERS = [("HSDP", 3), ("HFSDP, shards apart", 1), ("two nodes", 3)]


@functools.cache
def _options(mesh: str) -> dict[str, Any]:
    return options_of(mesh)


def build(zero: int | None, seed: int, **options: Any) -> Both:
    """A small model and its optimizer, plain without a level."""
    torch.manual_seed(seed)
    model = Transformer(num_blocks=1)
    optimizer = make_optimizer(model)
    if zero is not None:
        ss.fully_shard(
            model, optimizer, zero_dp_strategy=zero, fsdp_unit_modules=[Block], **options
        )
    return model, optimizer


def make(mesh: str, zero: int, seed: int) -> Both:
    return build(zero, seed, **_options(mesh))


def train(both: Both, rank: int, world_size: int, steps: int = 2) -> Both:
    model, optimizer = both
    for step in range(steps):
        run_step(model, optimizer, Job(zero=3), step, rank, world_size)
        optimizer.step()
        optimizer.zero_grad()
    return both


def whole(both: Both) -> dict[str, Any]:
    """Every parameter, moment and counter, by name."""
    model, optimizer = both
    values: dict[str, Any] = dict(ss.full_state_dict(model))
    for name, entries in named_state(names_of_params(model), optimizer)["state"].items():
        for key, value in entries.items():
            is_part = isinstance(value, ss.ShardedTensor)
            values[f"{name} {key}"] = value.full_tensor() if is_part else value
    return values


def check_same(got: dict[str, Any], expected: dict[str, Any], what: object) -> None:
    assert got.keys() == expected.keys(), what
    for key, value in expected.items():
        assert torch.equal(got[key], value), (what, key)


def save_and_load(rank: int, world_size: int, folder: Path) -> None:
    for number, (mesh, zero) in enumerate(CASES):
        saved = train(make(mesh, zero, seed=0), rank, world_size)
        expected = whole(saved)
        path = folder / f"{mesh}-{zero}"
        future = ss.save_checkpoint(path, *saved, extra=rank, asynchronous=True)
        train(saved, rank, world_size, steps=1)
        future.result()
        if rank == 0:
            torch.save(expected, folder / f"{mesh}-{zero}.pt")
        # Every second mesh: the mesh's next level takes the others, at another level of theirs.
        for target in [*MESHES][number % 2 :: 2]:
            levels = [zero for mesh, zero in CASES if mesh == target]
            loaded = make(target, levels[number // 2 % len(levels)], seed=1)
            assert ss.load_checkpoint(path, *loaded) == rank
            check_same(whole(loaded), expected, (mesh, zero, target))
        if (mesh, zero) in SAVED_FOR_OTHERS:
            resumed = train(make(mesh, zero, seed=2), rank, world_size, steps=1)
            ss.load_checkpoint(path, *resumed)
            train(resumed, rank, world_size, steps=1)
            check_same(whole(resumed), whole(saved), (mesh, zero, "a step later"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of every mesh and level, each loaded on others already."""
    folder = tmp_path_factory.mktemp("meshes")
    run_on_ranks(save_and_load, WORLD, folder, timeout_s=110)
    return folder


@pytest.mark.slow
def test_every_mesh_reads_what_every_other_wrote(saved: Path) -> None:
    assert len(list(saved.glob("*.pt"))) == len(CASES)


def load_flat(rank: int, world_size: int, folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        loaded = build(number + 1, seed=1)
        ss.load_checkpoint(folder / name, *loaded)
        check_same(whole(loaded), torch.load(folder / f"{name}.pt"), name)


@pytest.mark.parametrize("world_size", [1, 2, 3], ids="world{}".format)
def test_another_number_of_ranks_reads_them(world_size: int, saved: Path) -> None:
    names = [f"{mesh}-{zero}" for mesh, zero in SAVED_FOR_OTHERS]
    run_on_ranks(load_flat, world_size, saved, names)


OF_EIGHT = {"HSDP": (3, "no_shard"), "HFSDP": (3, "optim"), "HFSDP, gathered": (1, "optim")}


def save_on_three_axes(rank: int, world_size: int, folder: Path) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "shard"))
    options = {"device_mesh": mesh, "dp_shard_dim": "shard", "dp_outer_dim": "outer"}
    norms = []
    for name, (zero, outer) in OF_EIGHT.items():
        placed = {**options, "ranks_per_node": 2, "outer_dp_sharding_strategy": outer}
        both = train(build(zero, seed=0, **placed), rank, world_size)
        run_step(*both, Job(zero=3), 7, rank, world_size)
        norms.append(ss.clip_grad_norm_(both[0], 1.0).item())
        norms.append(nn.utils.get_total_norm([p.grad for p in both[0].parameters()]).item())
        ss.save_checkpoint(folder / name, *both)
        expected = whole(both)
        if rank == 0:
            torch.save(expected, folder / f"{name}.pt")
    return norms


def test_three_axes_of_nodes_and_replicas(tmp_path: Path) -> None:
    results = run_on_ranks(save_on_three_axes, 8, tmp_path)
    assert all(norms == 3 * results[0][:2] for norms in results), results
    run_on_ranks(load_flat, 2, tmp_path, list(OF_EIGHT))


def test_plain_pytorch_reads_them(saved: Path) -> None:
    for mesh, zero in SAVED_FOR_OTHERS:
        expected = torch.load(saved / f"{mesh}-{zero}.pt")
        model, _ = build(None, seed=1)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=saved / f"{mesh}-{zero}")
        assert all(torch.equal(value, expected[name]) for name, value in state["model"].items())


def test_every_element_is_written_once_and_all_ranks_write(saved: Path) -> None:
    for mesh, zero in CASES:
        metadata = dcp.FileSystemReader(saved / f"{mesh}-{zero}").read_metadata()
        by_file: Counter[str] = Counter()  # of elements
        for name, known in metadata.state_dict_metadata.items():
            chunks = getattr(known, "chunks", [])
            for chunk in chunks:
                index = MetadataIndex(name, chunk.offsets)
                by_file[metadata.storage_data[index].relative_path] += math.prod(chunk.sizes)
            if chunks:
                written = sum(math.prod(chunk.sizes) for chunk in chunks)
                assert written == math.prod(known.size), (mesh, zero, name)
        assert len(by_file) == WORLD, (mesh, zero, by_file)


def export_and_import(rank: int, world_size: int, folder: Path) -> None:
    for number, (mesh, zero) in enumerate(CASES):
        model, _ = make(mesh, zero, seed=number)
        ss.save_safetensors(folder / f"{number}", model)
        target, level = CASES[(number + 7) % len(CASES)]
        other, _ = make(target, level, seed=99)
        ss.load_safetensors(folder / f"{number}", other)
        expected = ss.full_state_dict(model)
        check_same(ss.full_state_dict(other), expected, (mesh, zero, target, level))
        plain, _ = build(None, seed=number)
        check_same(expected, plain.state_dict(), (mesh, zero))


def test_safetensors_go_from_every_mesh_to_every_other(tmp_path: Path) -> None:
    run_on_ranks(export_and_import, WORLD, tmp_path)


FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def pass_state_dicts(rank: int, world_size: int) -> None:
    for number, (mesh, zero) in list(enumerate(CASES))[::2]:
        source = train(make(mesh, zero, seed=number), rank, world_size)
        target, level = CASES[(number + 5) % len(CASES)]
        expected = whole(source)
        # Parts of one layout into those of another.
        parts = make(target, level, seed=99)
        parts[0].load_state_dict(source[0].state_dict())
        parts[1].load_state_dict(source[1].state_dict())
        check_same(whole(parts), expected, ("parts", mesh, zero, target, level))
        # Whole tensors, as torch's functions gather them on rank 0 and send them out.
        full = make(target, level, seed=98)
        state = get_state_dict(*source, options=FULL_ON_CPU)
        assert all(bool(part) == (rank == 0) for part in state)
        set_model_state_dict(full[0], state[0], options=FROM_RANK_0)
        set_optimizer_state_dict(*full, state[1], options=FROM_RANK_0)
        check_same(whole(full), expected, ("full", mesh, zero, target, level))


def test_state_dicts_go_from_every_mesh_to_every_other() -> None:
    run_on_ranks(pass_state_dicts, WORLD)


def two_layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(17, 31), nn.Linear(31, 40))


def exchange_with_fsdp2(rank: int, world_size: int, folder: Path) -> None:
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def theirs(seed: int) -> nn.Module:
        model = two_layers(seed)
        fsdp2_fully_shard(model, mesh=replicas)
        return model

    def values(model: nn.Module) -> dict[str, Tensor]:
        return {name: value.full_tensor() for name, value in model.state_dict().items()}

    dcp.save({"model": theirs(5).state_dict()}, checkpoint_id=folder / "theirs")
    for mesh, zero in SAVED_FOR_OTHERS:
        ours = ss.fully_shard_model(two_layers(1), zero_dp_strategy=zero, **_options(mesh))
        ss.load_checkpoint(folder / "theirs", ours)
        check_same(ss.full_state_dict(ours), two_layers(5).state_dict(), mesh)
        ours.load_state_dict(theirs(6).state_dict())
        check_same(ss.full_state_dict(ours), two_layers(6).state_dict(), mesh)
        ss.save_checkpoint(folder / mesh, ours)
        loaded = theirs(1)
        dcp.load({"model": loaded.state_dict()}, checkpoint_id=folder / mesh)
        check_same(values(loaded), two_layers(6).state_dict(), mesh)


def test_fsdp2_on_a_mesh_of_replicas_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    run_on_ranks(exchange_with_fsdp2, WORLD, tmp_path)


def save_two_stages_of_replicas(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pipe", "shard", "outer"))
    stage = mesh.get_local_rank("pipe")
    options = {"device_mesh": mesh, "dp_shard_dim": "shard", "dp_outer_dim": "outer"}
    for zero, outer in ((0, "no_shard"), (3, "no_shard"), (3, "optim")):
        placed = {**options, "outer_dp_sharding_strategy": outer}
        both = train(build(zero, seed=stage, **placed), rank // 2, 2)
        path = folder / f"{zero} {outer} {stage}"
        ss.save_checkpoint(path, *both, extra=rank)
        again = build(zero, seed=9, **placed)
        assert ss.load_checkpoint(path, *again) == rank
        check_same(whole(again), whole(both), (zero, outer))


def test_two_models_on_meshes_of_their_own(tmp_path: Path) -> None:
    run_on_ranks(save_two_stages_of_replicas, WORLD, tmp_path)


def save_parts_of_one_module(rank: int, world_size: int, folder: Path) -> None:
    def parts(seed: int) -> nn.ModuleDict:
        return nn.ModuleDict({mesh: make(mesh, 3, seed)[0] for mesh in ("flat", "HSDP", "HFSDP")})

    module, again = parts(0), parts(1)
    ss.save_checkpoint(folder / "parts", module)
    ss.load_checkpoint(folder / "parts", again)
    ss.save_safetensors(folder / "export", again)
    expected = ss.full_state_dict(module)
    check_same(ss.full_state_dict(again), expected, "loaded")
    third = parts(2)
    ss.load_safetensors(folder / "export", third)
    check_same(ss.full_state_dict(third), expected, "imported")


def test_a_module_whose_parts_lie_on_several_meshes_of_the_same_ranks(tmp_path: Path) -> None:
    run_on_ranks(save_parts_of_one_module, WORLD, tmp_path)
