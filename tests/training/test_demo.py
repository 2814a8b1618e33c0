import json
from pathlib import Path

import pytest

from sidestream.training import demo
from sidestream.training.demo import Story, differences, run_demo, story_of

FIGURES = {
    "params_sha256": "00ff",
    "loss_first": 5.5,
    "loss_last": 2.5,
    "loss_held_out": 2.6,
    "tokens_per_s": 1000.0,
    "step_ms_median": 10.0,
    "peak_mib": 300.0,
    "first_step": 1,
    "steps": 10,
}


@pytest.mark.parametrize("steps", [8, 9, 10, 11, 40, 150, 1001], ids=str)
def test_the_run_is_killed_after_a_checkpoint_and_before_the_end(steps):
    story = story_of(steps)
    assert 0 < story.saved_at < story.killed_at < steps


def test_story_of_the_usual_run():
    assert story_of(150) == Story(steps=150, every=30, killed_at=75)


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="at least 8 steps, got 7"):
        story_of(7)


@pytest.mark.parametrize("name", ["params_sha256", "loss_first", "loss_last", "loss_held_out"])
def test_one_changed_bit_is_a_difference(name):
    changed = {**FIGURES, name: "00fe" if name == "params_sha256" else FIGURES[name] + 2**-40}
    assert differences(FIGURES, changed) == [name]
    assert differences(FIGURES, {**FIGURES, "tokens_per_s": 1.0}) == []


@pytest.mark.parametrize(
    ("codes", "sha256", "code", "told"),
    [
        ([0, 137, 0], "00ff", 0, "is bit-equal to uninterrupted"),
        ([0, 137, 0], "beef", 1, "NOT bit-equal to uninterrupted: params_sha256"),
        ([0, 0], "00ff", 1, "expected the run to be killed"),
        ([1], "00ff", 1, "the uninterrupted run ended with code 1"),
    ],
    ids=["equal", "different", "survived", "failed"],
)
def test_outcome_is_told_and_returned(codes, sha256, code, told, monkeypatch, capsys):
    left = list(codes)

    def train(arguments):
        if "--json" in arguments:
            figures = {**FIGURES, "params_sha256": sha256} if "--resume" in arguments else FIGURES
            Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(figures))
        return left.pop(0)

    monkeypatch.setattr(demo, "sidestream", train)
    assert run_demo([], 10) == code
    assert left == []
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_of_two_ranks(monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert demo.main(["--steps", "8", "--model", "tiny", "--seq-len", "16", "--batch", "8"]) == 0
    assert "is bit-equal to uninterrupted" in " ".join(capfd.readouterr().out.split())
