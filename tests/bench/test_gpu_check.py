"""`make gpu-check` without a GPU: a red gate times nothing, failures are told, time ends it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from sidestream.bench import (
    gpu_check,
    gpu_gates,
    gpu_speed,
    gpu_training,
    kernel_table,
    reports,
    step_time,
    tunables,
    tuned_files,
)
from sidestream.bench.gpu_shared import TRAINING, TRYING
from sidestream.bench.gpu_steps import Budget, Outcome, StepResult
from sidestream.bench.kernel_cases import many_tensors
from sidestream.bench.kernel_cases.selection import Selection, select
from sidestream.bench.sweep import Sweep, Trial
from sidestream.bench.timing import Estimate
from sidestream.kernels import LaunchConfig
from sidestream.training.result import RESULT_PREFIX

CPU = torch.device("cpu")


def _step(status):
    return StepResult("stand-in", status, 0.0, "")


@pytest.fixture
def _no_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu_gates, "gpu_tests", lambda budget, dry_run: _step("ok"))
    monkeypatch.setattr(gpu_gates, "sanitizer", lambda budget, tool, dry_run: _step("not run"))
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
@pytest.mark.parametrize("gate", ["gpu_tests", "sanitizer"])
def test_a_red_gate_times_nothing(tmp_path, monkeypatch, capsys, gate):
    monkeypatch.setattr(gpu_gates, gate, lambda *_, dry_run: _step("failed"))
    code, report, files = _run(tmp_path)
    assert code == 1
    assert len(files) == 1
    for name in (gpu_speed.KERNELS, gpu_speed.STEP, gpu_speed.AUTOTUNE):
        assert _named(report, name)["status"] == "not run"
    assert "GB/s" not in capsys.readouterr().out


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


@pytest.mark.usefixtures("_few_cases")
@pytest.mark.parametrize(("patience", "num"), [(1.0, 1), (3.0, 2)])
def test_kernels_there_was_no_time_for_are_named(monkeypatch, patience, num):
    """By a clock that each case moves on by two seconds."""
    now, measured = [0.0], []

    def measure(cases, *_):
        measured.extend(cases)
        now[0] += 2.0
        return kernel_table.Measured((), (), ())

    monkeypatch.setattr(gpu_speed.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpu_speed, "KERNELS_LIMIT_S", 1.0)
    monkeypatch.setattr(kernel_table, "measure", measure)
    step, report = gpu_speed.kernels(Budget(60, patience=patience), CPU, dry_run=True)
    cases = [case.name for case in gpu_speed.select(Selection())]
    assert step.detail.startswith(f"{num} of {len(cases)} cases")
    assert [case.name for case in measured] == cases[:num]
    assert report.notes == (f"no time left for {', '.join(cases[num:])}",)


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


def test_a_step_time_is_told_with_whether_both_trained_alike():
    ours, theirs = (
        step_time.Figures(ms=ms, tokens_per_s=1.0, peak_mib=9.0, wire_bytes=None, loss=5.5)
        for ms in (8.0, 10.0)
    )
    row = step_time.Row(
        candidate="zero3",
        rival="fsdp2",
        candidate_figures=ours,
        rival_figures=theirs,
        ratio=Estimate(0.8, 0.79, 0.81, 25),
        limit=None,
        steps=31,
        relative_difference=2e-7,
        share_of_unequal_elements=0.5,
        launches=[],
    )
    told = gpu_speed.step_detail({"rows": [asdict(row)]})
    assert told.startswith("zero3 / fsdp2: 0.800 [0.790, 0.810], 8.0 / 10.0 ms, 9 / 9 MiB")
    assert told.endswith("loss 5.5000 / 5.5000, weights 2.0e-07 apart")


def test_a_tuned_op_is_told_with_its_gain():
    found = []
    for tunable, score in zip(tunables.select((gpu_speed.TUNED_OP,))[:2], (0.9, 1.1), strict=True):
        slow = Trial(tunable.default, samples=[1.0], score=1.0)
        fast = Trial(LaunchConfig(1024, 2), samples=[score], score=score)
        chosen = fast if score < 1.0 else slow
        sweep = Sweep((slow, fast), chosen.config)
        found.append(tuned_files.entry_of(tunable, sweep, {}, numel=1 << 20))
    told = gpu_speed.tuned_detail({"entries": found})
    assert "1024 B 2 W, 10.0% faster than the default; " in told
    assert told.endswith("W, the default")
