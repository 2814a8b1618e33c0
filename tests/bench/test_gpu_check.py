"""`make gpu-check` without a GPU: a red gate times nothing, failures are told."""

import json
import sys

import pytest
import torch

from sidestream.bench import gpu_check, gpu_memcheck, gpu_steps
from sidestream.bench.kernel_cases import many_tensors
from sidestream.bench.kernel_cases.selection import Selection, select

CPU = torch.device("cpu")


def _step(status):
    return gpu_steps.StepResult("stand-in", status, 0.0, "")


@pytest.fixture
def _no_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu_steps, "gpu_tests", lambda budget, dry_run: _step("ok"))
    monkeypatch.setattr(gpu_steps, "trainings", lambda budget, dry_run: [])
    monkeypatch.setattr(gpu_check, "DRY_NUMEL", 20_000)


@pytest.fixture
def _few_cases(monkeypatch):
    some = Selection(ops=("reduce", "unpack"))
    monkeypatch.setattr(gpu_check, "select", lambda selection: select(some))


def _run(tmp_path):
    code = gpu_check.main(["--dry-run"])
    return code, json.loads((tmp_path / "gpu_check.json").read_text())


@pytest.mark.usefixtures("_no_programs")
def test_dry_run_is_labelled_and_measures_every_case(tmp_path, capsys):
    code, report = _run(tmp_path)
    assert code == 0
    assert report["label"] == gpu_check.DRY_LABEL
    rows = report["kernels"]["rows"]
    ours = {row["case"]: row for row in rows if row["candidate"] == "sidestream"}
    assert set(ours) == {case.name for case in select(Selection())}
    assert ours["quantize_nvfp4 bf16"]["target_percent"] == pytest.approx(70.0)
    assert ours["quantize_nvfp4 bf16 SR"]["target_percent"] == pytest.approx(60.0)
    assert all(row["percent_of_copy"] > 0 for row in rows)
    assert "not a measurement" in capsys.readouterr().out


@pytest.mark.usefixtures("_no_programs")
def test_red_tests_time_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_steps, "gpu_tests", lambda budget, dry_run: _step("failed"))
    code, report = _run(tmp_path)
    assert code == 1
    assert report["kernels"] is None
    assert "GB/s" not in capsys.readouterr().out


@pytest.mark.usefixtures("_no_programs", "_few_cases")
def test_a_wrong_kernel_has_no_times(tmp_path, monkeypatch):
    monkeypatch.setattr(many_tensors, "reduce_", lambda out, parts, **options: out.fill_(1.0))
    code, report = _run(tmp_path)
    assert code == 1
    timed = {row["case"] for row in report["kernels"]["rows"]}
    assert not any(case.startswith("reduce world") for case in timed)
    assert "unpack bf16 -> bf16" in timed
    failed = [step for step in report["steps"] if step["status"] == "failed"]
    assert "reduce world 2" in failed[0]["detail"]


@pytest.mark.usefixtures("_no_programs", "_few_cases")
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
