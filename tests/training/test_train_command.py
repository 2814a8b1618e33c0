import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from sidestream.cli import main
from sidestream.tests.training.processes import one_thread_each, parse_result
from sidestream.training import train_command

TINY = ["--device", "cpu", "--model", "tiny", "--seq-len", "16", "--batch", "12"]


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(train_command, "launch", refuse)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--data /does/not/exist", "nothing there"),
        ("--batch 7", "7; pass --batch 8"),
        ("--kill-at-step 1 --kill-rank 2", "--kill-rank below 2"),
        ("--json /does/not/exist/file", "make the folder first"),
        ("--checkpoint /does/not/exist --resume", "got none"),
    ],
    ids=["data", "batch", "kill_rank", "json", "resume"],
)
def test_bad_input_is_told_before_any_rank_starts(arguments, expected, capsys):
    assert main(["train", "--nproc", "2", *TINY, *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sidestream: error: expected")
    assert expected in error


@pytest.mark.usefixtures("nothing_starts")
def test_more_ranks_than_gpus_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["train", "--device", "cuda", "--nproc", "2", "--model", "tiny"]) == 2
    assert "got 2 ranks for 1 GPUs; pass --nproc 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_killed_rank_ends_the_others_with_an_error_that_names_what_they_waited_for():
    command = [sys.executable, "-m", "sidestream", "train", "--nproc", "3", *TINY]
    command += ["--steps", "100000", "--zero", "3", "--kill-at-step", "3", "--kill-rank", "1"]
    errors = []
    killed_at = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=one_thread_each()
    ) as run:
        for line in run.stderr:
            errors.append(line)
            if killed_at is None and "rank 1 was killed by SIGKILL" in line:
                killed_at = time.monotonic()
        output = run.stdout.read()
    assert run.returncode == 128 + signal.SIGKILL
    assert killed_at is not None
    assert time.monotonic() - killed_at < 30
    told = "".join(errors)
    for rank in (0, 2):
        failed = [line for line in errors if f"rank {rank} failed in step" in line]
        assert len(failed) == 1, told
        assert "of unit" in failed[0] or "the mean of the loss" in failed[0], told
    assert "still running" not in told
    assert "RESULT" not in output


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_ranks_train_and_the_last_line_is_the_result(tmp_path):
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "sidestream", "train", "--nproc", "2", *TINY]
    command += ["--steps", "3", "--grad-wire", "bf16", "--bucket-mib", "0.1", "--json", str(path)]
    run = subprocess.run(
        command, capture_output=True, text=True, env=one_thread_each(), check=False
    )
    assert run.returncode == 0, run.stderr
    result = parse_result(run.stdout)
    assert result == json.loads(path.read_text())
    assert (result["world"], result["steps"], result["grad_wire"]) == (2, 3, "bf16")
    assert result["wire_bytes_per_step"] > 0
    assert len(result["params_sha256"]) == 64
