"""`make gpu-check` without a GPU: a red gate times nothing, failures are told, copy is the roof."""

import json
import sys

import pytest
import torch

from sidestream.bench import gpu_check, gpu_kernels, gpu_memcheck, gpu_steps

CPU = torch.device("cpu")


def _step(status):
    return gpu_steps.StepResult("stand-in", status, 0.0, "")


@pytest.fixture
def _no_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu_steps, "gpu_tests", lambda budget, dry_run: _step("ok"))
    monkeypatch.setattr(gpu_steps, "trainings", lambda budget, dry_run: [])
    monkeypatch.setattr(gpu_check, "DRY_ROUNDS", 1)


def _run(tmp_path):
    code = gpu_check.main(["--dry-run"])
    return code, json.loads((tmp_path / "gpu_check.json").read_text())


@pytest.mark.usefixtures("_no_programs")
def test_dry_run_is_labelled_and_measures_every_case(tmp_path, capsys):
    code, report = _run(tmp_path)
    assert code == 0
    assert report["label"] == gpu_check.DRY_LABEL
    cases = {row["case"] for row in report["kernels"] if row["candidate"] == "sidestream"}
    assert {"pack bf16 -> fp32 accumulate", "reduce world 8 bf16 -> fp32"} <= cases
    assert {"quantize_mx e4m3", "reduce_messages world 8 mxfp8", "adamw bf16 -> bf16"} <= cases
    ours = [row for row in report["kernels"] if row["candidate"] == "sidestream"]
    targets = {row["case"]: row["target_percent"] for row in ours}
    assert targets["quantize_nvfp4"] == pytest.approx(70.0)
    assert targets["quantize_nvfp4 SR"] == pytest.approx(60.0)
    assert report["kernels"][0]["percent_of_copy"] == pytest.approx(100.0)
    assert "not a measurement" in capsys.readouterr().out


@pytest.mark.usefixtures("_no_programs")
def test_red_tests_time_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_steps, "gpu_tests", lambda budget, dry_run: _step("failed"))
    code, report = _run(tmp_path)
    assert code == 1
    assert report["kernels"] == []
    assert "GB/s" not in capsys.readouterr().out


@pytest.mark.usefixtures("_no_programs")
def test_a_wrong_kernel_has_no_times(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "reduce_", lambda out, parts, accumulate: out.fill_(1.0))
    code, report = _run(tmp_path)
    assert code == 1
    assert not any(row["case"].startswith("reduce world") for row in report["kernels"])
    assert any(row["case"].startswith("pack") for row in report["kernels"])
    failed = [step for step in report["steps"] if step["status"] == "failed"]
    assert "reduce world 2" in failed[0]["detail"]


@pytest.mark.usefixtures("_no_programs")
def test_failed_training_fails_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_steps, "trainings", lambda budget, dry_run: [_step("failed")])
    assert _run(tmp_path)[0] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_says_so_and_fails(capsys):
    assert gpu_check.main([]) == 1
    assert "expected a GPU that torch sees, got none" in capsys.readouterr().out


def test_a_program_that_hangs_is_ended_and_one_that_fails_is_told():
    budget = gpu_steps.Budget(60)
    hanging = budget.run([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=1)
    assert hanging.code is None
    assert "out of time" in hanging.output
    failing = budget.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], limit_s=30)
    assert (failing.code, failing.output) == (3, "why\n")


def test_a_missing_sanitizer_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpu_steps, "SANITIZER_FOLDERS", ("/nowhere",))
    step = gpu_steps.memory_check(gpu_steps.Budget(60))
    assert step.status == "not run"
    assert "/nowhere" in step.detail


def test_the_memory_check_runs_on_the_cpu_too():
    gpu_memcheck.run(CPU)
