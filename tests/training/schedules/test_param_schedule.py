"""Schedules against the formulas of Megatron-Core in 60 digits, and at their edges."""

import decimal
import math

import mpmath
import numpy as np
import pytest

from sidestream.training.schedules import LR_STYLES, SHARES, WD_STYLES, ParamSchedule

PEAK = {"max_lr": 3e-4, "min_lr": 1e-5, "init_lr": 1e-6}
DECAYS = {"start_wd": 0.01, "end_wd": 0.1, "wd_incr_steps": 700}
STYLES = [(style, None) for style in LR_STYLES if style != "WSD"]
STYLES += [("WSD", tail) for tail in SHARES]
# Every corner and what is beside it, and steps between them.
STEPS = [0, 1, 2, 3, 7, 8, 9, 100, 333, 499, 500, 501, 502, 611, 699, 700, 701, 703, 800]
STEPS += [899, 900, 901, 950, 990, 998, 999, 1000, 1001, 1002, 123_456_789]


def _schedule(style, tail=None, **fields):
    wsd = {"wsd_decay_steps": 100, "lr_wsd_decay_style": tail} if tail else {}
    fields = {"lr_warmup_steps": 8, "lr_decay_steps": 1000, **PEAK, **wsd} | fields
    return ParamSchedule(lr_decay_style=style, **fields)


def _coefficient(style, done):
    return {
        "linear": lambda: 1 - done,
        "cosine": lambda: (mpmath.cos(mpmath.pi * done) + 1) / 2,
        "exponential": lambda: 2 * mpmath.mpf(0.5) ** done - 1,
        "minus_sqrt": lambda: 1 - mpmath.sqrt(done),
    }[style]()


def _expected_lr(s, n):
    first, peak, last = (mpmath.mpf(lr) for lr in (s.init_lr, s.max_lr, s.min_lr))
    warmup, horizon = s.lr_warmup_steps, s.lr_decay_steps
    if warmup > 0 and n <= warmup:
        return first + (peak - first) * n / warmup
    if s.lr_decay_style == "constant":
        return peak
    if n > horizon:
        return last
    if s.lr_decay_style == "inverse-square-root":
        return max(last, peak * mpmath.sqrt(max(warmup, 1)) / mpmath.sqrt(max(n, 1)))
    if s.lr_decay_style == "WSD":
        start = horizon - s.wsd_decay_steps
        if n <= start:
            return peak
        done = mpmath.mpf(n - start) / s.wsd_decay_steps
        return last + _coefficient(s.lr_wsd_decay_style, done) * (peak - last)
    done = mpmath.mpf(n - warmup) / (horizon - warmup)
    return last + _coefficient(s.lr_decay_style, done) * (peak - last)


def _expected_wd(s, n):
    start, end = mpmath.mpf(s.start_wd), mpmath.mpf(s.end_wd)
    if n > s.wd_incr_steps or s.wd_incr_style == "constant":
        return end
    done = mpmath.mpf(n) / s.wd_incr_steps
    share = done if s.wd_incr_style == "linear" else (mpmath.cos(mpmath.pi * (1 - done)) + 1) / 2
    return start + share * (end - start)


def _errors_ulp(actual, expected):
    assert len(actual) == len(expected)
    return [
        float(abs(mpmath.mpf(got) - value)) / math.ulp(float(value))
        for got, value in zip(actual, expected, strict=True)
    ]


@pytest.mark.parametrize("warmup", [0, 1, 8], ids="warmup{}".format)
@pytest.mark.parametrize(("style", "tail"), STYLES, ids=lambda value: value or "no_tail")
def test_rates_are_the_fp64_numbers_nearest_to_the_formulas(style, tail, warmup):
    schedule = _schedule(style, tail, lr_warmup_steps=warmup)
    with mpmath.workdps(60):
        expected = [_expected_lr(schedule, step) for step in STEPS]
        errors = _errors_ulp([schedule.at(step).lr for step in STEPS], expected)
    assert max(errors) <= 0.5 + 1e-12


@pytest.mark.parametrize("style", WD_STYLES, ids=str)
def test_decays_are_the_fp64_numbers_nearest_to_the_formulas(style):
    constant = {"start_wd": 0.1} if style == "constant" else {}
    schedule = _schedule("linear", wd_incr_style=style, **DECAYS | constant)
    with mpmath.workdps(60):
        expected = [_expected_wd(schedule, step) for step in STEPS]
        errors = _errors_ulp([schedule.at(step).weight_decay for step in STEPS], expected)
    assert max(errors) <= 0.5 + 1e-12


@pytest.mark.parametrize("warmup", [0, 1, 2, 3, 7], ids="warmup{}".format)
@pytest.mark.parametrize(("style", "tail"), STYLES, ids=lambda value: value or "no_tail")
def test_rates_rise_to_the_peak_and_fall_from_there(style, tail, warmup):
    schedule = _schedule(style, tail, lr_warmup_steps=warmup)
    rates = [schedule.at(step).lr for step in range(1010)]
    assert rates[warmup] == max(rates) == schedule.max_lr
    assert rates[: warmup + 1] == sorted(set(rates[: warmup + 1]))
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert warmup == 0 or rates[0] == schedule.init_lr
    assert rates[1001] == (schedule.max_lr if style == "constant" else schedule.min_lr)


def test_four_updates_of_warmup_rise_by_a_quarter_each_and_the_tenth_uses_the_end():
    schedule = ParamSchedule(
        max_lr=1e-3, lr_warmup_steps=4, lr_decay_steps=10, lr_decay_style="linear"
    )
    rates = [schedule.at(update).lr for update in range(1, 11)]
    assert rates[:4] == [0.00025, 0.0005, 0.00075, 0.001]
    assert rates[4:] == [1e-3 * left / 6 for left in (5, 4, 3, 2, 1, 0)]


def test_a_ramp_without_steps_is_at_its_end():
    schedule = _schedule("constant", start_wd=0.0, end_wd=0.1, wd_incr_style="linear")
    assert schedule.at(0).weight_decay == 0.1


def test_values_do_not_depend_on_the_arithmetic_of_the_caller():
    schedule = _schedule("cosine")
    expected = schedule.at(500)
    with decimal.localcontext(decimal.Context(prec=3, rounding=decimal.ROUND_UP)):
        assert schedule.at(500) == expected
        assert decimal.getcontext().prec == 3


def test_numbers_of_numpy_become_plain_ones():
    schedule = ParamSchedule(
        max_lr=np.float32(0.5), lr_warmup_steps=np.int64(2), lr_decay_steps=np.int32(10)
    )
    assert schedule.at(np.int64(1)) == (0.25, 0.0)
    assert type(schedule.max_lr) is float
    assert type(schedule.lr_decay_steps) is int


def test_styles_that_are_not_known_are_told_with_the_list():
    for field, known in (
        ("lr_decay_style", LR_STYLES),
        ("lr_wsd_decay_style", SHARES),
        ("wd_incr_style", WD_STYLES),
    ):
        fields = {"lr_decay_style": "linear", field: "sawtooth"}
        with pytest.raises(ValueError, match=f"expected {field} among.*got 'sawtooth'") as error:
            ParamSchedule(max_lr=1.0, lr_decay_steps=10, **fields)
        assert all(repr(name) in str(error.value) for name in known)


BAD = {
    "negative horizon": ({"lr_decay_steps": -1}, "lr_decay_steps: expected a whole number"),
    "no horizon": ({"lr_decay_steps": 0}, "lr_decay_steps: expected a whole number"),
    "negative warm-up": ({"lr_warmup_steps": -1}, "lr_warmup_steps: expected"),
    "warm-up to the horizon": ({"lr_warmup_steps": 1000}, "lr_warmup_steps < lr_decay_steps"),
    "negative ramp": ({"wd_incr_steps": -2}, "wd_incr_steps: expected"),
    "negative rate": ({"min_lr": -1e-9}, "min_lr: expected a finite number"),
    "rate that is no number": ({"max_lr": math.nan}, "max_lr: expected a finite number"),
    "infinite decay": (
        {"start_wd": math.inf, "end_wd": math.inf},
        "start_wd: expected a finite number",
    ),
    "end above the peak": ({"min_lr": 1.0}, "min_lr <= max_lr, got 1.0 and 0.0003"),
    "start above the peak": ({"init_lr": 1.0}, "init_lr <= max_lr, got 1.0 and 0.0003"),
    "falling decay": (
        {"start_wd": 0.2, "end_wd": 0.1, "wd_incr_style": "linear"},
        "start_wd <= end_wd, got 0.2 and 0.1",
    ),
    "constant decay that changes": ({"start_wd": 0.1, "end_wd": 0.2}, "start_wd equal to end_wd"),
    "tail without WSD": ({"wsd_decay_steps": 5}, "wsd_decay_steps in lr_decay_style 'WSD'"),
}
BAD_WSD = {
    "WSD without its tail": ({"wsd_decay_steps": None}, "got None in 'WSD'"),
    "tail without steps": ({"wsd_decay_steps": 0}, "wsd_decay_steps: expected"),
    "tail into the warm-up": ({"wsd_decay_steps": 993}, "lr_decay_steps - lr_warmup_steps = 992"),
    "tail without a style": ({"lr_wsd_decay_style": None}, "lr_wsd_decay_style among"),
}


@pytest.mark.parametrize(("fields", "text"), BAD.values(), ids=BAD)
def test_fields_that_do_not_fit_are_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        _schedule("linear", **fields)


@pytest.mark.parametrize(("fields", "text"), BAD_WSD.values(), ids=BAD_WSD)
def test_tails_that_do_not_fit_are_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        _schedule("WSD", "linear", **fields)


@pytest.mark.parametrize("step", [-1, 1.5, "1", True], ids=repr)
def test_steps_are_whole_numbers_from_0(step):
    with pytest.raises((ValueError, TypeError), match="step: expected a whole number"):
        _schedule("linear").at(step)
