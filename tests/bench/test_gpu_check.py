"""`make gpu-check` without a GPU: a red gate times nothing, failures are told, time ends it."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from sidestream.bench import gpu_check, gpu_gates, gpu_speed, gpu_training, kernel_table, reports
from sidestream.bench.gpu_shared import TRAINING, TRYING
from sidestream.bench.gpu_steps import Outcome, StepResult
from sidestream.bench.kernel_cases import many_tensors
from sidestream.bench.kernel_cases.selection import Selection, select
from sidestream.training.result import RESULT_PREFIX

CPU = torch.device("cpu")


def _step(status):
    return StepResult("stand-in", status, 0.0, "")


@pytest.fixture
def _no_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu_gates, "gpu_tests", lambda budget, dry_run: _step("ok"))
    monkeypatch.setattr(gpu_gates, "sanitizer", lambda budget, tool, dry_run: _step("not run"))
    monkeypatch.setattr(gpu_gates, "timed_tests", lambda budget, dry_run: _step("ok"))
    monkeypatch.setattr(gpu_training, "trainings", lambda budget, dry_run: [])
    monkeypatch.setattr(gpu_speed, "step_time", lambda budget, dry_run: _step("ok"))
    monkeypatch.setattr(gpu_speed, "autotune", lambda budget, dry_run: _step("ok"))
    monkeypatch.setattr(gpu_speed, "DRY_NUMEL", 20_000)


@pytest.fixture
def _few_cases(monkeypatch):
    some = Selection(ops=("reduce", "unpack"))
    monkeypatch.setattr(gpu_speed, "select", lambda selection: select(some))


def _run(tmp_path):
    code = gpu_check.main(["--dry-run"])
    files = sorted((tmp_path / gpu_check.DRY_FOLDER).iterdir(), key=lambda file: len(file.name))
    return code, json.loads(files[0].read_text()), files


def _named(report, name):
    (found,) = (step for step in report["steps"] if step["name"] == name)
    return found


@pytest.mark.usefixtures("_no_programs")
def test_dry_run_is_labelled_and_measures_every_case(tmp_path, capsys):
    code, report, files = _run(tmp_path)
    assert code == 0
    assert report["label"] == gpu_check.DRY_LABEL
    kernels = reports.read_report(files[1])
    ours = {row.case: row for row in kernels.rows if row.candidate == "sidestream"}
    assert set(ours) == {case.name for case in select(Selection())}
    assert ours["quantize_nvfp4 bf16"].target_percent == pytest.approx(70.0)
    assert ours["quantize_nvfp4 bf16 SR"].target_percent == pytest.approx(60.0)
    assert all(row.percent_of_copy > 0 for row in kernels.rows)
    assert _named(report, gpu_speed.KERNELS)["values"]["pack_host_us"] > 0.0
    printed = capsys.readouterr().out
    assert "not a measurement" in printed
    assert f"written to {files[0]} and {files[1]}" in printed


@pytest.mark.usefixtures("_no_programs")
@pytest.mark.parametrize("gate", ["gpu_tests", "sanitizer", "timed_tests"])
def test_a_red_gate_times_nothing(tmp_path, monkeypatch, capsys, gate):
    monkeypatch.setattr(gpu_gates, gate, lambda *_, dry_run: _step("failed"))
    code, report, files = _run(tmp_path)
    assert code == 1
    assert len(files) == 1
    closed = [gpu_speed.KERNELS, gpu_speed.STEP, gpu_speed.AUTOTUNE]
    if gate != "timed_tests":
        closed.append(gpu_gates.TIMED)
    for name in closed:
        assert _named(report, name)["status"] == "not run"
    assert "GB/s" not in capsys.readouterr().out


@pytest.mark.usefixtures("_no_programs", "_few_cases")
def test_tests_that_take_times_begin_when_every_other_gate_has_ended(monkeypatch):
    running, others = [], []

    def gate(*_, dry_run):
        running.append(1)
        time.sleep(0.1)
        running.pop()
        return _step("ok")

    def timed(budget, dry_run):
        others.append(len(running))
        return _step("ok")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    monkeypatch.setattr(gpu_gates, "gpu_tests", gate)
    monkeypatch.setattr(gpu_gates, "sanitizer", gate)
    monkeypatch.setattr(gpu_gates, "timed_tests", timed)
    assert gpu_check.main(["--dry-run"]) == 0
    assert others == [0]


@pytest.mark.usefixtures("_no_programs", "_few_cases")
def test_the_verdict_names_what_is_not_run(tmp_path, monkeypatch, capsys):
    late = StepResult(gpu_speed.STEP, "not run", 0.0, "no time left")
    monkeypatch.setattr(gpu_speed, "step_time", lambda budget, dry_run: late)
    monkeypatch.setattr(gpu_gates, "sanitizer", lambda budget, tool, dry_run: _step("ok"))
    code, report, _ = _run(tmp_path)
    told = f"all right, but 1 step not run: {gpu_speed.STEP}"
    assert (code, report["verdict"]) == (0, told)
    assert f"\n{told}, in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ({"a": "ok"}, "all right"),
        ({"a": "ok", "b": "not run", "c": "not run"}, "all right, but 2 steps not run: b, c"),
        ({"a": "failed", "b": "ok", "c": "failed"}, "FAILED: a, c"),
        ({"a": "failed", "b": "not run"}, "FAILED: a; 1 step not run: b"),
    ],
)
def test_verdicts(ends, verdict):
    steps = [StepResult(name, status, 0.0, "") for name, status in ends.items()]
    assert gpu_check.verdict(steps) == verdict


@pytest.mark.usefixtures("_no_programs", "_few_cases")
def test_a_wrong_kernel_has_no_times(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(many_tensors, "reduce_", lambda out, parts, **options: out.fill_(1.0))
    code, report, files = _run(tmp_path)
    assert code == 1
    timed = {row.case for row in reports.read_report(files[1]).rows}
    assert not any(case.startswith("reduce world") for case in timed)
    assert "unpack bf16 -> bf16" in timed
    assert "reduce world 2" in _named(report, gpu_speed.KERNELS)["detail"]
    assert "FAILED, kernels: wrong results: reduce world 2" in capsys.readouterr().out


@pytest.mark.usefixtures("_no_programs", "_few_cases")
def test_one_failed_step_fails_the_check_and_hides_no_other(tmp_path, monkeypatch):
    def broken(budget, dry_run):
        raise OSError("no such program")

    monkeypatch.setattr(gpu_speed, "step_time", broken)
    code, report, _ = _run(tmp_path)
    assert code == 1
    failed = _named(report, gpu_speed.STEP)
    assert failed["status"] == "failed"
    assert failed["detail"].startswith("OSError: no such program")
    assert report["steps"][-1]["name"] == "stand-in"


@pytest.mark.usefixtures("_no_programs", "_few_cases")
def test_two_checks_of_a_day_stand_beside_each_other(tmp_path):
    for _ in range(2):
        _, _, files = _run(tmp_path)
    day = files[0].stem
    names = {f"{stem}{end}.json" for stem in (day, f"{day}-2") for end in ("", "-kernels")}
    assert {file.name for file in files} == names


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_says_so(capsys):
    assert gpu_check.main([]) == gpu_check.EXIT_USAGE
    assert "expected a GPU that torch sees, got none" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUT", str(tmp_path / "file"))
    monkeypatch.setattr(gpu_check, "_check", lambda *_, **__: pytest.fail("it began"))
    assert gpu_check.main(["--dry-run"]) == gpu_check.EXIT_USAGE
    assert "OUT" in capsys.readouterr().err


def test_results_are_named_as_the_tables_of_the_gpu_are(monkeypatch):
    monkeypatch.setenv("OUT", "/results")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = gpu_check.results_folder(torch.device("cuda", 0))
    assert found == Path("/results/nvidia_h200")
    assert gpu_check.results_folder(CPU) == Path("/results", gpu_check.DRY_FOLDER)


@pytest.mark.usefixtures("_no_programs", "_few_cases")
def test_kernels_that_were_not_reached_are_printed_whole(monkeypatch, capsys):
    names = [f"a case with a long name {number}" for number in range(40)]
    late = StepResult(gpu_speed.KERNELS, "ok", 1.0, f"no time left for 40: {', '.join(names)}")
    monkeypatch.setattr(gpu_speed, "kernels", lambda *_, dry_run: (late, None))
    assert gpu_check.main(["--dry-run"]) == 0
    assert names[-1] in capsys.readouterr().out


@pytest.mark.usefixtures("_no_programs", "_few_cases")
def test_a_kernel_that_raises_when_timed_costs_no_other_its_times(tmp_path, monkeypatch):
    broken, measure = "reduce world 2 bf16 -> fp32", kernel_table.measure

    def raising(cases, *rest):
        if cases[0].name == broken:
            raise RuntimeError("too many programs")
        return measure(cases, *rest)

    monkeypatch.setattr(kernel_table, "measure", raising)
    code, report, files = _run(tmp_path)
    assert code == 1
    kernels = reports.read_report(files[1])
    timed = {row.case for row in kernels.rows}
    assert timed == {case.name for case in gpu_speed.select(Selection())} - {broken}
    (wrong,) = kernels.wrong
    assert wrong.startswith(f"{broken}, ")
    assert wrong.endswith(" elements: RuntimeError: too many programs")
    assert _named(report, gpu_speed.KERNELS)["status"] == "failed"
    assert wrong in _named(report, gpu_speed.KERNELS)["detail"]


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (1, f"{TRYING}\nRuntimeError: unsupported device", "not run"),
        (None, f"{TRYING}\n", "not run"),
        (1, "ImportError: no module", "failed"),
        (1, f"{TRYING}\n{TRAINING}\nRuntimeError: did not train alike", "failed"),
        (0, f"{TRYING}\n{TRAINING}\n", "ok"),
    ],
)
def test_what_gloo_cannot_do_is_not_our_failure(code, output, status):
    class Ended:
        def run(self, command, *, limit_s):
            levels = {name: {"relative_difference": 1e-7} for name in ("zero0", "zero3")}
            result = json.dumps({"levels": levels, "same_bits": True})
            return Outcome(code, f"{output}{RESULT_PREFIX}{result}\n", 1.0)

    step = gpu_training.shared(Ended(), "2 ranks", 2, "cuda")
    assert step.status == status
    if status == "ok":
        assert "zero0 1.0e-07, zero3 1.0e-07; both levels the same bits: yes" in step.detail


def test_levels_that_lead_elsewhere_fail():
    def trained(loss, sha256):
        return StepResult("train", "ok", 1.0, "", {"loss_last": loss, "params_sha256": sha256})

    agree = gpu_training._same_training
    assert agree(trained(2.0, "a"), trained(2.001, "b")).detail.endswith("same bits: no")
    assert agree(trained(2.0, "a"), trained(2.001, "b")).status == "ok"
    assert agree(trained(2.0, "a"), trained(2.2, "b")).status == "failed"
    assert agree(trained(2.0, "a"), _step("failed")).status == "not run"
