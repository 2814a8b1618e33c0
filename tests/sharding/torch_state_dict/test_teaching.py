"""How torch's state-dict tools learn of sharded tensors: in any order of imports, or not at all."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

import sidestream

LATE = """
import sys
import torch
import sidestream
model = torch.nn.Linear(3, 2)
sidestream.fully_shard(model)
assert type(model.state_dict()["weight"]) is sidestream.ShardedTensor
assert "torch.distributed.checkpoint" not in sys.modules
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
print([type(value).__name__ for value in state.values()])
"""


def test_nothing_is_imported_for_it_and_a_later_import_is_taught() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "['Tensor', 'Tensor']", done.stderr


def test_what_is_taught_once_stays_as_it_is() -> None:
    sidestream.fully_shard(nn.Linear(3, 2))
    taught = torch_state_dict._gather_state_dict
    sidestream.fully_shard(nn.Linear(3, 2))
    assert torch_state_dict._gather_state_dict is taught


def test_a_torch_that_cannot_be_taught_gets_no_shards_and_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(3, 2)
    _, optimizer = sidestream.fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.delattr(torch_state_dict, "_gather_state_dict")
    asked = torch_state_dict.StateDictOptions(full_state_dict=True)
    with pytest.raises(RuntimeError, match=r"state_dict\._gather_state_dict as in torch 2\.11"):
        torch_state_dict.get_model_state_dict(model, options=asked)
    with pytest.raises(RuntimeError, match=r"which torch .* lacks"):
        torch_state_dict.get_optimizer_state_dict(model, optimizer, options=asked)
    assert set(model.state_dict()) == set(sidestream.full_state_dict(model))
    assert optimizer.state_dict()["param_groups"]


def test_state_is_converted_and_parameters_are_not() -> None:
    model = nn.Linear(3, 2)
    sidestream.fully_shard(model)
    weight = model.state_dict()["weight"]
    half = weight.to(torch.bfloat16)
    assert half.dtype == half.to_local().dtype == torch.bfloat16
    assert torch.equal(half.full_tensor(), weight.full_tensor().bfloat16())
    with pytest.raises(RuntimeError, match="convert the model before fully_shard"):
        model.bfloat16()
    for other in (weight.to("meta"), half):
        with pytest.raises(RuntimeError, match=r"expected torch\.float32 on cpu, got"):
            model.weight.data = other
