"""`sidestream schedule`, and the options that it shares with training."""

import argparse
import math
import shlex
import sys

import pytest

from sidestream import cli
from sidestream.training.errors import OptionsError
from sidestream.training.option_fields import add_arguments, values_from
from sidestream.training.schedule_options import (
    ScheduleOptions,
    batch_schedule_of,
    schedule_of,
)
from sidestream.training.schedules import BatchSchedule, ParamSchedule


def _options(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser, ScheduleOptions)
    return ScheduleOptions(**values_from(parser.parse_args(arguments), ScheduleOptions))


@pytest.mark.parametrize("steps", [1, 2, 5, 200, 5000], ids=str)
def test_without_options_the_rate_warms_up_for_a_tenth_and_falls_to_a_tenth(steps):
    schedule = schedule_of(_options("--steps", str(steps)))
    warmup = min(100, max(1, steps // 10))
    assert schedule.at(1).lr == 2e-3 / warmup
    assert schedule.at(warmup).lr == 2e-3
    assert schedule.at(warmup).weight_decay == schedule.at(steps).weight_decay == 0.1
    halfway = (warmup + steps) // 2
    done = (halfway - warmup) / max(1, steps - warmup)
    expected = 2e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
    assert schedule.at(halfway).lr == pytest.approx(expected, rel=1e-14)
    assert steps == 1 or schedule.at(steps).lr == 2e-4


def test_every_option_reaches_its_field():
    text = (
        "--lr-schedule WSD --min-lr 1e-5 --init-lr 1e-6 --warmup-steps 3 --decay-steps 90 "
        "--wsd-decay-steps 9 --wsd-decay-style cosine --weight-decay 0.01 --end-weight-decay 0.2 "
        "--weight-decay-steps 50 --weight-decay-style cosine"
    )
    assert schedule_of(_options(*shlex.split(text))) == ParamSchedule(
        max_lr=2e-3,
        min_lr=1e-5,
        init_lr=1e-6,
        lr_warmup_steps=3,
        lr_decay_steps=90,
        lr_decay_style="WSD",
        wsd_decay_steps=9,
        lr_wsd_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.2,
        wd_incr_steps=50,
        wd_incr_style="cosine",
    )


def test_batches_are_constant_or_ramped_in_samples_or_tokens():
    assert batch_schedule_of(_options()) == BatchSchedule.constant(16)
    ramped = batch_schedule_of(_options("--batch-ramp", "0:8 1K:16"))
    assert ramped == BatchSchedule.parse("0:8 1000:16")
    tokens = _options("--batch-ramp", "0:8 128K:16", "--batch-ramp-unit", "tokens")
    assert batch_schedule_of(tokens) == ramped


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--warmup-steps", "200"], "expected --warmup-steps < --decay-steps, got 200 and 200"),
        (["--min-lr", "1"], "expected --min-lr <= --lr, got 1.0 and 0.002"),
        (["--decay-steps", "-5"], "expected --decay-steps >= 1, got -5"),
        (["--weight-decay", "nan"], "--weight-decay"),
        (["--wsd-decay-steps", "5"], "expected --wsd-decay-steps in --lr-schedule 'WSD'"),
        (["--wsd-decay-style", "linear"], "expected --lr-schedule WSD beside --wsd-decay-style"),
        (["--weight-decay-steps", "5"], "expected --end-weight-decay X beside --weight-decay-s"),
        (["--batch-ramp-unit", "tokens"], "expected --batch-ramp RAMP beside --batch-ramp-unit"),
        (["--decay-steps", "1"], "expected --warmup-steps < --decay-steps, got 1 and 1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_errors_name_the_options(arguments, text):
    with pytest.raises(OptionsError) as error:
        schedule_of(_options(*arguments))
    assert text in str(error.value)


def test_a_ramp_that_cannot_be_read_is_told_with_its_place():
    with pytest.raises(
        OptionsError, match=r"--batch-ramp: expected ':'.*at character 9 of '0:64 10M'"
    ):
        batch_schedule_of(_options("--batch-ramp", "0:64 10M"))


def _printed(capsys, *arguments):
    assert cli.main(["schedule", *arguments]) == 0
    return capsys.readouterr().out


def test_the_table_has_the_telling_steps(capsys):
    text = "--steps 100 --lr 0.001 --warmup-steps 7 --lr-schedule WSD --wsd-decay-steps 30"
    printed = _printed(capsys, *shlex.split(text), "--batch-ramp", "0:8 160:16")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    rows = {int(row[0]): row[1:] for row in cells if row}
    assert [*rows] == [0, 1, 7, 12, 21, 25, 37, 50, 62, 70, 75, 87, 100]
    assert rows[0] == ["0", "0.1", "8", "0"]
    assert rows[7] == ["0.001", "0.1", "8", "48"]
    assert rows[21] == ["0.001", "0.1", "16", "160"]
    assert rows[100] == ["0.0001", "0.1", "16", "1,424"]


def test_of_many_sizes_the_table_has_some(capsys):
    printed = _printed(capsys, "--steps", "9999", "--batch", "4096", "--batch-ramp", "1 1 1M")
    assert 32 <= printed.count("│\n") <= 50


def test_curves_are_drawn_of_what_changes(capsys):
    printed = _printed(capsys, "--plot", "--end-weight-decay", "0.2")
    assert "learning rate\n     0.002 ⠀" in printed
    assert "\nweight decay\n" in printed
    assert "\nbatch size\n" not in printed


@pytest.mark.parametrize("suffix", ["svg", "png"], ids=str)
def test_a_picture_is_written(capsys, tmp_path, suffix):
    path = tmp_path / f"schedule.{suffix}"
    assert f"wrote {path}" in _printed(capsys, "--plot", str(path), "--batch-ramp", "0:8 160:16")
    start = path.read_bytes()[:64]
    assert start.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_what_is_missing_for_a_picture_is_told_first(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for path, text in (
        (tmp_path / "a.svg", "pip install 'sidestream[report]'"),
        (tmp_path / "a.gif", "to end in one of .png, .svg, .pdf"),
        (tmp_path / "none" / "a.png", "in a folder that exists"),
    ):
        assert cli.main(["schedule", "--plot", str(path)]) == cli.EXIT_USAGE
        captured = capsys.readouterr()
        assert text in captured.err
        assert captured.out == ""


def test_counts_that_are_none_are_refused(capsys):
    assert cli.main(["schedule", "--steps", "0"]) == cli.EXIT_USAGE
    assert "expected --steps >= 1, got 0" in capsys.readouterr().err
