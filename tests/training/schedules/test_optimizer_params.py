"""The scheduler over optimizers: what it sets, what it saves, whom it believes after a load."""

import warnings

import pytest
import torch

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.training.schedules import (
    OptimizerParamScheduler,
    ParamGroupOverride,
    ParamSchedule,
    combine_param_group_overrides,
    get_canonical_lr_for_logging,
)

CHECKPOINT_COUNTS = {"use_checkpoint_opt_param_scheduler": True}
ARGUMENTS_COUNT = {
    "use_checkpoint_opt_param_scheduler": False,
    "override_opt_param_scheduler": True,
}
NOBODY_COUNTS = {"use_checkpoint_opt_param_scheduler": False}
FIELDS = {
    "init_lr": 1e-5,
    "max_lr": 1e-3,
    "min_lr": 1e-4,
    "lr_warmup_steps": 4,
    "lr_decay_steps": 20,
    "lr_decay_style": "WSD",
    "start_wd": 0.0,
    "end_wd": 0.1,
    "wd_incr_steps": 16,
    "wd_incr_style": "cosine",
    "wsd_decay_steps": 8,
    "lr_wsd_decay_style": "minus_sqrt",
}


def _optimizer(*groups):
    groups = groups or ({},)
    return torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.ones(2))], **group} for group in groups]
    )


def _scheduler(*groups, **options):
    return OptimizerParamScheduler(_optimizer(*groups), **FIELDS | options)


def _set(scheduler):
    return [(group["lr"], group["weight_decay"]) for group in scheduler.optimizer.param_groups]


def test_update_k_uses_step_k_and_step_0_is_set_at_once():
    scheduler = _scheduler()
    schedule = ParamSchedule(**FIELDS)
    for update in range(30):
        assert _set(scheduler) == [schedule.at(update)]
        assert scheduler.num_steps == update
        scheduler.step()


def test_increments_add_up():
    scheduler = _scheduler()
    for increment in (3, 0, 4):
        scheduler.step(increment)
    assert scheduler.num_steps == 7
    assert _set(scheduler) == [ParamSchedule(**FIELDS).at(7)]


def test_groups_override_the_schedule_and_multiply_it():
    own = ParamGroupOverride(max_lr=2e-3, min_lr=0.0, start_wd=0.5, end_wd=0.75)
    scheduler = _scheduler({}, own, {"lr_mult": 0.5, "wd_mult": 0.0}, {"max_lr": None})
    scheduler.step(14)
    plain, other = ParamSchedule(**FIELDS).at(14), ParamSchedule(**FIELDS | own).at(14)
    assert _set(scheduler) == [plain, other, (plain.lr * 0.5, 0.0), plain]
    group = scheduler.optimizer.param_groups[2]
    assert (scheduler.get_lr(group), scheduler.get_wd(group)) == plain
    assert scheduler.get_wd() == plain.weight_decay


def test_a_group_that_does_not_fit_is_named_and_changes_nothing():
    scheduler = _scheduler({}, {})
    before = _set(scheduler)
    scheduler.optimizer.param_groups[1]["max_lr"] = 1e-5
    with pytest.raises(ValueError, match="group 1: expected min_lr <= max_lr"):
        scheduler.step()
    assert _set(scheduler) == before
    assert scheduler.num_steps == 0


@pytest.mark.parametrize(
    "own", [{"lr_mult": float("nan")}, {"wd_mult": -1}, {"lr_mult": "2"}, {"max_lr": "2"}], ids=str
)
def test_a_factor_that_is_none_is_named_and_changes_nothing(own):
    scheduler = _scheduler({}, {"lr_mult": None, "wd_mult": None})
    before = _set(scheduler)
    scheduler.optimizer.param_groups[1] |= own
    with pytest.raises((ValueError, TypeError), match=f"group 1: {next(iter(own))}: expected a"):
        scheduler.step()
    assert _set(scheduler) == before


def test_a_difference_between_groups_is_not_lost_in_silence():
    with pytest.raises(
        ValueError, match=r"weight_decay.*0\.1 in group 0, 0\.0 in group 1.*wd_mult"
    ):
        _scheduler({"weight_decay": 0.1}, {"weight_decay": 0.0})
    with pytest.raises(ValueError, match="lr_mult, max_lr or min_lr"):
        _scheduler({"lr": 0.1}, {"lr": 0.2})
    _scheduler({"weight_decay": 0.1}, {"weight_decay": 0.0, "wd_mult": 0.0})


def test_a_group_that_is_added_says_so_too():
    scheduler = _scheduler()
    added = {"params": [torch.nn.Parameter(torch.ones(1))], "lr_mult": 1.0, "weight_decay": 0.5}
    scheduler.optimizer.add_param_group(added)
    before = _set(scheduler)
    with pytest.raises(ValueError, match=r"same weight_decay .* 0\.5 in group 1"):
        scheduler.step()
    assert _set(scheduler) == before
    added["wd_mult"] = 0.0
    scheduler.step()
    assert [decay for _, decay in _set(scheduler)] == [scheduler.get_wd(), 0.0]


def test_keys_that_a_loaded_optimizer_has_lost_are_missed():
    saved = _scheduler({}, {"wd_mult": 0.0})
    saved.step(5)
    state = saved.optimizer.state_dict()
    del state["param_groups"][1]["wd_mult"]
    other = _scheduler({}, {"wd_mult": 0.0})
    other.optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="give groups that are to differ wd_mult"):
        other.load_state_dict(saved.state_dict())
    assert other.num_steps == 0


def test_a_tensor_is_filled_in_place():
    lr = torch.tensor(1.0)
    scheduler = OptimizerParamScheduler(
        torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr), **FIELDS
    )
    scheduler.step(4)
    assert scheduler.optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == torch.tensor(1e-3).item()


@pytest.mark.parametrize("used", [0, 5], ids="after{}".format)
def test_a_state_is_stood_in_at_once_whatever_was_done_before(used):
    saved = _scheduler()
    saved.step(10)
    other = _scheduler(init_lr=0.0, end_wd=0.5, lr_warmup_steps=1, wsd_decay_steps=9)
    other.step(used)
    with pytest.warns(UserWarning, match=r"end_wd: 0\.5 here, 0\.1 in the state"):
        other.load_state_dict(saved.state_dict())
    assert other.state_dict() == saved.state_dict()
    assert _set(other) == _set(saved)
    saved.step()
    other.step()
    assert _set(other) == _set(saved)


def test_weight_decay_is_right_at_the_first_update_after_a_load():
    ramp = {"start_wd": 0.0, "end_wd": 0.1, "wd_incr_style": "linear"}
    constant = {"start_wd": 0.5, "end_wd": 0.5, "wd_incr_style": "constant"}
    saved, other = _scheduler(**ramp), _scheduler(**constant)
    saved.step(8)
    with pytest.warns(UserWarning, match="schedule of the loaded state counts"):
        other.load_state_dict(saved.state_dict())
    assert _set(other) == _set(saved) == [(saved.schedule.at(8).lr, 0.05)]


def test_ten_steps_are_loaded_as_ten_and_without_a_state_it_begins_at_0():
    saved = _scheduler()
    for _ in range(10):
        saved.step()
    resumed, weights_only = _scheduler(), _scheduler()
    resumed.load_state_dict(saved.state_dict())
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.num_steps, weights_only.num_steps) == (10, 0)


def test_another_horizon_counts_if_it_is_told_to():
    state = _scheduler().state_dict() | {"num_steps": 10}
    longer = _scheduler(lr_decay_steps=40, **ARGUMENTS_COUNT)
    with warnings.catch_warnings(action="error"):
        longer.load_state_dict(state)
    assert longer.num_steps == 10
    assert longer.schedule.lr_decay_steps == 40
    assert _set(longer) == [ParamSchedule(**FIELDS | {"lr_decay_steps": 40}).at(10)]
    kept = _scheduler(lr_decay_steps=40, **CHECKPOINT_COUNTS)
    with pytest.warns(UserWarning, match="lr_decay_steps: 40 here, 20 in the state"):
        kept.load_state_dict(state)
    assert kept.schedule.lr_decay_steps == 20


def test_a_difference_that_nobody_decides_is_refused_and_changes_nothing():
    other = _scheduler(lr_decay_steps=40, max_lr=2e-3, **NOBODY_COUNTS)
    before = other.state_dict(), _set(other)
    with pytest.raises(ValueError, match=r"max_lr: 0\.002 here, 0\.001.*steps: 40 here, 20 in"):
        other.load_state_dict(_scheduler().state_dict() | {"num_steps": 10})
    assert (other.state_dict(), _set(other)) == before
    same = _scheduler(**NOBODY_COUNTS)
    same.load_state_dict(_scheduler().state_dict() | {"num_steps": 10})
    assert same.num_steps == 10


def test_both_flags_at_once_are_refused():
    with pytest.raises(ValueError, match="got both"):
        _scheduler(override_opt_param_scheduler=True)


def test_states_of_older_megatron_versions_are_read():
    scheduler = _scheduler(**NOBODY_COUNTS)
    scheduler.load_state_dict(
        {
            "start_lr": 1e-3,
            "warmup_iter": 4,
            "num_iters": 12,
            "decay_style": "WSD",
            "end_iter": 20,
            "min_lr": 1e-4,
        }
    )
    assert scheduler.num_steps == 12
    assert _set(scheduler) == [ParamSchedule(**FIELDS).at(12)]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"last_epoch": 3, "num_steps": 1}, "got one with last_epoch"),
        ({"max_lr": 1e-3}, "got one without num_steps"),
        ({"num_steps": -1}, "num_steps: expected a whole number of at least 0, got -1"),
        ({"num_steps": 1, "min_lr": 1.0}, "min_lr <= max_lr"),
    ],
    ids=["of another class", "no steps", "negative steps", "fields that do not fit"],
)
def test_states_that_are_none_change_nothing(state, text):
    scheduler = _scheduler()
    before = scheduler.state_dict(), _set(scheduler)
    with warnings.catch_warnings(action="ignore"), pytest.raises(ValueError, match=text):
        scheduler.load_state_dict(state)
    assert (scheduler.state_dict(), _set(scheduler)) == before


def test_overrides_are_combined_unless_they_conflict():
    combined = combine_param_group_overrides(
        [None, {"wd_mult": 0.0}, {"wd_mult": 0.0, "max_lr": 1}]
    )
    assert combined == {"wd_mult": 0.0, "max_lr": 1}
    assert combine_param_group_overrides([None]) == {}
    with pytest.raises(ValueError, match="one value of max_lr in all overrides, got 1 and 2"):
        combine_param_group_overrides([{"max_lr": 1}, {"max_lr": 2}])


def test_the_rate_to_log_is_that_of_the_first_default_group():
    groups = [{"lr": 1.0}, {"lr": 2.0, "default_config": True}, {"lr": 3.0, "default_config": True}]
    assert get_canonical_lr_for_logging(groups) == 2.0
    assert get_canonical_lr_for_logging(groups[:1]) is None


def _sharded(world_size):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "max_lr": 2e-3}, {"params": others, "wd_mult": 0.0}]
    )
    model, optimizer = ss.fully_shard(model, optimizer)
    return model, optimizer, OptimizerParamScheduler(optimizer, **FIELDS)


def _steps(sharded, steps):
    model, optimizer, scheduler = sharded
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        scheduler.step()
        optimizer.step()
        optimizer.zero_grad()
    return _set(scheduler)


def _resumed(rank, world_size, folder):
    """What is set right after the load of a save behind three steps, and after three more."""
    sharded = model, optimizer, scheduler = _sharded(world_size)
    scheduler.load_state_dict(ss.load_checkpoint(folder, model, optimizer))
    at_once = _set(scheduler)
    return at_once, _steps(sharded, range(3, 6)), ss.full_state_dict(model)


def _whole_and_resumed(rank, world_size, folder):
    sharded = model, optimizer, scheduler = _sharded(world_size)
    at_once = _steps(sharded, range(3))
    ss.save_checkpoint(folder, model, optimizer, extra=scheduler.state_dict())
    whole = at_once, _steps(sharded, range(3, 6)), ss.full_state_dict(model)
    return whole, _resumed(rank, world_size, folder)


def test_sharded_optimizers_are_set_and_go_on_from_checkpoints_of_other_ranks(tmp_path):
    folder = str(tmp_path / "saved")
    whole, resumed = run_on_ranks(_whole_and_resumed, 2, folder)[0]
    schedule, own = ParamSchedule(**FIELDS), ParamSchedule(**FIELDS | {"max_lr": 2e-3})
    assert whole[0] == [own.at(3), (schedule.at(3).lr, 0.0)]
    assert whole[1] == [own.at(6), (schedule.at(6).lr, 0.0)]
    alone = run_on_ranks(_resumed, 1, folder)[0]
    for other in (resumed, alone):
        assert other[:2] == whole[:2]
        # The ranks have the same data, so their mean is exact.
        assert all(torch.equal(other[2][name], param) for name, param in whole[2].items())
