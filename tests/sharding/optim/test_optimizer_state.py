"""Optimizer state by parameter name: what is given out, what is taken, and what is refused."""

import pytest
import torch
from torch import Tensor

import sidestream as ss
from sidestream.sharding.checkpoint.state import names_of_params
from sidestream.sharding.optim.state import load_scalars, named_state, prepare_state
from sidestream.tests.sharding.trainer import Block, Transformer, batch, loss_of


def stepped() -> tuple[Transformer, torch.optim.Optimizer]:
    """One unit, one flat parameter, AdamW state after one step."""
    model = Transformer(num_blocks=1)
    _, optimizer = ss.fully_shard(model, torch.optim.AdamW(model.parameters(), lr=0.125))
    loss_of(model, batch(0)).backward()
    optimizer.step()
    return model, optimizer


def entries_of(
    names: dict[int, str], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor | None]]:
    """What `prepare_state` takes, for a checkpoint of this very optimizer."""
    return {
        name: {
            key: value.to_local().to("meta") if isinstance(value, ss.ShardedTensor) else None
            for key, value in state.items()
        }
        for name, state in named_state(names, optimizer)["state"].items()
    }


def test_groups_and_options_are_kept() -> None:
    model = Transformer()
    names = {id(param): name for name, param in model.named_parameters()}
    parts = [[], [], []]
    for index, param in enumerate(model.parameters()):
        parts[index % 3].append(param)
    member_names = [[names[id(param)] for param in part] for part in parts]
    groups = [
        {"params": parts[0], "lr": 0.5, "custom": "a"},
        {"params": parts[1], "weight_decay": 0.25},
        {"params": []},
        {"params": parts[2]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.125, betas=(0.5, 0.75))
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    ss.fully_shard(model, optimizer, fsdp_unit_modules=[Block])
    after = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert before == after
    saved = named_state(names_of_params(model), optimizer)["param_groups"]
    expected = [member_names[0], member_names[1], [], member_names[2]]
    assert [sorted(group["params"]) for group in saved] == [sorted(names) for names in expected]


def test_optimizer_of_another_model_is_not_taken() -> None:
    first, second = Transformer(), Transformer()
    _, optimizer = ss.fully_shard(first, torch.optim.SGD(first.parameters(), lr=0.1))
    ss.fully_shard(second)
    with pytest.raises(
        ValueError, match="expected the optimizer that fully_shard bound to this module"
    ):
        named_state(names_of_params(second), optimizer)


def test_named_state_aliases_the_live_one() -> None:
    model, optimizer = stepped()
    names = names_of_params(model)
    named = named_state(names, optimizer)["state"]
    assert set(named) == {name for name, _ in model.named_parameters()}
    for entries in named.values():
        entries["exp_avg"].fill_(3.0)
        assert isinstance(entries["step"], Tensor) and entries["step"] == 1
    optimizer.step()
    for entries in named_state(names, optimizer)["state"].values():
        assert (entries["exp_avg"].full_tensor() > 2.5).all()
        assert entries["step"] == 2


def test_prepared_state_has_the_entries_of_the_checkpoint() -> None:
    model, optimizer = stepped()
    names = names_of_params(model)
    before = named_state(names, optimizer)["state"]
    saved = entries_of(names, optimizer)
    for name, entries in saved.items():
        moment = entries["exp_avg"]
        assert moment is not None
        saved[name] = {"step": None, "exp_avg": moment, "max_exp_avg_sq": moment.bfloat16()}
    prepare_state(names, optimizer, saved)
    for param, state in optimizer.state.items():
        assert set(state) == {"step", "exp_avg", "max_exp_avg_sq"}
        assert torch.equal(state["exp_avg"], before[param.name]["exp_avg"])
        assert state["max_exp_avg_sq"].shape == param.shape
        assert state["max_exp_avg_sq"].dtype == torch.bfloat16
    prepare_state(names, optimizer, {})
    assert not optimizer.state


def test_loaded_options_and_counters_are_taken_and_members_stay() -> None:
    model, optimizer = stepped()
    names = names_of_params(model)
    members = list(optimizer.param_groups[0]["params"])
    loaded = named_state(names, optimizer)
    loaded["param_groups"][0] |= {"lr": 0.5, "custom": "a"}
    for entries in loaded["state"].values():
        entries["step"] = torch.tensor(7.0)
    load_scalars(names, optimizer, loaded)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["custom"]) == (0.5, "a")
    assert all(now is before for now, before in zip(group["params"], members, strict=True))
    optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {8.0}
