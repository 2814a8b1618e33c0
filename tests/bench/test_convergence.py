"""Tests of `sidestream bench convergence`: trainings of a few steps, what is done after a kill or a
failure, and bad input.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.nn import functional

from sidestream.bench import convergence
from sidestream.bench.convergence import (
    RESULTS_NAME,
    digest_of,
    measure,
    missing,
    read_results,
    runs_of,
)
from sidestream.bench.convergence_page import CURVES_NAME, PAGE_NAME
from sidestream.bench.convergence_wires import DEFAULT_WIRES, WIRES
from sidestream.bench.convergence_worker import SIZES, Run, Settings, is_evaluated, load_text
from sidestream.bench.ranks import RanksFailed
from sidestream.cli import main
from sidestream.tests.bench import convergence_ranks
from sidestream.tests.bench.convergence_ranks import trained, trained_to_ruin
from sidestream.tests.ranks import preload, run_on_ranks
from sidestream.training.data import Share, draw_batch
from sidestream.training.model import build_model
from sidestream.training.optimization import build_optimizer
from sidestream.training.schedule_options import ScheduleOptions, schedule_of

preload(convergence_ranks.__name__)
STEPS = 6
TINY = ["bench", "convergence", "--size", "tiny", "--steps", str(STEPS), "--seeds", "1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    return str(path)


@pytest.fixture
def settings(text):
    return settings_of(text)


def settings_of(text: str, **changes) -> Settings:
    given = {"size": "tiny", "steps": STEPS, "ranks": 2, "data": text}
    return Settings(**{**given, "data_sha256": load_text(text, "tiny").sha256, **changes})


@pytest.fixture
def from_fork_server(monkeypatch):
    """Ranks that start at once, and stay ranks."""

    def run_ranks(work, world, argument, *, timeout_s, stop):
        return run_on_ranks(trained, world, *argument)

    monkeypatch.setattr(convergence, "run_ranks", run_ranks)


def plain_losses(text: str, seed: int) -> list[float]:
    """The same training in one process, by plain PyTorch, on all of each batch."""
    size = SIZES["tiny"]
    corpus, model = load_text(text, "tiny"), build_model(size.model, seed)
    optimizer = build_optimizer(model.parameters(), size.learning_rate)
    schedule = schedule_of(ScheduleOptions(steps=STEPS, lr=size.learning_rate))
    losses = []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(step).lr
        tokens = draw_batch(
            corpus,
            Share(2 * size.rows, 1, 0, 1),
            seed=seed,
            step=step,
            microbatch=0,
            seq_len=size.model.context,
        )
        loss = functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_exact_wire_trains_as_plain_pytorch_does_and_others_nearly(text, settings):
    exact = plain_losses(text, seed=1)
    for wire, tolerance, num_bytes in (("fp32", 2e-5, 4.0), ("mxfp8", 0.02, 1.03)):
        first, second = run_on_ranks(trained, 2, settings, Run(1, 0, wire))
        assert first.losses == second.losses == pytest.approx(exact, rel=tolerance)
        assert first.losses != pytest.approx(exact, rel=2e-5) or wire == "fp32"
        assert list(first.validation) == [2, 4, 6]
        assert first.validation == second.validation
        # Of so small a model much is padding, and vectors, which travel in wider formats.
        assert num_bytes <= first.grad_bytes <= 1.2 * num_bytes
        assert num_bytes <= first.weight_bytes <= 1.2 * num_bytes


def test_a_loss_that_is_not_finite_ends_the_run_on_all_ranks(settings):
    for outcome in run_on_ranks(trained_to_ruin, 2, settings, Run(0, 0, "fp32")):
        assert len(outcome.losses) < STEPS
        assert not math.isfinite(outcome.validation[len(outcome.losses)])


def test_a_nudge_is_small_and_changes_the_bits(settings):
    exact, nudged = (
        run_on_ranks(trained, 2, settings, Run(0, 0, wire))[0] for wire in ("fp32", "fp32-nudged")
    )
    assert nudged.losses == pytest.approx(exact.losses, rel=1e-2)
    assert nudged.losses[0] != exact.losses[0]


def test_one_rank_sends_nothing(text):
    (outcome,) = run_on_ranks(trained, 1, settings_of(text, ranks=1), Run(0, 0, "bf16"))
    assert (outcome.grad_bytes, outcome.weight_bytes) == (None, None)
    assert len(outcome.losses) == STEPS


def test_a_text_that_changed_is_refused(text):
    changed = settings_of(text, data_sha256="0" * 64)
    with pytest.raises(
        Exception, match=r"expected the text to stay as it was .* 000000000000, got"
    ):
        run_on_ranks(trained, 2, changed, Run(0, 0, "fp32"))


def test_the_last_100_steps_are_looked_at_often():
    steps = [step for step in range(1, 2001) if is_evaluated(step, 2000)]
    assert steps[-10:] == list(range(1910, 2001, 10))
    assert steps[:-10] == list(range(100, 1901, 100))
    assert [step for step in range(1, 6) if is_evaluated(step, 5)] == [2, 4, 5]


def test_runs_come_seed_by_seed_behind_the_baseline_and_its_repetition():
    assert list(map(str, runs_of(["bf16", "fp32", "mxfp8"], 2))) == [
        "fp32, seed 0", "fp32, seed 0, again", "bf16, seed 0", "mxfp8, seed 0",
        "fp32, seed 1", "bf16, seed 1", "mxfp8, seed 1",
    ]  # fmt: skip


@pytest.mark.parametrize("wire", WIRES)
def test_wires_have_a_policy(wire):
    policy = WIRES[wire].policy()
    assert policy.grad_wire is not None and policy.param_wire is not None


def test_the_usual_wires_are_wires():
    assert set(DEFAULT_WIRES) <= set(WIRES)


# ---- what is done, and done once


def test_results_are_kept_and_not_measured_again(
    text, tmp_path, capsys, monkeypatch, from_fork_server
):
    ours = [*TINY, "--data", text, "--out", str(tmp_path / "new" / "folder")]
    assert main([*ours, "--wires", "bf16"]) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 runs to do" in printed and "| bf16 |" in printed
    folder = tmp_path / "new" / "folder"
    results = read_results(folder)
    assert [str(one.run) for one in results] == [
        "fp32, seed 0", "fp32, seed 0, again", "bf16, seed 0",
    ]  # fmt: skip
    assert all(len(one.losses) == STEPS and one.final_validation_loss > 0 for one in results)
    assert results[0].command.startswith("sidestream bench convergence --size tiny")
    page = (folder / PAGE_NAME).read_text()
    assert "fp32 trained twice: the same losses, and the same bits" in page
    lines = (folder / RESULTS_NAME).read_text()

    # One more wire is one more run, and the same again is none.
    assert main([*ours, "--wires", "bf16,mxfp8"]) == 0
    assert "1 of 4 runs to do" in capsys.readouterr().out
    assert (folder / RESULTS_NAME).read_text().startswith(lines)
    monkeypatch.setattr(convergence, "run_ranks", lambda *_, **__: pytest.fail("ranks started"))
    assert main([*ours, "--wires", "mxfp8"]) == 0
    assert "0 of 3 runs to do" in capsys.readouterr().out

    # The page alone, where the data need not be there; the same bytes.
    before = {name: (folder / name).read_bytes() for name in (PAGE_NAME, CURVES_NAME)}
    assert main(["bench", "convergence", "--report", "--out", str(folder)]) == 0
    assert before == {name: (folder / name).read_bytes() for name in before}


def test_other_settings_and_other_wires_of_one_name_are_other_runs(text, settings, tmp_path):
    line = fabricated(settings)
    (tmp_path / RESULTS_NAME).write_text(json.dumps(line) + "\n")
    results, runs = read_results(tmp_path), [Run(0, 0, "fp32"), Run(0, 1, "fp32")]
    assert missing(runs, results, settings) == runs[1:]
    assert missing(runs, results, settings_of(text, steps=STEPS + 1)) == runs
    line["wire_settings"] = {"gradients": "fp64", "weights": "fp32"}
    (tmp_path / RESULTS_NAME).write_text(json.dumps(line) + "\n")
    assert missing(runs, read_results(tmp_path), settings) == runs


def fabricated(settings: Settings) -> dict:
    return {
        "wire": "fp32", "seed": 0, "attempt": 0, "settings_digest": digest_of(settings),
        "settings": settings.described(), "wire_settings": WIRES["fp32"].described(),
        "num_parameters": 10, "unigram_loss": 3.0, "final_validation_loss": 2.0,
        "grad_bytes": 4.0, "weight_bytes": 4.0, "seconds": 1.0, "weights_sha256": "",
        "date": "", "command": "", "machine": {}, "validation": [[STEPS, 2.0]], "losses": [2.5],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_command_goes_on_where_it_was(text, tmp_path, capsys, request):
    ours = [*TINY, "--data", text, "--out", str(tmp_path), "--wires", "bf16"]
    started = subprocess.Popen(
        [sys.executable, "-m", "sidestream", *ours],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
    )
    try:
        while not (tmp_path / RESULTS_NAME).exists():
            assert started.poll() is None
            time.sleep(0.02)
    finally:
        started.kill()
    # Its ranks write to the same pipe, and it ends when the last of them has.
    started.communicate(timeout=60)
    (first, *_) = before = read_results(tmp_path)
    assert len(before) < 3 and str(first.run) == "fp32, seed 0"
    request.getfixturevalue("from_fork_server")
    assert main(ours) == 0
    assert f"{3 - len(before)} of 3 runs to do" in capsys.readouterr().out
    after = read_results(tmp_path)
    assert after[: len(before)] == before and len(after) == 3
    assert after[0].weights_sha256 == after[1].weights_sha256  # of other processes


def waits_for_stop(seen: list, fails: str, how):
    """In the place of `run_ranks`: the run of wire `fails` does `how`; others wait."""

    def run_ranks(work, world, task, *, timeout_s, stop: threading.Event):
        seen.append(task[1].wire)
        if task[1].wire == fails:
            how()
        assert stop.wait(30.0)
        raise RanksFailed("ended")

    return run_ranks


def refuse():
    raise RanksFailed("rank 1 failed: no luck")


def test_a_run_that_fails_ends_the_others(settings, monkeypatch):
    seen = []
    monkeypatch.setattr(convergence, "run_ranks", waits_for_stop(seen, "bf16", refuse))
    runs = runs_of(["bf16", "mxfp8", "nvfp4"], 1)
    with pytest.raises(RanksFailed, match="no luck"):
        measure(runs, settings, 3, lambda run, outcome: pytest.fail("nothing is done"))
    assert set(seen) == {"fp32", "bf16"}


def test_a_signal_ends_all_runs(text, tmp_path, capsys, monkeypatch):
    seen = []
    interrupt = waits_for_stop(seen, "fp32-nudged", lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(convergence, "run_ranks", interrupt)
    before = time.monotonic()
    ours = [*TINY, "--data", text, "--out", str(tmp_path), "--jobs", "3"]
    assert main(ours) == 128 + signal.SIGTERM
    assert set(seen) == {"fp32", "fp32-nudged"} and not list(tmp_path.iterdir())
    assert time.monotonic() - before < 25.0, "they wait for 30 s"
    assert "interrupted by SIGTERM" in capsys.readouterr().err


def test_ranks_that_fail_are_reported(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(convergence, "run_ranks", waits_for_stop([], "fp32", refuse))
    assert main([*TINY, "--data", text, "--out", str(tmp_path)]) == 1
    assert "rank 1 failed: no luck" in capsys.readouterr().err


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wires", "mxfp8,fp7"], r"--wires: expected some of fp32, .*, got fp7; choose of these"),
        (["--size", "huge"], r"--size: invalid choice: 'huge' \(choose from .*tiny.*, .*small"),
        (["--steps", "0"], "--steps: expected a whole number of at least 1, got '0'"),
        (["--data", "nowhere"], "expected a file or a folder at --data nowhere"),
        (["--out", "text.txt"], "expected a place to write to for --out, got text.txt"),
        (["--out", "damaged"], "line 2: expected a result of this version"),
        (["--out", "empty", "--report"], "--out: expected results in empty, got none; leave"),
    ],
    ids=["wire", "size", "steps", "data", "out", "damaged", "nothing-to-report"],
)
def test_what_cannot_be_done_is_refused_before_any_rank_starts(
    arguments, message, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convergence, "run_ranks", lambda *_, **__: pytest.fail("ranks started"))
    (tmp_path / "text.txt").write_text("text " * 100)
    (tmp_path / "damaged").mkdir()
    line = json.dumps(fabricated(settings_of(text))) + "\n"
    (tmp_path / "damaged" / RESULTS_NAME).write_text(line + line[:40] + "\n")
    try:
        code = main([*TINY, "--data", text, *arguments])
    except SystemExit as exit_of_argparse:
        code = exit_of_argparse.code
    assert code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "text.txt"]
