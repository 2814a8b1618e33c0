"""`torch.distributed.checkpoint.async_save` of a sharded model and its optimizer: what is written
is what was there when it was called, whichever stager copies it and wherever it is written.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _state_dict_utils as utils
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import sidestream
from sidestream.sharding.tensor.sharded_tensor import ShardedTensor
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.torch_state_dict.models import MARKS, Both, are_equal

pytestmark = MARKS


class _Model(nn.Module):
    """With a parameter of no dimension, one without elements, tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x).relu())) * self.scalar + self.empty.sum()


def _made(seed: int, zero: int) -> Both:
    torch.manual_seed(seed)
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sidestream.fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero)
    return _step((model, optimizer))


def _step(both: Both) -> Both:
    model, optimizer = both
    model(torch.arange(12.0).view(4, 3).sin()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return both


def _state(both: Both) -> dict[str, Any]:
    return {"m": both[0].state_dict(), "o": both[1].state_dict()["state"]}


def _values(state: Any) -> list[Tensor]:
    """Every tensor, of sharded ones this rank's part, copied."""
    if isinstance(state, dict):
        return [value for part in state.values() for value in _values(part)]
    return [(state.to_local() if isinstance(state, ShardedTensor) else state).detach().clone()]


def _staging(*, shared: bool = False, in_thread: bool = False) -> StagingOptions:
    return StagingOptions(False, shared, in_thread, False)


STAGERS: dict[str, Callable[[], Any]] = {
    "none given": lambda: None,
    "kept memory": lambda: DefaultStager(_staging()),
    "shared memory": lambda: DefaultStager(_staging(shared=True)),
    "in a thread": lambda: DefaultStager(_staging(in_thread=True)),
    "blocking": BlockingAsyncStager,
}


def _can_stage_again() -> bool:
    """Whether a DefaultStager can; those of torch 2.11 and 2.12 can once, whatever the state."""
    stager = DefaultStager(_staging())
    stager.stage({"": torch.zeros(1)})
    try:
        stager.stage({"": torch.zeros(1)})
    except KeyError:
        return False
    return True


def _save_twice(
    rank: int, world: int, folder: str, stagers: dict[str, list[int]], where: str
) -> list[str]:
    wrong = []
    group = dist.new_group(backend="gloo")
    can_stage_again = _can_stage_again()
    for name, zeros in stagers.items():
        for zero in zeros:
            both, stager = _made(0, zero), STAGERS[name]()
            for number in range(2):
                path = f"{folder}/{name}-{zero}-{number}"
                expected = _values(_state(both))
                saving = dcp.async_save(
                    _state(both),
                    checkpoint_id=path,
                    process_group=group,
                    async_stager=stager,
                    async_checkpointer_type=AsyncCheckpointerType(where),
                )
                if in_thread := name == "in a thread":
                    saving.staging_completion.result()
                _step(both)
                (saving.upload_completion if in_thread else saving).result()
                dist.barrier()
                loaded = _state(_made(1, zero))
                dcp.load(loaded, checkpoint_id=path)
                if not are_equal(_values(loaded), expected):
                    wrong.append(f"{name}, ZeRO-{zero}, save {number}")
                if stager is not None and not can_stage_again:
                    stager.close()
                    stager = STAGERS[name]()
            if stager is not None:
                stager.close()
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_step_meanwhile_does_not_change_what_is_written(tmp_path: Path, world: int) -> None:
    stagers = {name: [3] for name in STAGERS} | {"none given": [0, 1, 2, 3]}
    got = run_on_ranks(_save_twice, world, str(tmp_path), stagers, "thread", timeout_s=60)
    assert got == [[]] * world


def test_another_process_may_write_it(tmp_path: Path) -> None:
    stagers = {"none given": [3], "shared memory": [0]}
    got = run_on_ranks(_save_twice, 2, str(tmp_path), stagers, "process", timeout_s=100)
    assert got == [[]] * 2


def _copied(rank: int, world: int) -> list[str]:
    wrong = []
    for zero in range(4):
        for shared in (False, True):
            both = _made(0, zero)
            copy = utils._create_cpu_state_dict(_state(both), share_memory=shared)
            utils._copy_state_dict(_state(both), copy)
            expected = _values(_state(both))
            _step(both)
            if not are_equal(_values(copy), expected):
                wrong.append(f"ZeRO-{zero}, shared {shared}")
    return wrong


def test_state_is_copied_into_memory_of_the_cpu() -> None:
    assert run_on_ranks(_copied, 2) == [[]] * 2
