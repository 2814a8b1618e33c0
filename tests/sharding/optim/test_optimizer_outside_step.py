"""What walks an optimizer's groups and state between steps sees the model's parameters, so it does
the same on every rank as on a plain model: clipping, scaling, schedules, resets, state dicts.
"""

import copy
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS

EPS = torch.finfo(torch.float32).eps
WORLDS = [1, 2, 3]
# Sums of fewer than 100 terms in another order, relative to values of about one.
TOLERANCE = {"rtol": 100 * EPS, "atol": 100 * EPS}


class Pair:
    """A sharded model and a plain twin on the same data, with an optimizer each."""

    def __init__(self, zero: int, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.plain: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.sharded = copy.deepcopy(self.plain)
        self.plain_optimizer = make(self.plain.parameters())
        self.optimizer = make(self.sharded.parameters())
        ss.fully_shard(
            self.sharded, self.optimizer, zero_dp_strategy=zero, fsdp_unit_modules=[nn.Linear]
        )

    def both(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        return [(self.plain, self.plain_optimizer), (self.sharded, self.optimizer)]

    def backward(self, seed: int = 0, scale: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        for model, _ in self.both():
            scale(model(x).square().mean()).backward()

    def step(self) -> None:
        for _, optimizer in self.both():
            optimizer.step()
            optimizer.zero_grad()

    def train(self, *seeds: int) -> None:
        for seed in seeds:
            self.backward(seed)
            self.step()

    def check(self) -> None:
        for (name, ours), theirs in zip(
            self.sharded.named_parameters(), self.plain.parameters(), strict=True
        ):
            torch.testing.assert_close(
                ours.full_tensor(), theirs.detach(), msg=lambda t, n=name: f"{n}: {t}", **TOLERANCE
            )


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def our_adamw(params: Any) -> torch.optim.Optimizer:
    return ss.AdamW(params, lr=0.01)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# ---- what a plain model does too


def torch_clipping(pair: Pair) -> None:
    for seed in range(3):
        pair.backward(seed)
        norms = [
            torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.05)
            for _, optimizer in pair.both()
        ]
        torch.testing.assert_close(*norms, **TOLERANCE)
        pair.step()


def torch_clipping_in_a_closure(pair: Pair) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    for model, optimizer in pair.both():

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.05, foreach=False)
            return loss

        for _ in range(2):
            assert optimizer.step(closure) is not None
        optimizer.step(closure=closure)


def total_norms_and_values(pair: Pair) -> None:
    pair.backward()
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in params_of(o)], norm_type)
            for _, o in pair.both()
        ]
        torch.testing.assert_close(*norms, **TOLERANCE)
    for _, optimizer in pair.both():
        torch.nn.utils.clip_grad_value_(params_of(optimizer), 0.01)
    pair.step()


def clipping_in_a_hook(pair: Pair) -> None:
    for _, optimizer in pair.both():
        optimizer.register_step_pre_hook(
            lambda opt, *_: torch.nn.utils.clip_grad_norm_(params_of(opt), 0.05) and None
        )
        optimizer.register_step_post_hook(lambda opt, *_: params_of(opt)[0].data.mul_(0.5))
    pair.train(0, 1, 2)


def a_group_added_later(pair: Pair) -> None:
    for model, optimizer in pair.both():
        taken = optimizer.param_groups[0]["params"].pop()
        assert taken is list(model.parameters())[-1]
    pair.train(0)
    for model, optimizer in pair.both():
        last = list(model.parameters())[-1]
        optimizer.add_param_group({"params": [last], "lr": 0.5})
    pair.train(1, 2)


def groups_edited_between_steps(pair: Pair) -> None:
    pair.train(0)
    taken = [optimizer.param_groups[0]["params"].pop(1) for _, optimizer in pair.both()]
    pair.train(1, 2)
    for (_, optimizer), param in zip(pair.both(), taken, strict=True):
        optimizer.param_groups[0]["params"].append(param)
    for model, _ in pair.both():
        model.zero_grad()
    pair.train(3, 4)


def state_that_is_assigned_as_a_whole(pair: Pair) -> None:
    pair.train(0)
    plain, ours = list(pair.plain.parameters()), list(pair.sharded.parameters())
    first = pair.plain_optimizer.state[plain[0]]
    entries = {key: value if key == "step" else value * 2.0 for key, value in first.items()}
    pair.plain_optimizer.state.update({plain[0]: copy.deepcopy(entries)})
    pair.optimizer.state.update({ours[0]: copy.deepcopy(entries)})
    pair.train(1)
    pair.plain_optimizer.state |= {plain[0]: copy.deepcopy(entries)}
    pair.optimizer.state |= {ours[0]: copy.deepcopy(entries)}
    assert set(copy.copy(pair.optimizer.state)) == set(ours)
    pair.train(2)


def state_that_is_reset(pair: Pair) -> None:
    pair.train(0, 1)
    for _, optimizer in pair.both():
        optimizer.state.clear()
    pair.train(2)
    for model, optimizer in pair.both():
        del optimizer.state[next(model.parameters())]
    pair.train(3, 4)


def one_counter_that_is_reset(pair: Pair) -> None:
    pair.train(0, 1)
    for model, optimizer in pair.both():
        state = optimizer.state[next(model.parameters())]
        for key, value in state.items():
            if key == "step":
                value.fill_(0.0)
            else:
                value.mul_(2.0)
    pair.train(2, 3)


def a_loaded_state_dict(pair: Pair) -> None:
    pair.train(0, 1)
    saved = copy.deepcopy(pair.plain_optimizer.state_dict())
    pair.train(2)
    for _, optimizer in pair.both():
        optimizer.load_state_dict(copy.deepcopy(saved))
    pair.train(3)
    for _, optimizer in pair.both():
        optimizer.load_state_dict(optimizer.state_dict())
    pair.train(4)


def a_schedule(pair: Pair) -> None:
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for _, optimizer in pair.both()
    ]
    for seed in range(3):
        pair.train(seed)
        for schedule in schedules:
            schedule.step()


def gradients_cleared_to_zero(pair: Pair) -> None:
    pair.train(0)
    pair.backward(1)
    for _, optimizer in pair.both():
        optimizer.zero_grad(set_to_none=False)
    pair.train(2)


SAME_AS_PLAIN = (
    torch_clipping,
    torch_clipping_in_a_closure,
    total_norms_and_values,
    clipping_in_a_hook,
    a_group_added_later,
    groups_edited_between_steps,
    state_that_is_assigned_as_a_whole,
    state_that_is_reset,
    one_counter_that_is_reset,
    a_loaded_state_dict,
    a_schedule,
    gradients_cleared_to_zero,
)


def like_plain(rank: int, world_size: int, make: Any) -> None:
    for act in SAME_AS_PLAIN:
        for zero in LEVELS[world_size]:
            pair = Pair(zero, make)
            act(pair)
            try:
                pair.check()
            except AssertionError as error:
                raise AssertionError(f"{act.__name__}, ZeRO-{zero}") from error


@pytest.mark.parametrize("make", [sgd, adamw], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_does_what_it_does_to_a_plain_optimizer(world_size: int, make: Any) -> None:
    run_on_ranks(like_plain, world_size, make, timeout_s=100)


def test_schedules_made_before_and_after_step_without_a_warning() -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model.parameters())
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ss.fully_shard(model, optimizer)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before.step()
    after.step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert "closure" in inspect.signature(optimizer.step).parameters


# ---- GradScaler


def scaled(rank: int, world_size: int, make: Any) -> list[list[float]]:
    """Steps with an overflow in one element in the middle; parameters and scales."""
    found = []
    for zero in LEVELS[world_size]:
        for unscales in (False, True):
            pair = Pair(zero, make)
            scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
            for seed in range(4):
                scale = iter(scalers)
                pair.backward(seed, lambda loss, s=scale: next(s).scale(loss))
                for model, _ in pair.both():
                    if seed == 1:  # the first and the last rank have another one
                        where = list(model.parameters())[0 if rank % 2 else -1]
                        assert where.grad is not None
                for (model, optimizer), scaler in zip(pair.both(), scalers, strict=True):
                    if seed == 1:
                        grad = next(model.parameters()).grad
                        mask = torch.zeros(grad.shape)
                        mask[0, 0] = math.inf  # in the part of the first rank alone
                        grad.add_(mask)
                    if unscales:
                        scaler.unscale_(optimizer)
                        torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.05)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0
            pair.check()
            found.append([p.full_tensor().sum().item() for p in pair.sharded.parameters()])
    return found


@pytest.mark.parametrize(
    "make", [sgd, adamw, fused_adamw, our_adamw], ids=["SGD", "AdamW", "fused AdamW", "ours"]
)
@pytest.mark.parametrize("world_size", WORLDS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size: int, make: Any) -> None:
    ranks = run_on_ranks(scaled, world_size, make)
    assert all(found == ranks[0] for found in ranks)


# ---- what a step and its hooks see


class Twice(torch.optim.SGD):
    """Calls its closure twice, and notes how many parameters it and its closure see."""

    def step(self, closure: Any = None) -> Any:
        self.counts = [len(params_of(self))]
        for _ in range(2):
            with torch.enable_grad():
                closure()
            self.counts.append(len(params_of(self)))
        return super().step()


def test_a_step_sees_flat_parameters_and_its_closure_and_hooks_the_models() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = Twice(model.parameters(), lr=0.1)
    seen: list[int] = []
    note = lambda opt, *_: seen.append(len(params_of(opt)))  # noqa: E731
    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)
    ss.fully_shard(model, optimizer, elementwise=True)
    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)

    def closure() -> None:
        seen.append(len(params_of(optimizer)))
        model(torch.ones(1, 3)).sum().backward()

    optimizer.step(closure)
    assert len(seen) >= 6 and set(seen) == {4}
    assert optimizer.counts == [4, 1, 1], "before its closure has run, a step has nothing to do"


# ---- failures


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.fails:
            raise ZeroDivisionError
        return None


def test_after_a_failed_step_the_groups_hold_the_models_parameters() -> None:
    model = nn.Linear(3, 2)
    optimizer = Failing(model.parameters(), lr=0.1)
    ss.fully_shard(model, optimizer, elementwise=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.fails = True
    with pytest.raises(ZeroDivisionError) as held:
        optimizer.step()
    assert held.tb is not None, "the frames of the step are alive"
    assert [id(param) for param in params_of(optimizer)] == [id(p) for p in model.parameters()]
    optimizer.fails = False
    before = model.weight.full_tensor()
    optimizer.step()
    torch.testing.assert_close(model.weight.full_tensor(), before - 0.1)


def test_an_optimizer_from_before_sharding_that_was_not_passed_is_refused_by_name() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    stale = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    fine = torch.optim.SGD(other.parameters(), lr=0.1)
    ss.fully_shard(model)
    before = [param.detach().clone() for param in other.parameters()]
    for param in other.parameters():
        param.grad = torch.ones_like(param)
    message = r"optimizer.step: expected parameters that a model uses, got weight, bias, which"
    with pytest.raises(ValueError, match=message):
        stale.step()
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    fine.step()


def test_an_optimizer_that_lost_its_parameters_to_another_is_refused() -> None:
    model = nn.Linear(3, 2)
    _, first = ss.fully_shard(model, adamw(model.parameters()))
    assert first is not None
    model(torch.ones(1, 3)).sum().backward()
    first.step()
    second = ss.fully_shard_optimizer(adamw(model.parameters()))
    with pytest.raises(RuntimeError, match="expected the optimizer that was bound last"):
        first.step()
    assert first.state[model.weight]["step"] == 1
    second.step()


def test_an_optimizer_that_is_refused_stays_as_it_was() -> None:
    model = nn.Linear(3, 2)
    _, first = ss.fully_shard(model, sgd(model.parameters()))
    part = sgd([model.bias])
    with pytest.raises(ValueError, match="which another one holds together with 1 more"):
        ss.fully_shard_optimizer(part)
    assert not {"step", "zero_grad"} & set(vars(part))
    assert not part._optimizer_step_pre_hooks
    assert first is not None and params_of(part)[0] is model.bias


def test_foreign_parameters_leave_the_step_undone() -> None:
    model = nn.Linear(3, 2)
    _, optimizer = ss.fully_shard(model, sgd(model.parameters()))
    assert optimizer is not None
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.full_tensor()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="a foreign one at"):
        optimizer.step()
    assert torch.equal(model.weight.full_tensor(), before)


# ---- optimizers that are not elementwise


@pytest.mark.parametrize(
    "name",
    [
        "Lamb",
        "LAMB",
        "AdamW8bit",
        "PagedLion8bit",
        "AdamW4bit",
        "AdamWFp8",
        "CAME",
        "AdamP",
        "StableAdamW",
        "Kron",
        "Prodigy",
        "Adam_mini",
        "NovoGrad",
        "SOAP",
        "Ranger21",
    ],
)
def test_optimizers_of_packages_are_known_by_name_and_reason(name: str) -> None:
    kind = type(name, (torch.optim.SGD,), {"step": lambda self, closure=None: None})
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=rf"got {name}: it .*; choose one"):
        ss.fully_shard(model, kind(model.parameters(), lr=0.1), elementwise=True)
    assert not isinstance(model.weight, ss.ShardedTensor)


class InBlocks(torch.optim.Optimizer):
    """Declared elementwise, yet with one entry of state for four elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["scales"] = torch.ones(param.numel() // 4 + 2)


def test_state_that_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(30, 2)
    _, optimizer = ss.fully_shard(model, InBlocks(model.parameters()), elementwise=True)
    assert optimizer is not None
    optimizer.step()
    with pytest.raises(ValueError, match=r"state entry 'scales' of 'weight' has shape \(66,\)"):
        ss.save_checkpoint(tmp_path / "c", model, optimizer)
    assert not (tmp_path / "c").exists()


def counters(rank: int, world_size: int, path: str) -> None:
    """Parameters that were trained for different numbers of steps resume as if never stopped."""
    pairs = []
    for resumes in (False, True):
        pair = Pair(3, adamw)
        for model in (pair.plain, pair.sharded):
            model[0].requires_grad_(False)
        pair.train(0, 1)
        for model in (pair.plain, pair.sharded):
            model[0].requires_grad_(True)
        pair.train(2)
        if resumes:
            ss.save_checkpoint(path, pair.sharded, pair.optimizer)
            fresh = Pair(1, adamw)
            ss.load_checkpoint(path, fresh.sharded, fresh.optimizer)
            steps = [s["step"].item() for s in fresh.optimizer.state.values()]
            assert steps == [1.0, 1.0, 3.0, 3.0]
            pair.sharded, pair.optimizer = fresh.sharded, fresh.optimizer
        pair.train(3, 4)
        pairs.append(pair)
    for first, second in zip(*(pair.sharded.parameters() for pair in pairs), strict=True):
        assert torch.equal(first.full_tensor(), second.full_tensor())


def test_each_parameters_own_counter_is_saved_and_resumed(tmp_path: Path) -> None:
    run_on_ranks(counters, 2, str(tmp_path / "checkpoint"))
