"""Optimizer state by parameter name: what is given out, what is taken, and what is refused."""

import pytest
import torch
from torch import Tensor

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.optimizer_state import (
    find_runs,
    load_scalars,
    named_state,
    prepare_state,
)
from sidestream.sharding.runtime import Runtime
from sidestream.tests.sharding.trainer import Block, Transformer, batch, loss_of


def stepped() -> tuple[Runtime, torch.optim.Optimizer]:
    """One unit, one flat parameter, AdamW state after one step."""
    model = Transformer(num_blocks=1)
    _, optimizer = ss.fully_shard(model, torch.optim.AdamW(model.parameters(), lr=0.125))
    loss_of(model, batch(0)).backward()
    optimizer.step()
    return runtime_of(model), optimizer


def entries_of(
    runtime: Runtime, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor | None]]:
    """What `prepare_state` takes, for a checkpoint of this very optimizer."""
    return {
        name: {
            key: value.to_local().to("meta") if isinstance(value, ss.ShardedTensor) else None
            for key, value in state.items()
        }
        for name, state in named_state(runtime, optimizer)["state"].items()
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
    saved = named_state(runtime_of(model), optimizer)["param_groups"]
    expected = [member_names[0], member_names[1], [], member_names[2]]
    assert [sorted(group["params"]) for group in saved] == [sorted(names) for names in expected]


def test_optimizer_of_another_model_is_not_taken() -> None:
    first, second = Transformer(), Transformer()
    _, optimizer = ss.fully_shard(first, torch.optim.SGD(first.parameters(), lr=0.1))
    ss.fully_shard(second)
    with pytest.raises(
        ValueError, match="expected the optimizer that fully_shard bound to this module"
    ):
        find_runs(runtime_of(second), optimizer)


def test_named_state_aliases_the_live_one() -> None:
    runtime, optimizer = stepped()
    named = named_state(runtime, optimizer)["state"]
    (flat,) = optimizer.param_groups[0]["params"]
    assert set(named) == {name for unit in runtime.units for name in unit.spec.names}
    for entries in named.values():
        entries["exp_avg"].fill_(3.0)
        assert isinstance(entries["step"], Tensor) and entries["step"] == 1
    assert optimizer.state[flat]["exp_avg"].eq(3.0).sum() == sum(
        entries["exp_avg"].numel() for entries in named.values()
    )


def test_prepared_state_has_the_entries_of_the_checkpoint() -> None:
    runtime, optimizer = stepped()
    (flat,) = optimizer.param_groups[0]["params"]
    kept = optimizer.state[flat]["exp_avg"].clone()
    saved = entries_of(runtime, optimizer)
    for name, entries in saved.items():
        moment = entries["exp_avg"]
        assert moment is not None
        saved[name] = {"step": None, "exp_avg": moment, "max_exp_avg_sq": moment.bfloat16()}
    prepare_state(runtime, optimizer, saved)
    state = optimizer.state[flat]
    assert set(state) == {"step", "exp_avg", "max_exp_avg_sq"}
    assert torch.equal(state["exp_avg"], kept)
    assert state["max_exp_avg_sq"].shape == flat.shape
    assert state["max_exp_avg_sq"].dtype == torch.bfloat16
    prepare_state(runtime, optimizer, {})
    assert not optimizer.state


def test_entries_that_one_flat_state_cannot_hold_are_refused_and_nothing_changes() -> None:
    runtime, optimizer = stepped()
    (flat,) = optimizer.param_groups[0]["params"]
    saved = entries_of(runtime, optimizer)
    del saved["head.weight"]["exp_avg"]
    with pytest.raises(
        ValueError, match=r"one set of entries .*\['exp_avg_sq', 'step'\] for 'head"
    ):
        prepare_state(runtime, optimizer, saved)
    assert set(optimizer.state[flat]) == {"step", "exp_avg", "exp_avg_sq"}


def test_loaded_options_and_counters_are_taken_and_members_stay() -> None:
    runtime, optimizer = stepped()
    (flat,) = members = optimizer.param_groups[0]["params"]
    moment = optimizer.state[flat]["exp_avg"]
    loaded = named_state(runtime, optimizer)
    loaded["param_groups"][0] |= {"lr": 0.5, "custom": "a"}
    for entries in loaded["state"].values():
        entries["step"] = torch.tensor(7.0)
    load_scalars(runtime, optimizer, loaded)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["custom"]) == (0.5, "a")
    assert group["params"] is members and group["params"][0] is flat
    assert optimizer.state[flat]["step"] == 7 and optimizer.state[flat]["exp_avg"] is moment
