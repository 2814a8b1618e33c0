"""Learning rate and weight decay as closed forms of the step, with Megatron-Core's meaning.

    step n          learning rate                        W = lr_warmup_steps, D = lr_decay_steps
    n < W           init_lr .. max_lr, linear
    W <= n <= D     the style's; max_lr at W
    n > D           min_lr; max_lr for "constant"

    step n          weight decay                         I = wd_incr_steps
    n < I           start_wd .. end_wd by the style
    n >= I          end_wd

Values are computed with 50 decimal digits and rounded to FP64 once, so they are the nearest to the
formula, rise and fall as it does, meet both ends exactly, and have the same bits on every machine,
whatever its mathematical library: ranks that differ in them would train different models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from types import MappingProxyType
from typing import NamedTuple

from ...sharding.arguments import require_count, require_number

DIGITS = 50
_HALF_PI = Decimal("1.5707963267948966192313216916397514420985846996875529104874722961539")
_LAST_POWER = 49  # of the sine's series: what is left of it at pi / 2 has no part in 50 digits


class ScheduledParams(NamedTuple):
    """What an update uses."""

    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSchedule:
    """Learning rate and weight decay of every step; fields are named as Megatron-Core names them.

        schedule = ParamSchedule(
            max_lr=3e-4, lr_warmup_steps=100, lr_decay_steps=10_000, lr_decay_style="cosine"
        )
        schedule.at(100).lr  # 3e-4

    A step is whatever its user counts, updates or samples. Update k, counted from 1, uses `at(k)`,
    so that the last step of a warm-up of W updates is the first at the peak, and the last one of
    `lr_decay_steps` updates uses `min_lr`.

    Attributes:
        init_lr, max_lr, min_lr: where the warm-up begins, the peak, and the end.
        lr_warmup_steps: 0 begins at the peak.
        lr_decay_steps: the horizon: the last step that is no constant `min_lr`. More than the
            warm-up.
        lr_decay_style: one of `LR_STYLES`.
        start_wd, end_wd, wd_incr_steps: the weight decay's ends, and the step of the second; in
            place of what the optimizer was made with.
        wd_incr_style: one of `WD_STYLES`; "constant" needs equal ends.
        wsd_decay_steps: length of the tail of "WSD", behind the peak that it holds before.
        lr_wsd_decay_style: shape of that tail, one of `SHARES`; without meaning in other styles.

    Raises:
        ValueError: rates or decays that are no finite numbers in their order, horizons that do not
            fit each other, a style that is not known.
        TypeError: no numbers, or steps that are no whole ones.
    """

    max_lr: float
    lr_decay_steps: int
    lr_decay_style: str = "linear"
    init_lr: float = 0.0
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    start_wd: float = 0.0
    end_wd: float = 0.0
    wd_incr_steps: int = 0
    wd_incr_style: str = "constant"
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str | None = None

    def __post_init__(self) -> None:
        self._check_styles()
        for name in ("init_lr", "max_lr", "min_lr", "start_wd", "end_wd"):
            value = getattr(self, name)
            require_number(name, value, "a finite number >= 0", lambda x: 0 <= x < math.inf)
            object.__setattr__(self, name, float(value))
        for low, high in (("init_lr", "max_lr"), ("min_lr", "max_lr"), ("start_wd", "end_wd")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"expected {low} <= {high}, got {getattr(self, low)} and "
                    f"{getattr(self, high)}; lower the first or raise the second"
                )
        self._check_horizons()

    def _check_styles(self) -> None:
        _require_style("lr_decay_style", self.lr_decay_style, LR_STYLES)
        _require_style("wd_incr_style", self.wd_incr_style, WD_STYLES)
        if self.lr_decay_style == "WSD" or self.lr_wsd_decay_style is not None:
            _require_style("lr_wsd_decay_style", self.lr_wsd_decay_style, SHARES)
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            raise ValueError(
                "expected start_wd equal to end_wd in wd_incr_style 'constant', got "
                f"{self.start_wd} and {self.end_wd}; make them equal, or take one of "
                f"{_listed(name for name in WD_STYLES if name != 'constant')}"
            )

    def _check_horizons(self) -> None:
        least = {"lr_warmup_steps": 0, "lr_decay_steps": 1, "wd_incr_steps": 0}
        for name in [*least, *["wsd_decay_steps"] * (self.wsd_decay_steps is not None)]:
            require_count(name, getattr(self, name), least.get(name, 1))
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.lr_warmup_steps >= self.lr_decay_steps:
            raise ValueError(
                f"expected lr_warmup_steps < lr_decay_steps, got {self.lr_warmup_steps} and "
                f"{self.lr_decay_steps}; shorten the warm-up or move the horizon"
            )
        if (self.wsd_decay_steps is None) != (self.lr_decay_style != "WSD"):
            raise ValueError(
                "expected wsd_decay_steps in lr_decay_style 'WSD' and in no other, got "
                f"{self.wsd_decay_steps} in {self.lr_decay_style!r}; give both or neither"
            )
        if self.wsd_decay_steps is not None:
            most = self.lr_decay_steps - self.lr_warmup_steps
            if self.wsd_decay_steps > most:
                raise ValueError(
                    "expected wsd_decay_steps <= lr_decay_steps - lr_warmup_steps = "
                    f"{most}, got {self.wsd_decay_steps}; shorten the tail or the warm-up"
                )

    def at(self, step: int) -> ScheduledParams:
        """What `step` (of at least 0) uses; 0 is the state before the first update.

        Raises:
            ValueError, TypeError: `step` is negative, or no whole number.
        """
        require_count("step", step, 0)
        with localcontext(Context(prec=DIGITS)):
            lr = (_rising_lr if step < self.lr_warmup_steps else LR_STYLES[self.lr_decay_style])(
                self, int(step)
            )
            weight_decay = WD_STYLES[self.wd_incr_style](self, int(step))
            return ScheduledParams(float(lr), float(weight_decay))


def _between(low: float, high: float, share: Decimal) -> Decimal:
    return Decimal(low) + share * (Decimal(high) - Decimal(low))


def _sine(angle: Decimal) -> Decimal:
    """From 0 to pi / 2."""
    term = total = angle
    for power in range(3, _LAST_POWER + 1, 2):
        term *= -angle * angle / (power * (power - 1))
        total += term
    return total


# What is left of a range when `left` of the way is left, both from 1 to 0.
SHARES: Mapping[str, Callable[[Decimal], Decimal]] = MappingProxyType(
    {
        "linear": lambda left: left,
        "cosine": lambda left: _sine(_HALF_PI * left) ** 2,  # (1 + cos(pi (1 - left))) / 2
        "exponential": lambda left: 2**left - 1,
        "minus_sqrt": lambda left: 1 - (1 - left).sqrt(),
    }
)


def _rising_lr(schedule: ParamSchedule, step: int) -> Decimal:
    done = Decimal(step) / schedule.lr_warmup_steps
    return _between(schedule.init_lr, schedule.max_lr, done)


def _falling_lr(
    schedule: ParamSchedule, step: int, num_steps: int | None, style: str | None
) -> Decimal:
    """From the peak to the end in the last `num_steps` before the horizon, constant around them."""
    assert num_steps is not None and style is not None, "the schedule has checked its fields"
    left = min(max(Decimal(schedule.lr_decay_steps - step) / num_steps, Decimal(0)), Decimal(1))
    return _between(schedule.min_lr, schedule.max_lr, SHARES[style](left))


def _falling_after_warmup(style: str) -> Callable[[ParamSchedule, int], Decimal]:
    def lr(schedule: ParamSchedule, step: int) -> Decimal:
        num_steps = schedule.lr_decay_steps - schedule.lr_warmup_steps
        return _falling_lr(schedule, step, num_steps, style)

    return lr


def _inverse_square_root(schedule: ParamSchedule, step: int) -> Decimal:
    if step > schedule.lr_decay_steps:
        return Decimal(schedule.min_lr)
    ratio = Decimal(max(schedule.lr_warmup_steps, 1)) / max(step, 1)
    return max(Decimal(schedule.min_lr), Decimal(schedule.max_lr) * ratio.sqrt())


def _rising_wd(style: str) -> Callable[[ParamSchedule, int], Decimal]:
    def weight_decay(schedule: ParamSchedule, step: int) -> Decimal:
        is_over = step >= schedule.wd_incr_steps
        done = Decimal(1) if is_over else Decimal(step) / schedule.wd_incr_steps
        return _between(schedule.start_wd, schedule.end_wd, SHARES[style](done))

    return weight_decay


# From the end of the warm-up on.
LR_STYLES: Mapping[str, Callable[[ParamSchedule, int], Decimal]] = MappingProxyType(
    {
        "constant": lambda schedule, step: Decimal(schedule.max_lr),
        "linear": _falling_after_warmup("linear"),
        "cosine": _falling_after_warmup("cosine"),
        "inverse-square-root": _inverse_square_root,
        "WSD": lambda schedule, step: _falling_lr(
            schedule, step, schedule.wsd_decay_steps, schedule.lr_wsd_decay_style
        ),
    }
)
WD_STYLES: Mapping[str, Callable[[ParamSchedule, int], Decimal]] = MappingProxyType(
    {
        "constant": lambda schedule, step: Decimal(schedule.end_wd),
        "linear": _rising_wd("linear"),
        "cosine": _rising_wd("cosine"),
    }
)


def _require_style(name: str, style: object, known: Mapping[str, object]) -> None:
    if style not in known:
        raise ValueError(
            f"expected {name} among {_listed(known)}, got {style!r}; pass one of these"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
