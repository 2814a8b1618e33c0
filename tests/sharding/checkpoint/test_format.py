"""Tests of the checkpoint format: any world size, plain PyTorch and FSDP2 read it, we theirs."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

import sidestream
from sidestream.sharding.checkpoint import full_state_dict, load_checkpoint, save_checkpoint
from sidestream.sharding.checkpoint.state import names_of_params
from sidestream.sharding.optim.state import named_state
from sidestream.sharding.tensor.group_parts import Intervals
from sidestream.sharding.tensor.sharded_tensor import ShardedTensor
from sidestream.tests.ranks import run_on_ranks

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

SHAPES = {"a": (7, 3), "b": (5,), "c": (2, 2, 3), "d": (1, 9), "scalar": (), "empty": (0, 4)}
# Cuts: even, with a rank that holds nothing, all on every rank, halves on several ranks each, which
# stand side by side or not, and parts in another order than the ranks.
CUTS = ["even", "ragged", "replicated", "halves", "halves apart", "backwards"]


def _intervals(cut: str, numel: int, world_size: int) -> Intervals:
    ranks = range(world_size)
    if cut == "replicated":
        return ((0, numel),) * world_size
    if cut.startswith("halves") and world_size % 2 == 0:
        middle = (numel + 1) // 2
        is_first = [r % 2 == 0 if cut == "halves apart" else r < world_size // 2 for r in ranks]
        return tuple((0, middle) if first else (middle, numel) for first in is_first)
    stops = [math.ceil(numel * (rank + 1) / world_size) for rank in ranks]
    if cut == "ragged" and world_size > 1:
        stops[0] = 0
    intervals = tuple(zip([0, *stops[:-1]], stops, strict=True))
    return intervals[::-1] if cut == "backwards" else intervals


def _full(name: str, value: float = 0.0) -> Tensor:
    shape = torch.Size(SHAPES[name])
    return (
        torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) * 0.1 + ord(name[0]) + value
    )


def _sharded(name: str, full: Tensor, rank: int, world_size: int, cut: str) -> ShardedTensor:
    intervals = _intervals(cut, full.numel(), world_size)
    start, stop = intervals[rank]
    return ShardedTensor(
        full.reshape(-1)[start:stop].clone(),
        full.shape,
        start,
        name=name,
        group=dist.group.WORLD,
        intervals=intervals,
    )


def _save_tensors(rank: int, world_size: int, folder: str) -> None:
    for cut in CUTS:
        tensors = {name: _sharded(name, _full(name), rank, world_size, cut) for name in SHAPES}
        dcp.save({"model": tensors}, checkpoint_id=f"{folder}/{cut}-{world_size}")


def _load_tensors(rank: int, world_size: int, folders: list[str]) -> list[str]:
    """What is not what was saved."""
    wrong = []
    for folder in folders:
        for cut in CUTS:
            flat = torch.zeros(100)
            version = flat._version
            tensors = {
                name: _sharded(name, _full(name) * float("nan"), rank, world_size, cut)
                for name in SHAPES
            }
            tensors["a"].local = flat[: len(tensors["a"].local)]
            dcp.load({"model": tensors}, checkpoint_id=folder)
            for name, tensor in tensors.items():
                expected = tensor.interval_of(_full(name))
                if not torch.equal(tensor.local, expected):
                    wrong.append(f"{name} of {folder} into {cut}: {tensor.local}, not {expected}")
            if len(tensors["a"].local) and flat._version == version:
                wrong.append(f"version after {folder}")
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Checkpoints of the same tensors from 1 to 4 ranks, cut in every way."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for world_size in (1, 2, 3, 4):
        run_on_ranks(_save_tensors, world_size, str(folder), timeout_s=60)
    return sorted(str(path) for path in folder.iterdir())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_world_size_reads_what_every_other_wrote(saved: list[str], world_size: int) -> None:
    wrong = run_on_ranks(_load_tensors, world_size, saved, timeout_s=90)
    assert wrong == [[]] * world_size


def test_plain_tensors_in_one_process_read_them(saved: list[str]) -> None:
    for folder in saved:
        tensors = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
        dcp.load({"model": tensors}, checkpoint_id=folder)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, _full(name)), (folder, name)


def test_every_element_is_written_once(saved: list[str]) -> None:
    for folder in saved:
        metadata = dcp.FileSystemReader(folder).read_metadata()
        for name, shape in SHAPES.items():
            chunks = metadata.state_dict_metadata[f"model.{name}"].chunks
            assert sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(shape), (
                folder,
                name,
            )
            bound = max(1, 2 * len(shape) - 1) * int(folder[-1])
            assert len(chunks) <= bound, (folder, name)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()) * self.scale


def _fsdp2(seed: int, learning_rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _Model()
    for layer in (model.first, model.second, model):
        fsdp2_fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=learning_rate)


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """`state` flattened, with sharded tensors gathered."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in _whole(value).items()}
        elif isinstance(value, (DTensor, ShardedTensor)):
            flat[key] = value.full_tensor().detach()
        else:
            flat[key] = value
    return flat


def _differences(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    different = sorted(expected.keys() ^ got.keys())
    for key in expected.keys() & got.keys():
        if not torch.equal(torch.as_tensor(expected[key]), torch.as_tensor(got[key])):
            different.append(f"{key}: expected {expected[key]}, got {got[key]}")
    return different


def _from_fsdp2_and_back(rank: int, world_size: int, folder: str, zero: int) -> list[str]:
    """What changed on the way from FSDP2 to sidestream to another FSDP2 model."""
    theirs, optimizer = _fsdp2(seed=0, learning_rate=0.3)
    for step in range(2):
        theirs(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(theirs, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{folder}/theirs")
    expected, expected_state = _whole(model_state), _whole(optimizer_state["state"])

    torch.manual_seed(1)
    model = _Model()
    ours, our_optimizer = sidestream.fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=zero,
    )
    extra = load_checkpoint(f"{folder}/theirs", ours, our_optimizer)
    named = named_state(names_of_params(ours), our_optimizer)
    wrong = _differences(expected, full_state_dict(ours))
    wrong += _differences(expected_state, _whole(named["state"]))
    if extra is not None or [group["lr"] for group in our_optimizer.param_groups] != [0.3]:
        wrong.append(f"extra {extra} or options {our_optimizer.param_groups}")
    save_checkpoint(f"{folder}/ours", ours, our_optimizer, extra={"step": 2})

    again, again_optimizer = _fsdp2(seed=2, learning_rate=0.1)
    model_state, optimizer_state = get_state_dict(again, again_optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=f"{folder}/ours")
    set_state_dict(
        again,
        again_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    model_state, optimizer_state = get_state_dict(again, again_optimizer)
    wrong += _differences(expected, _whole(model_state))
    wrong += _differences(expected_state, _whole(optimizer_state["state"]))
    if again_optimizer.param_groups[0]["lr"] != 0.3:
        wrong.append("their learning rate")
    return wrong


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_fsdp2_and_sidestream_read_each_other_bit_for_bit(tmp_path: Path, zero: int) -> None:
    assert run_on_ranks(_from_fsdp2_and_back, 2, str(tmp_path), zero, timeout_s=90) == [[]] * 2
