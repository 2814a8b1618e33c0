"""Optimizers over flat shards keep their class, groups, options and state, and give the same
numbers.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.optim import flat_runs
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import (
    Block,
    Transformer,
    batch,
    full_params,
    loss_of,
)

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "AdamW of ours": (ss.AdamW, {"lr": 1e-2}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-3}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
}


def step_all(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_same_bits_as_the_plain_optimizer_and_state_carries_over(
    case: tuple[Any, dict[str, Any]],
) -> None:
    kind, options = case
    torch.manual_seed(0)
    plain = Transformer()
    plain_optimizer = kind(plain.parameters(), **options)
    step_all(plain, plain_optimizer, range(2))
    sharded = copy.deepcopy(plain)
    optimizer = kind(sharded.parameters(), **options)
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    ss.fully_shard(sharded, optimizer, fsdp_unit_modules=[Block])
    step_all(plain, plain_optimizer, range(2, 5))
    step_all(sharded, optimizer, range(2, 5))
    assert type(optimizer) is kind
    # torch's fused kernel rounds the last elements of a tensor, which fill no vector, in another
    # order.
    tolerance = 1e-6 if options.get("fused") or kind is ss.AdamW else 0.0
    for name, value in full_params(sharded).items():
        expected = dict(plain.named_parameters())[name].detach()
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


class Counting(torch.optim.SGD):
    """Notes what it sees in a step."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.counts = [len(group["params"]) for group in self.param_groups]


def test_flat_parameters_are_few() -> None:
    model = Transformer()
    decay = [param for param in model.parameters() if param.dim() >= 2]
    rest = [param for param in model.parameters() if param.dim() < 2]
    optimizer = Counting([{"params": decay}, {"params": rest}], lr=1e-2)
    ss.fully_shard(model, optimizer, fsdp_unit_modules=[Block], elementwise=True)
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(decay), len(rest)]
    optimizer.step()
    assert optimizer.counts == [4, 4], (
        "one flat parameter per unit and group: matrices are laid out together"
    )


def cut_runs(rank: int, world_size: int, path: str) -> None:
    """Flat parameters of one tensor each train, save and load like one flat parameter a unit."""
    outcomes: list[dict[str, torch.Tensor]] = []
    for name in ("whole", "cut"):
        torch.manual_seed(0)
        model = Transformer()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with mock.patch.object(flat_runs, "CACHED_RUN_NUMEL", 1 if name == "cut" else 2**30):
            ss.fully_shard(model, opt, fsdp_unit_modules=[Block])
        units = runtime_of(model).units
        runs = [run for unit in units for run in unit.gradients.runs]
        tensors = sum(len(unit.spec.names) for unit in units)
        assert len(runs) == (tensors if name == "cut" else len(units))
        assert name == "whole" or any(run.start == run.stop for run in runs), "no empty part"
        step_all(model, opt, range(2))
        if name == "whole":
            ss.save_checkpoint(path, model, opt)
        else:
            ss.load_checkpoint(path, model, opt)
        step_all(model, opt, range(2, 4))
        outcomes.append(full_params(model))
    for name, value in outcomes[0].items():
        assert torch.equal(value, outcomes[1][name]), name


def test_runs_cut_for_the_cache_change_nothing(tmp_path: Path) -> None:
    run_on_ranks(cut_runs, 3, str(tmp_path / "checkpoint"))


def test_a_schedule_and_an_unowned_part_of_the_model() -> None:
    model = Transformer()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    ss.fully_shard(model, optimizer, fsdp_unit_modules=[Block])
    before = full_params(model)
    step_all(model, optimizer, range(1))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    after = full_params(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("blocks")}


def main_grads_of_another_dtype(rank: int, world_size: int) -> None:
    for zero in range(4):
        model = Transformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = ss.MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
        ss.fully_shard(model, optimizer, zero_dp_strategy=zero, mixed_precision_policy=policy)
        before = full_params(model)
        loss_of(model, batch(0, rank=rank, world_size=world_size)).backward()
        grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        # The optimizer sees a copy in its parameters' dtype, and that is what `.grad` shows.
        assert all(torch.equal(grad, grad.bfloat16().float()) for grad in grads.values())
        for param in model.parameters():
            param.grad.mul_(2.0)
        optimizer.step()
        for name, value in full_params(model).items():
            expected = before[name].add(grads[name], alpha=-0.2)
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)


def test_main_gradients_of_another_dtype_than_main_parameters() -> None:
    run_on_ranks(main_grads_of_another_dtype, 2)


def old_style_step(rank: int, world_size: int) -> None:
    """An optimizer that writes through `.data` leaves no trace in version counters."""

    class Old(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.add_(param.grad.data, alpha=-group["lr"])

    results = []
    for zero in range(4):
        torch.manual_seed(0)
        model = Transformer()
        policy = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        _, optimizer = ss.fully_shard(
            model,
            Old(model.parameters(), lr=0.5),
            zero_dp_strategy=zero,
            elementwise=True,
            mixed_precision_policy=policy,
        )
        losses = []
        for _ in range(3):
            loss = loss_of(model, batch(0, rank=rank, world_size=world_size))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[2] < losses[1] < losses[0]
        results.append(losses)
    assert all(losses == results[0] for losses in results)


def test_gathered_parameters_follow_an_optimizer_that_writes_through_data() -> None:
    run_on_ranks(old_style_step, 2)


def test_a_plain_optimizer_that_is_never_bound_still_trains() -> None:
    torch.manual_seed(0)
    plain = Transformer()
    sharded = copy.deepcopy(plain)
    ss.fully_shard(sharded, fsdp_unit_modules=[Block], zero_dp_strategy=1)
    for model in (plain, sharded):
        step_all(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(3))
    for name, value in full_params(sharded).items():
        assert torch.equal(value, dict(plain.named_parameters())[name]), name


def test_foreign_parameters_added_after_sharding_are_refused_at_the_step() -> None:
    model = Transformer()
    _, optimizer = ss.fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, batch(0)).backward()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match=r"a foreign one at param_groups\[1\]\['params'\]\[0\]"):
        optimizer.step()


def test_step_on_gradients_that_were_never_exchanged_is_refused() -> None:
    model = Transformer()
    _, optimizer = ss.fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with ss.no_sync(model):
        loss_of(model, batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"only accumulated under no_sync"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, batch(0)).backward()
    optimizer.step()


@pytest.mark.parametrize("zero", range(4))
def test_an_optimizer_bound_after_backward_steps_with_its_gradients(zero: int) -> None:
    torch.manual_seed(0)
    plain = Transformer()
    sharded = copy.deepcopy(plain)
    ss.fully_shard(sharded, fsdp_unit_modules=[Block], zero_dp_strategy=zero)
    for model in (plain, sharded):
        loss_of(model, batch(0)).backward()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = torch.optim.SGD([{"params": matrices}, {"params": others, "lr": 1.0}], lr=0.1)
        if model is sharded:
            ss.fully_shard_optimizer(optimizer)
        optimizer.step()
    for name, value in full_params(sharded).items():
        assert torch.equal(value, dict(plain.named_parameters())[name]), name


def test_two_optimizers_over_one_model() -> None:
    torch.manual_seed(0)
    plain = Transformer()
    sharded = copy.deepcopy(plain)
    ss.fully_shard(sharded, fsdp_unit_modules=[Block])
    for model in (plain, sharded):
        matrices = torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1], lr=1e-2)
        others = torch.optim.SGD([p for p in model.parameters() if p.dim() <= 1], lr=0.1)
        if model is sharded:
            ss.fully_shard_optimizer(matrices)
            ss.fully_shard_optimizer(others)
        for step in range(3):
            loss_of(model, batch(step)).backward()
            for optimizer in (matrices, others):
                optimizer.step()
                optimizer.zero_grad()
    for name, value in full_params(sharded).items():
        assert torch.equal(value, dict(plain.named_parameters())[name]), name
