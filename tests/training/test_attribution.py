"""`sidestream train --rerun` and `--inject-fault`: verdicts, exit codes, and how runs go on."""

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.training.processes import one_thread_each, parse_result
from sidestream.training import batches
from sidestream.training.attribution import resume, run_validated
from sidestream.training.errors import CheckpointError, RunStopped
from sidestream.training.launch.ranks import Place
from sidestream.training.launch.relaunching import relaunching, rotation_of
from sidestream.training.options import add_train_arguments, options_from
from sidestream.training.plan import plan_run
from sidestream.training.rerun import RerunStateMachine
from sidestream.training.trainer import train

NUM_STEPS = 4
TINY = ["--device", "cpu", "--model", "tiny", "--seq-len", "16", "--batch", "8"]
TINY += ["--steps", str(NUM_STEPS)]
CODES = {"transient": [17], "persistent": [16, 17], "bug": [16, 17]}


def options_of(arguments):
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    return options_from(parser.parse_args(arguments))


def runs_here(rank, world_size, folder, runs):
    """Of each of `runs`, arguments of the command: the exit code of each launch, and what the first
    rank says. The launches are this process, one after the other, in the launcher's environments.
    """
    found = []
    for run, arguments in enumerate(runs):
        codes, said = [], io.StringIO()

        def launch(environment, is_resumed, run=run, arguments=arguments, codes=codes):
            options = options_of([*TINY, *arguments, *["--resume"] * is_resumed])
            meeting = Path(folder) / f"meeting-{run}-{len(codes)}"
            place = Place(rank, world_size, rank, world_size, meeting.as_uri())
            with mock.patch.dict(os.environ, {**environment, "LOCAL_RANK": str(rank)}):
                try:
                    print(train(plan_run(options, world_size), place).line())
                except RunStopped as stopped:
                    codes.append(stopped.code)
                else:
                    codes.append(0)
            return codes[-1]

        with contextlib.redirect_stdout(said):
            relaunching(launch, rotation_of("cpu", world_size, 0))
        found.append((codes, said.getvalue()))
    return found


def _verdict(said):
    return said.splitlines()[-1].removeprefix("verdict: ")


def test_a_fault_in_the_first_step_is_told_and_the_run_goes_on_as_if_there_was_none(
    text_file, tmp_path
):
    metrics = tmp_path / "metrics.jsonl"
    data, faulty = ["--data", text_file], ["--checkpoint", str(tmp_path / "checkpoints")]
    faulty += ["--metrics", str(metrics), "--timers", "--energy"]
    runs = [
        data,
        [*data, *faulty, "--inject-fault", "persistent", "--inject-fault-at", "1"],
        [*data, *faulty, "--rerun", "--resume"],
    ]
    ((_, undisturbed), (codes, said), (resumed_codes, resumed)) = run_on_ranks(
        runs_here, 1, str(tmp_path), runs, backend=None
    )[0]
    assert codes == [16, 17] and resumed_codes == [0]
    assert _verdict(said).startswith("persistent ") and " step 1: rank 0 on " in _verdict(said)
    expected, got = parse_result(undisturbed), parse_result(resumed)
    for name in ("params_sha256", "loss_first", "loss_last", "loss_held_out"):
        assert got[name] == expected[name], name
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert sorted(set(steps)) == [*range(1, NUM_STEPS + 1)]


def test_a_gradient_that_is_nan_once_is_told_though_the_loss_is_right(
    text_file, tmp_path, monkeypatch, capsys
):
    window_loss, forwards = batches.window_loss, []

    def spoilt(module, tokens):
        forwards.append(loss := window_loss(module, tokens))
        # Of nothing: zero, with a gradient of 0 * infinity.
        return loss + (0 * loss).sqrt() if len(forwards) == 2 else loss

    monkeypatch.setattr(batches, "window_loss", spoilt)
    arguments = [*TINY, "--data", text_file, "--checkpoint", str(tmp_path), "--rerun"]
    with pytest.raises(RunStopped) as stopped:
        train(plan_run(options_of(arguments), 1), Place())
    assert stopped.value.code == 17 and len(forwards) == 3
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict == str(stopped.value) and verdict.startswith("verdict: transient ")
    assert " step 2: rank 0 on " in verdict and "'largest gradient of the rank' got nan" in verdict


def _steps(machine, *losses):
    """How the last of these steps ends."""
    for loss in losses:
        run_validated(machine, lambda loss=loss: loss, lambda: None)
    return machine.should_checkpoint_and_exit()


def test_fewer_microbatches_are_no_large_loss():
    machine = RerunStateMachine()
    many, one = torch.full((16,), 5.0 / 16), torch.tensor([5.0])
    assert not _steps(machine, *[many] * 100, one).exit
    assert _steps(machine, 11 * one).code == 16


def _saved(*losses):
    machine = RerunStateMachine()
    _steps(machine, *losses)
    return {"rerun": machine.state_dict()}


def test_what_was_saved_of_rejected_results_is_taken_or_refused():
    asks, asks_nothing = _saved(torch.tensor([torch.nan])), _saved(torch.ones(1))
    other = {"rerun": {**asks["rerun"], "of another release": 1}}
    for extra in ({}, {"rerun": None}, asks_nothing):
        resume(None, extra, same_ranks=True)
    for extra, error in ((asks, "expected --rerun"), (other, "rerun state: expected")):
        with pytest.raises(CheckpointError, match=error):
            resume(None, extra, same_ranks=True)
    machine = RerunStateMachine(program="another")
    resume(machine, asks_nothing, same_ranks=False)
    assert machine.step == 1
    with pytest.raises(CheckpointError, match="program: expected 'another'"):
        resume(machine, asks, same_ranks=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_runs_end_with_the_right_verdict(text_file, tmp_path):
    faults = []
    for number in range(50):
        draw = random.Random(number)
        kind = [*CODES][number % 3]
        faults.append((kind, draw.randint(1, NUM_STEPS), draw.randrange(2)))
    runs = [
        f"--data {text_file} --checkpoint {tmp_path / str(number)} --dropout 0.1 "
        f"--zero {number % 4} --accumulate {1 + number % 2} "
        f"--inject-fault {kind} --inject-fault-at {step} --inject-fault-rank {rank}".split()
        for number, (kind, step, rank) in enumerate(faults)
    ]
    by_rank = run_on_ranks(runs_here, 2, str(tmp_path), runs, backend=None, timeout_s=500)
    for (kind, step, rank), (codes, said), (others, _) in zip(faults, *by_rank, strict=True):
        assert codes == others == CODES[kind]
        assert _verdict(said).startswith(f"{kind} "), said
        assert f" step {step}: rank {rank} on " in _verdict(said)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", CODES)
def test_the_command_ends_with_the_verdict(kind, text_file):
    command = [sys.executable, "-m", "sidestream", "train", *TINY, "--nproc", "2"]
    command += ["--data", text_file, "--inject-fault", kind, "--inject-fault-rank", "1"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=one_thread_each(), timeout=250, check=False
    )
    assert ran.returncode == 17
    assert _verdict(ran.stdout).startswith(f"{kind} "), ran.stdout + ran.stderr
    assert " step 2: rank 1 on " in _verdict(ran.stdout)
