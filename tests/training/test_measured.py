"""A run's figures, times and joules, and its schedules, as `sidestream train` shows them."""

import json

import pytest

from sidestream.cli import main
from sidestream.tests.training.processes import parse_result
from sidestream.training.errors import OptionsError
from sidestream.training.options import TrainOptions
from sidestream.training.plan import plan_run
from sidestream.training.schedule_options import schedule_of

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = ["train", "--device", "cpu", "--model", "tiny", "--seq-len", "16", "--batch", "8"]
SIZES = {"model": "tiny", "seq_len": 16, "batch": 8}


@pytest.fixture
def train(text_file, capsys):
    def run(*arguments):
        code = main([*TINY, "--steps", "6", "--data", text_file, *map(str, arguments)])
        output = capsys.readouterr()
        return output.out if code == 0 else (code, output.err)

    return run


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_has_a_line_of_figures(train, tmp_path):
    output = train("--metrics", tmp_path / "m.jsonl", "--lr-schedule", "linear", "--min-lr", 0)
    lines = _lines(tmp_path / "m.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    result = parse_result(output)
    assert (lines[0]["loss"], lines[-1]["loss"]) == (result["loss_first"], result["loss_last"])
    schedule = schedule_of(TrainOptions(**SIZES, steps=6, lr_schedule="linear", min_lr=0.0))
    assert [line["lr"] for line in lines] == [schedule.at(step).lr for step in range(1, 7)]
    assert all(line["grad_norm"] > 0 and line["tokens_per_s"] > 0 for line in lines)


def test_a_resumed_run_goes_on_with_its_figures_and_ends_in_the_same_bits(train, tmp_path):
    schedule = ["--batch-ramp", "0:2 6:8", "--accumulate", 4, "--end-weight-decay", 0.3]
    whole = train(*schedule, "--metrics", tmp_path / "whole.jsonl")
    saving = [*schedule, "--checkpoint", tmp_path / "saved", "--checkpoint-every", 4]
    train(*saving, "--metrics", tmp_path / "m.jsonl")
    (tmp_path / "saved" / "step-00000006.json").unlink()
    resumed = train(*saving, "--metrics", tmp_path / "m.jsonl", "--resume")
    bits = [parse_result(output)["params_sha256"] for output in (whole, resumed)]
    assert bits[0] == bits[1]
    told = [
        [
            (line["step"], line["loss"], line["lr"], line["batch"])
            for line in _lines(tmp_path / name)
        ]
        for name in ("whole.jsonl", "m.jsonl")
    ]
    assert told[0] == told[1]
    assert [batch for *_, batch in told[0]] == [2, 2, 2, 8, 8, 8]


def test_figures_of_another_run_are_not_written_to(train, tmp_path):
    train("--metrics", tmp_path / "m.jsonl")
    code, error = train("--metrics", tmp_path / "m.jsonl")
    assert code == 2
    assert "no metrics" in error


def test_microbatches_change_only_the_rounding_while_the_batch_grows(train, tmp_path):
    ramp = ["--batch-ramp", "0:4 8:8", "--metrics"]
    train(*ramp, tmp_path / "one.jsonl", "--accumulate", 2)
    train(*ramp, tmp_path / "two.jsonl", "--accumulate", 4)
    one, two = (
        [line["loss"] for line in _lines(tmp_path / name)] for name in ("one.jsonl", "two.jsonl")
    )
    assert one == pytest.approx(two, rel=1e-3)


def test_times_of_regions_and_missing_joules_are_told(train):
    output = train("--timers", "--energy", "--accumulate", 2)
    for region in ("step", "step/batch", "step/forward", "step/backward", "step/optimizer"):
        assert f"\n{region}: min " in output
    assert "\nenergy: " in output
    assert "step/forward" not in train("--accumulate", 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_ramp": "0:3 9:8"}, r"--batch-ramp: expected .* multiple of .* got 3; take 4"),
        ({"batch_ramp": "0:3"}, r"--batch-ramp: expected .* multiple of .* got 3; take 4"),
        ({"batch_ramp": "2 2 9"}, r"got 2; .*--batch / \(--accumulate x ranks\) = 8 / \(2 x 2\)"),
        ({"batch_ramp": "0:8 1"}, r"--batch-ramp: expected ':' and a batch size at character"),
        ({"warmup_steps": 9, "decay_steps": 9}, r"--warmup-steps"),
        ({"min_lr": 1.0}, r"--min-lr"),
        ({"lr_schedule": "WSD", "wsd_decay_steps": 90, "steps": 9}, r"--wsd-decay-steps"),
    ],
    ids=["indivisible", "nothing_divisible", "ramp", "unreadable", "warm_up", "rates", "tail"],
)
def test_schedules_that_no_run_can_have_are_refused_before_it_starts(text_file, options, text):
    with pytest.raises(OptionsError, match=text):
        plan_run(TrainOptions(**SIZES, data=text_file, accumulate=2, **options), 2)


def test_a_size_that_the_run_never_comes_to_is_not_refused(text_file):
    options = TrainOptions(**SIZES, data=text_file, steps=2, batch_ramp="0:8 4:7 8:8 1M:9")
    assert plan_run(options, 2).first_step == 1
