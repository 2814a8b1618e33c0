"""torch.distributed.checkpoint and torch's state-dict API, used as with FSDP2 and mixed with it."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

import sidestream
from sidestream.sharding.tensor.sharded_tensor import ShardedTensor
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.torch_state_dict.models import (
    FROM_RANK_0,
    FULL,
    MARKS,
    flat,
    round_gradients,
)

pytestmark = MARKS

Optimizer = torch.optim.Optimizer
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()) * self.scale + self.frozen


MAKES: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "no state": lambda groups: torch.optim.SGD(groups, lr=0.1),
}


class _Trained(NamedTuple):
    model: nn.Module
    optimizer: Optimizer

    def step(self, seed: int) -> "_Trained":
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        self.model(x).square().mean().backward()
        round_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def sums(self) -> dict[str, str]:
        """SHA-256 of every whole tensor and option, by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        return {key: _sum(value) for key, value in flat(state).items()}


def _sum(value: Any) -> str:
    if isinstance(value, (DTensor, ShardedTensor)):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        value = (value.dtype, value.shape, value.detach().reshape(-1).tolist())
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    flat = [param for param in model.parameters() if param.dim() < 2]
    return [
        {"params": [param for param in model.parameters() if param.dim() > 1]},
        {"params": flat, "lr": 0.05},
    ]


Make = Callable[[Any], Optimizer]


def _ours(seed: int, make: Make, zero: int) -> _Trained:
    torch.manual_seed(seed)
    model = _Model()
    optimizer = make(_groups(model))
    sidestream.fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero)
    return _Trained(model, optimizer)


def _theirs(seed: int, make: Make) -> _Trained:
    torch.manual_seed(seed)
    model = _Model()
    for layer in (model.first, model.second, model):
        fsdp2_fully_shard(layer)
    return _Trained(model, make(_groups(model)))


# ---- what people write to save and to load


def _states(trained: _Trained, options: StateDictOptions | None = None) -> dict[str, Any]:
    model, optimizer = get_state_dict(*trained, options=options)
    return {"m": model, "o": optimizer}


def _plain_states(trained: _Trained) -> dict[str, Any]:
    return {"m": trained.model.state_dict(), "o": trained.optimizer.state_dict()}


def _dcp_save(trained: _Trained, path: str, rank: int) -> None:
    dcp.save(_plain_states(trained), checkpoint_id=path)


def _dcp_load(trained: _Trained, path: str, rank: int) -> None:
    state = _plain_states(trained.step(9))
    dcp.load(state, checkpoint_id=path)
    trained.model.load_state_dict(state["m"])
    trained.optimizer.load_state_dict(state["o"])


def _sharded_save(trained: _Trained, path: str, rank: int) -> None:
    dcp.save(_states(trained), checkpoint_id=path)


def _sharded_load(
    trained: _Trained, path: str, rank: int, options: StateDictOptions | None = None
) -> None:
    state = _states(trained, options)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        *trained, model_state_dict=state["m"], optim_state_dict=state["o"], options=options
    )


def _flattened_save(trained: _Trained, path: str, rank: int) -> None:
    dcp.save(_states(trained, FLAT), checkpoint_id=path)


def _flattened_load(trained: _Trained, path: str, rank: int) -> None:
    _sharded_load(trained, path, rank, FLAT)


def _full_save(trained: _Trained, path: str, rank: int) -> None:
    state = _states(trained, FULL)
    assert {type(x) for x in flat(state).values() if isinstance(x, Tensor)} == {Tensor}
    torch.save(state, f"{path}-{rank}.pt")


def _full_load(trained: _Trained, path: str, rank: int) -> None:
    state = torch.load(f"{path}-{rank}.pt")
    set_state_dict(*trained, model_state_dict=state["m"], optim_state_dict=state["o"], options=FULL)


def _rank_0_save(trained: _Trained, path: str, rank: int) -> None:
    state = _states(trained, ON_RANK_0)
    if rank == 0:
        assert {type(x) for x in flat(state).values() if isinstance(x, Tensor)} == {Tensor}
        torch.save(state, f"{path}.pt")
    else:
        assert state == {"m": {}, "o": {}}


def _rank_0_load(trained: _Trained, path: str, rank: int) -> None:
    state = torch.load(f"{path}.pt") if rank == 0 else {"m": {}, "o": {}}
    set_model_state_dict(trained.model, state["m"], options=FROM_RANK_0)
    set_optimizer_state_dict(*trained, state["o"], options=FROM_RANK_0)


def _async_save(trained: _Trained, path: str, rank: int) -> None:
    # A group of its own: its thread communicates while the model's step does.
    group = torch.distributed.new_group(backend="gloo")
    future = dcp.async_save(_states(trained), checkpoint_id=path, process_group=group)
    trained.step(8)
    future.result()


APIS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "dcp": (_dcp_save, _dcp_load),
    "get and set": (_sharded_save, _sharded_load),
    "flattened": (_flattened_save, _flattened_load),
    "full": (_full_save, _full_load),
    "cpu_offload, broadcast_from_rank0": (_rank_0_save, _rank_0_load),
    "async_save": (_async_save, _sharded_load),
}


def _mixed_with_fsdp2(
    rank: int, world: int, folder: str, make_name: str, apis: list[str], zeros: list[int]
) -> list[str]:
    """What came out otherwise, and after that the number of cases."""
    make, wrong, cases = MAKES[make_name], [], 0
    trained = _theirs(0, make).step(0).step(1)
    expected = [trained.sums(), trained.step(2).sums()]

    def check(case: str, loaded: _Trained) -> None:
        got = [loaded.sums(), loaded.step(2).sums()]
        for when, want, have in zip(("loaded", "a step later"), expected, got, strict=True):
            names = [key for key in want.keys() | have.keys() if want.get(key) != have.get(key)]
            if names:
                wrong.append(f"{case}, {when}: {sorted(names)}")

    for api in apis:
        save, load = APIS[api]
        theirs = f"{folder}/{api}-theirs"
        save(_theirs(0, make).step(0).step(1), theirs, rank)
        for zero in zeros:
            ours = f"{folder}/{api}-{zero}"
            save(_ours(0, make, zero).step(0).step(1), ours, rank)
            torch.distributed.barrier()
            for case, path, target in (
                ("theirs to ours", theirs, _ours(1, make, zero)),
                ("ours to theirs", ours, _theirs(1, make)),
            ):
                load(target, path, rank)
                check(f"{api}, ZeRO-{zero}, {case}", target)
                cases += 1
    return [*wrong, str(cases)]


@pytest.mark.parametrize(
    ("world", "zeros"),
    [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (3, [1, 3]), (4, [0, 2])],
    ids=lambda value: f"ZeRO {value}" if isinstance(value, list) else f"{value} ranks",
)
def test_fsdp2_and_sidestream_take_each_others_checkpoints_through_every_api(
    tmp_path: Path, world: int, zeros: list[int]
) -> None:
    arguments = str(tmp_path), "AdamW", list(APIS), zeros
    got = run_on_ranks(_mixed_with_fsdp2, world, *arguments, timeout_s=100)
    assert got == [[str(2 * len(APIS) * len(zeros))]] * world


@pytest.mark.parametrize("make", ["momentum", "no state"])
def test_so_they_do_with_other_optimizers(tmp_path: Path, make: str) -> None:
    # torch cannot set full optimizer state that has no tensors.
    apis = ["flattened", "full" if make == "momentum" else "dcp"]
    arguments = str(tmp_path), make, apis, [0, 3]
    assert run_on_ranks(_mixed_with_fsdp2, 2, *arguments, timeout_s=60) == [["8"]] * 2
