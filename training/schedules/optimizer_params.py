"""Sets the scheduled learning rate and weight decay in the groups of an optimizer, as
Megatron-Core's class of the same name does, and keeps where it stands in checkpoints.

    keys of a group      meaning
    max_lr, min_lr       in place of the schedule's
    start_wd, end_wd     in place of the schedule's
    lr_mult, wd_mult     what is set is the schedule's value times this
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from ...sharding.arguments import require_count, require_flag, require_kind, require_number
from .param_schedule import ParamSchedule

_SCHEDULE_KEYS = ("max_lr", "min_lr", "start_wd", "end_wd")
# What is set in a group, its factor, and which keys say that it is meant to differ between groups.
_MULTIPLIERS = MappingProxyType({"lr": "lr_mult", "weight_decay": "wd_mult"})
_OVERRIDES = MappingProxyType(
    {"lr": ("max_lr", "min_lr", "lr_mult"), "weight_decay": ("start_wd", "end_wd", "wd_mult")}
)
# What states of older Megatron versions call a field.
_FORMER_NAMES = MappingProxyType(
    {
        "start_lr": "max_lr",
        "warmup_iter": "lr_warmup_steps",
        "warmup_steps": "lr_warmup_steps",
        "end_iter": "lr_decay_steps",
        "decay_steps": "lr_decay_steps",
        "decay_style": "lr_decay_style",
        "num_iters": "num_steps",
    }
)


class ParamGroupOverride(TypedDict, total=False):
    """Keys that a parameter group may have, see the table of this file."""

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    lr_mult: float
    wd_mult: float


class HasParamGroups(Protocol):
    """An optimizer, as much of it as a scheduler needs."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, of which the scheduler sets `lr` and `weight_decay`."""


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` in every group of an optimizer, a step at a time.

        scheduler = OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=3e-4, min_lr=3e-5, lr_warmup_steps=100,
            lr_decay_steps=10_000, lr_decay_style="cosine", start_wd=0.1, end_wd=0.1,
            wd_incr_steps=10_000, wd_incr_style="constant",
        )
        for batch in batches:
            ...                 # forward, backward
            scheduler.step()    # update k, counted from 1, uses schedule.at(k)
            optimizer.step()

    Making it sets the values of step 0. Megatron's loop calls `step` behind the optimizer's, so
    that its update k uses `at(k - 1)`; either order works. The optimizer may be sharded, before or
    after this is made. A tensor as `lr` is filled in place, which a captured graph sees.

    Args:
        optimizer: its groups may have the keys of this file's table. Groups with another `lr` or
            `weight_decay` than the rest need such a key, since both are overwritten.
        use_checkpoint_opt_param_scheduler: where a loaded state differs from these arguments, the
            state counts, with a warning.
        override_opt_param_scheduler: these arguments count, such as to resume with another horizon.
            With neither, a difference is an error. Never with the former.
        others: the fields of `ParamSchedule`.

    Raises:
        ValueError, TypeError: as `ParamSchedule`, also for the values of a group; both flags;
            groups whose `lr` or `weight_decay` differ without a key that says so.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        *,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        schedule = ParamSchedule(
            init_lr=init_lr,
            max_lr=max_lr,
            min_lr=min_lr,
            lr_warmup_steps=lr_warmup_steps,
            lr_decay_steps=lr_decay_steps,
            lr_decay_style=lr_decay_style,
            start_wd=start_wd,
            end_wd=end_wd,
            wd_incr_steps=wd_incr_steps,
            wd_incr_style=wd_incr_style,
            wsd_decay_steps=wsd_decay_steps,
            lr_wsd_decay_style=lr_wsd_decay_style,
        )
        require_flag("use_checkpoint_opt_param_scheduler", use_checkpoint_opt_param_scheduler)
        require_flag("override_opt_param_scheduler", override_opt_param_scheduler)
        if use_checkpoint_opt_param_scheduler and override_opt_param_scheduler:
            raise ValueError(
                "expected one of use_checkpoint_opt_param_scheduler and "
                "override_opt_param_scheduler, got both; pass "
                "use_checkpoint_opt_param_scheduler=False to override"
            )
        self.optimizer = optimizer
        self._num_groups = 0
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self._set(schedule, 0)

    @classmethod
    def of(
        cls,
        optimizer: HasParamGroups,
        schedule: ParamSchedule,
        *,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
    ) -> OptimizerParamScheduler:
        """The scheduler of a schedule that is there already; else as the constructor."""
        return cls(
            optimizer,
            **asdict(schedule),
            use_checkpoint_opt_param_scheduler=use_checkpoint_opt_param_scheduler,
            override_opt_param_scheduler=override_opt_param_scheduler,
        )

    @property
    def schedule(self) -> ParamSchedule:
        """What is followed; another one after a load that changed it."""
        return self._schedule

    @property
    def num_steps(self) -> int:
        """The sum of all increments."""
        return self._num_steps

    def step(self, increment: int = 1) -> None:
        """Go on by `increment` steps, at least 0, and set all groups.

        Raises:
            ValueError, TypeError: another increment, values of a group that do not fit, or a group
                that was added and differs, as for the constructor; nothing has changed then.
        """
        require_count("increment", increment, 0)
        self._set(self._schedule, self._num_steps + int(increment))

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """What a group's `lr` is now, but for its `lr_mult`."""
        return _followed(self._schedule, param_group).at(self._num_steps).lr

    def get_wd(self, param_group: Mapping[str, Any] | None = None) -> float:
        """What a group's `weight_decay` is now, but for its `wd_mult`; None has no overrides."""
        return _followed(self._schedule, param_group).at(self._num_steps).weight_decay

    def state_dict(self) -> dict[str, Any]:
        """All fields of the schedule, and `num_steps`: plain numbers, texts and None."""
        return {**asdict(self._schedule), "num_steps": self._num_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Stand where `state_dict` stood, wherever this one is, and set all groups.

        Reads states of Megatron's class too, also of older versions; fields that these lack are
        those of the constructor. A group's own keys are the optimizer's to load.

        Raises:
            ValueError: it is no such state, or differs from the constructor's arguments and no flag
                says which of them count; groups that differ, as for the constructor. Nothing has
                changed then.
            TypeError: a field of another type.
        """
        require_kind("state_dict", state_dict, Mapping, "pass what state_dict() gave")
        state = {_FORMER_NAMES.get(name, name): value for name, value in state_dict.items()}
        here = asdict(self._schedule)
        unknown = sorted(map(str, state.keys() - here.keys() - {"num_steps"}))
        if unknown or "num_steps" not in state:
            raise ValueError(
                "expected the state of an OptimizerParamScheduler, got one "
                + (f"with {', '.join(unknown)}" if unknown else "without num_steps")
                + "; pass what its state_dict() gave"
            )
        # A loaded optimizer may have lost keys: torch takes its groups as they were saved.
        _require_told_differences(self.optimizer.param_groups)
        num_steps = state.pop("num_steps")
        require_count("num_steps", num_steps, 0)
        differing = {name: value for name, value in state.items() if value != here[name]}
        self._set(replace(self._schedule, **self._chosen(differing)), int(num_steps))

    def _chosen(self, differing: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of a state's fields that differ from ours is to count."""
        if self.override_opt_param_scheduler or not differing:
            return {}
        here = asdict(self._schedule)
        told = "; ".join(
            f"{name}: {here[name]!r} here, {value!r} in the state"
            for name, value in differing.items()
        )
        if not self.use_checkpoint_opt_param_scheduler:
            raise ValueError(
                f"expected a state with this schedule, got another ({told}); pass "
                "use_checkpoint_opt_param_scheduler=True for the state's, or "
                "override_opt_param_scheduler=True for this one"
            )
        warnings.warn(
            f"the schedule of the loaded state counts, not this one ({told}); pass "
            "override_opt_param_scheduler=True for this one",
            stacklevel=3,
        )
        return differing

    def _set(self, schedule: ParamSchedule, num_steps: int) -> None:
        """All values first, so that a group that does not fit leaves everything as it was."""
        groups = self.optimizer.param_groups
        if len(groups) != self._num_groups:  # not each time: a tensor as `lr` is on a GPU
            _require_told_differences(groups)
        followed = [_followed(schedule, group, f"group {n}: ") for n, group in enumerate(groups)]
        factors = [_factors(group, f"group {n}: ") for n, group in enumerate(groups)]
        values = {one: one.at(num_steps) for one in set(followed)}
        for group, one, factor in zip(groups, followed, factors, strict=True):
            for name, scheduled in values[one]._asdict().items():
                _assign(group, name, scheduled * factor[name])
        self._schedule, self._num_steps, self._num_groups = schedule, num_steps, len(groups)


def _followed(
    schedule: ParamSchedule, group: Mapping[str, Any] | None, place: str = ""
) -> ParamSchedule:
    """The schedule with a group's own keys in it."""
    own = {key: group[key] for key in _SCHEDULE_KEYS if group and group.get(key) is not None}
    try:
        return replace(schedule, **own) if own else schedule
    except (ValueError, TypeError) as error:
        raise type(error)(f"{place}{error}") from error


def _factors(group: Mapping[str, Any], place: str) -> Mapping[str, float]:
    """By the name of what is set; 1 where the group says nothing."""
    factors = {}
    for name, key in _MULTIPLIERS.items():
        factor = 1.0 if group.get(key) is None else group[key]
        require_number(f"{place}{key}", factor, "a finite number >= 0", lambda x: 0 <= x < math.inf)
        factors[name] = float(factor)
    return factors


def _assign(group: dict[str, Any], name: str, value: float) -> None:
    if isinstance(group.get(name), Tensor):
        with torch.no_grad():
            group[name].fill_(value)
    else:
        group[name] = value


def _require_told_differences(groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse groups that differ in what is overwritten, unless they say so: the difference, such as
    no decay for biases, would be lost in silence.
    """
    for name, keys in _OVERRIDES.items():
        values = {
            number: float(group[name])
            for number, group in enumerate(groups)
            if name in group and all(group.get(key) is None for key in keys)
        }
        if len(set(values.values())) > 1:
            told = ", ".join(f"{value} in group {number}" for number, value in values.items())
            raise ValueError(
                f"expected the same {name} in all parameter groups, since the schedule sets it, "
                f"got {told}; give groups that are to differ {_MULTIPLIERS[name]}, {keys[0]} or "
                f"{keys[1]}"
            )


def combine_param_group_overrides(
    param_group_overrides: Iterable[ParamGroupOverride | None],
) -> ParamGroupOverride:
    """Return all overrides as one; None stands for none.

    Raises:
        ValueError: two of them give a key different values.
    """
    combined: dict[str, Any] = {}
    for override in param_group_overrides:
        for key, value in (override or {}).items():
            if combined.setdefault(key, value) != value:
                raise ValueError(
                    f"expected one value of {key} in all overrides, got {combined[key]} and "
                    f"{value}; leave one of them out"
                )
    return ParamGroupOverride(**combined)  # type: ignore[typeddict-item]


def get_canonical_lr_for_logging(
    param_groups: Iterable[Mapping[str, Any]],
) -> float | Tensor | None:
    """Return `lr` of the first group that has `default_config=True`; None where none has."""
    defaults = (group for group in param_groups if group.get("default_config", False))
    return next((group.get("lr") for group in defaults), None)
