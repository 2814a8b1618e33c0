"""A run's figures, times and joules, and its schedules, as `sidestream train` shows them."""

import json
import math

import pytest

from sidestream.cli import main
from sidestream.sharding import NonFiniteGradientError
from sidestream.tests.training.processes import parse_result
from sidestream.training import batches, trainer
from sidestream.training.errors import NonFiniteRunError, OptionsError, RunStopped, UsageError
from sidestream.training.launch.ranks import Place
from sidestream.training.measures import energy
from sidestream.training.options import TrainOptions
from sidestream.training.plan import plan_run
from sidestream.training.schedule_options import schedule_of
from sidestream.training.stopping import Stopping

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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"metrics": "m"}, "expected no metrics at m yet, got a file of 12 bytes"),
        ({"tensorboard": "tb"}, "expected no event files in tb yet, got events.out.tfevents.1"),
        ({"metrics": "s3://b/m"}, "path on this machine for --metrics, got the URL s3://b/m"),
        ({"tensorboard": "memory://tb"}, "path on this machine for --tensorboard, got the URL"),
        ({"json": "file:///tmp/r"}, "path on this machine for --json, got the URL"),
        ({"metrics": "x/../new", "json": "new"}, "another file for --json than for --metrics"),
        ({"metrics": "absent/m"}, "expected --metrics in a folder that exists"),
        ({"tensorboard": "m"}, "place to write to for --tensorboard, got m"),
    ],
    ids=[
        "metrics",
        "events",
        "URL",
        "URL of a folder",
        "URL of a result",
        "same",
        "absent",
        "file",
    ],
)
def test_places_of_figures_are_refused_before_a_rank_starts(
    text_file, tmp_path, monkeypatch, options, text
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").write_text('{"step": 1}\n')
    for folder in ("x", "tb"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(UsageError, match=text):
        plan_run(TrainOptions(**SIZES, data=text_file, **options), 2)
    assert (tmp_path / "m").read_text() == '{"step": 1}\n'


def test_without_tensorboard_no_rank_starts(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("sidestream.training.plan.find_spec", lambda name: None)
    with pytest.raises(OptionsError, match=r"pip install 'sidestream\[tensorboard\]'"):
        plan_run(TrainOptions(**SIZES, data=text_file, tensorboard=str(tmp_path)), 1)


class Counter:
    """Of joules that are used as a test says."""

    key, remark, max_gap_s, joules = "a counter", "", float("inf"), 0.0

    def open(self):
        pass

    def read_joules(self):
        return self.joules

    def close(self):
        pass


def test_joules_are_those_of_steps(text_file, tmp_path, monkeypatch):
    counter = Counter()

    def uses(joules, name):
        act = getattr(trainer, name)

        def used(*arguments):
            counter.joules += joules
            return act(*arguments)

        monkeypatch.setattr(trainer, name, used)

    monkeypatch.setattr(energy, "source_of", lambda *_, **__: counter)
    for joules, name in ((1e3, "build_run"), (2.0, "train_step"), (1e4, "save_run")):
        uses(joules, name)
    saving = {"checkpoint": str(tmp_path), "checkpoint_every": 1}
    options = TrainOptions(**SIZES, data=text_file, device="cpu", steps=2, energy=True, **saving)
    result = trainer.train(plan_run(options, 1), Place())
    assert (result.joules_per_step, result.joules_per_token) == (2.0, 2.0 / (8 * 16))


@pytest.mark.parametrize(
    ("fault", "lines"),
    [({}, [1, 1]), ({"inject_fault": "transient", "inject_fault_at": 1}, [])],
    ids=["after the first", "in the first"],
)
def test_a_run_that_stops_early_tells_of_the_steps_it_made(
    text_file, tmp_path, monkeypatch, fault, lines
):
    for asked in ("is_agreed", "is_agreed_now"):
        monkeypatch.setattr(Stopping, asked, lambda self: True)
    options = TrainOptions(
        **SIZES,
        **fault,
        data=text_file,
        device="cpu",
        steps=3,
        timers=True,
        energy=True,
        metrics=str(tmp_path / "m.jsonl"),
        checkpoint=str(tmp_path / "saved"),
    )
    with pytest.raises(RunStopped):
        trainer.train(plan_run(options, 1), Place())
    assert [line["step"] for line in _lines(tmp_path / "m.jsonl")] == lines


def test_the_figures_before_a_gradient_that_is_nan_are_kept(text_file, tmp_path, monkeypatch):
    loss_of, path, losses = batches.window_loss, tmp_path / "m.jsonl", []

    def loss(module, tokens):
        losses.append(loss_of(module, tokens))
        return losses[-1] * (math.nan if len(losses) == 3 else 1)

    monkeypatch.setattr(batches, "window_loss", loss)
    options = TrainOptions(**SIZES, data=text_file, device="cpu", steps=9, metrics=str(path))
    with pytest.raises(NonFiniteGradientError):
        trainer.train(plan_run(options, 1), Place())
    assert [line["step"] for line in _lines(path)] == [1, 2]


def test_a_loss_that_is_not_finite_ends_a_run_that_saves_nothing(text_file, monkeypatch):
    step = trainer.train_step

    def spoilt(run, number, recorder):
        decision = step(run, number, recorder)
        recorder.first_nonfinite = number
        return decision

    monkeypatch.setattr(trainer, "train_step", spoilt)
    options = {**SIZES, "data": text_file, "device": "cpu", "steps": 1}
    with pytest.raises(NonFiniteRunError, match="got one in step 1 that is not"):
        trainer.train(plan_run(TrainOptions(**options), 1), Place())
    trainer.train(plan_run(TrainOptions(**options, nonfinite_grads="keep"), 1), Place())


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
    whole = train("--timers", "--graph")  # what is replayed has no parts that a host could time
    assert "\nstep/forward_backward: min " in whole
    assert "step/forward_backward/" not in whole


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
