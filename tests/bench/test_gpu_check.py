"""`make gpu-check` without a GPU: what passes its own gate is timed, what failed is told."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from sidestream.bench import gpu_check, gpu_commands, gpu_kernels, gpu_tests, kernel_table, reports
from sidestream.bench.gpu_steps import FILE, Budget, Result, Step, side_by_side
from sidestream.bench.kernel_cases.selection import Selection, select

CPU = torch.device("cpu")


def _step(name, status="ok", detail="", values=None):
    return Step(name, [], lambda _: Result(status, detail, values or {}))


@pytest.fixture
def _few_cases(monkeypatch):
    some = Selection(ops=("reduce", "unpack"))
    monkeypatch.setattr(gpu_kernels, "select", lambda _: select(some))
    monkeypatch.setattr(gpu_kernels, "DRY_NUMEL", 20_000)


class _Check:
    """The dry run; steps that are programs are stand-ins, in `steps` by their place."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.steps = {
            "beside": [_step("gpu tests"), _step("memcheck", "not run")],
            "timed": _step("gpu tests that take times"),
            "shared": _step("shared"),
            "symmetric": _step("symmetric"),
            "trainings": [_step("train 0"), _step("train 3"), _step("train group")],
            "commands": [_step("step time"), _step("autotune")],
        }
        monkeypatch.setenv("OUT", str(folder))
        monkeypatch.setattr(gpu_tests, "beside", lambda *, dry_run: self.steps["beside"])
        monkeypatch.setattr(gpu_tests, "timed", lambda: self.steps["timed"])
        monkeypatch.setattr(gpu_tests, "shared", lambda *, dry_run: self.steps["shared"])
        monkeypatch.setattr(gpu_tests, "symmetric", lambda *, dry_run: self.steps["symmetric"])
        monkeypatch.setattr(gpu_commands, "trainings", lambda *, dry_run: self.steps["trainings"])
        monkeypatch.setattr(gpu_commands, "timed", lambda *, dry_run: self.steps["commands"])

    def run(self):
        """The exit code; the steps of the report by name, the report, and that of the kernels."""
        code = gpu_check.main(["--dry-run"])
        report, kernels = sorted(
            (self.folder / gpu_check.DRY_FOLDER).iterdir(), key=lambda file: len(file.name)
        )
        found = json.loads(report.read_text())
        steps = {step["name"]: step for step in found["steps"]}
        return code, steps, found, reports.read_report(kernels)


@pytest.fixture
def check(tmp_path, monkeypatch, _few_cases):
    return _Check(tmp_path, monkeypatch)


def test_a_dry_run_is_labelled_and_told_as_it_goes(check, capsys):
    code, steps, report, kernels = check.run()
    assert (code, report["ok"], report["label"]) == (0, True, gpu_check.DRY_LABEL)
    ours = [row.case for row in kernels.rows if row.candidate == "sidestream"]
    cases = gpu_kernels.select(Selection())
    assert ours == [case.full_name for case in cases]
    assert kernels.wrong == ()
    assert steps["kernels"]["values"]["pack_host_us"] > 0.0
    assert list(steps)[:3] == ["gpu tests", "memcheck", "gpu tests that take times"]
    compared = "ZeRO-0 and ZeRO-3 agree, one rank and a group of one agree"
    assert f"3 steps not run: memcheck, {compared}" in report["verdict"]
    printed = capsys.readouterr().out
    places = [printed.index(text) for text in ("gpu tests ", f"  {ours[0]}: ", "\nstep time")]
    assert places == sorted(places)
    assert "not a measurement" in printed and f"written to {check.folder}" in printed


FAILING = "def test_planted():\n    assert 1 + 1 == 3\n"


def test_a_failing_test_marks_the_report_and_hides_no_time(check, capsys):
    planted = check.folder / "test_planted.py"
    planted.write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml", FILE]
    command += ["--rootdir", str(check.folder), str(planted)]
    check.steps["beside"][0] = Step("gpu tests", [command], gpu_tests.judge, 60.0)
    code, steps, report, kernels = check.run()
    assert (code, report["ok"]) == (1, False)
    assert report["verdict"].startswith("FAILED: gpu tests; ")
    timed = {row.case for row in kernels.rows}
    assert timed == {case.full_name for case in gpu_kernels.select(Selection())}
    assert any(note.endswith("this failed: gpu tests") for note in kernels.notes)
    done = ("kernels", "gpu tests that take times", "step time", "autotune")
    assert all(steps[name]["status"] == "ok" for name in done)
    printed = capsys.readouterr().out
    assert "FAILED, gpu tests: test_planted::test_planted: assert (1 + 1) == 3" in printed
    assert "this failed: gpu tests\n" in printed


def test_a_kernel_that_raises_costs_no_other_its_times(check, monkeypatch, capsys):
    wrong = gpu_kernels.select(Selection())[1]
    monkeypatch.setattr(kernel_table, "measure", _raising_for(wrong.full_name))
    code, steps, _, kernels = check.run()
    assert code == 1
    timed = {row.case for row in kernels.rows}
    others = {case.full_name for case in gpu_kernels.select(Selection())} - {wrong.full_name}
    assert timed == others
    (fault,) = kernels.wrong
    assert fault.startswith(f"{wrong.full_name}, ") and fault.endswith("too many programs")
    assert fault in steps["kernels"]["detail"]
    assert f"FAILED, kernels: wrong results: {fault}" in capsys.readouterr().out


def _raising_for(name):
    measure = kernel_table.measure

    def raising(cases, *rest):
        if cases[0].full_name == name:
            raise RuntimeError("too many programs")
        return measure(cases, *rest)

    return raising


def test_what_cannot_be_told_fails_the_check_and_hides_no_other(check):
    def broken(_):
        raise OSError("no such program")

    check.steps["commands"][0] = Step("step time", [], broken)
    code, steps, _, _ = check.run()
    assert (code, steps["step time"]["status"]) == (1, "failed")
    assert steps["step time"]["detail"].startswith("OSError: no such program")
    assert steps["autotune"]["status"] == "ok"


def test_two_checks_of_a_day_stand_beside_each_other(check):
    for _ in range(2):
        gpu_check.main(["--dry-run"])
    names = {file.name for file in (check.folder / gpu_check.DRY_FOLDER).iterdir()}
    day = min(names, key=len).removesuffix(".json")
    assert names == {f"{stem}{end}.json" for stem in (day, f"{day}-2") for end in ("", "-kernels")}


def test_kernels_that_time_does_not_reach_are_named(check, monkeypatch, capsys):
    monkeypatch.setattr(gpu_kernels, "LIMIT_S", 1e-9)
    _, steps, _, kernels = check.run()
    cases = [case.full_name for case in gpu_kernels.by_need(gpu_kernels.select(Selection()))]
    told = f"no time left for {len(cases)}: {', '.join(cases)}"
    assert steps["kernels"]["detail"].endswith(told)
    assert steps["kernels"]["values"]["not_reached"] == cases
    assert kernels.notes[0] == f"no time left for {', '.join(cases)}"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ({"a": "ok", "b": "not run", "c": "not run"}, "all right, but 2 steps not run: b, c"),
        ({"a": "failed", "b": "ok", "c": "failed"}, "FAILED: a, c"),
        ({"a": "failed", "b": "not run"}, "FAILED: a; 1 step not run: b"),
    ],
    ids=["not-run", "failed", "both"],
)
def test_verdicts(ends, verdict):
    results = [Result(status, "", name=name) for name, status in ends.items()]
    assert gpu_check.verdict(results) == verdict


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_says_so(capsys):
    assert gpu_check.main([]) == gpu_check.EXIT_USAGE
    assert "expected a GPU that torch sees, got none" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUT", str(tmp_path / "file"))
    assert gpu_check.main(["--dry-run"]) == gpu_check.EXIT_USAGE
    told = capsys.readouterr()
    assert "OUT" in told.err and told.out == ""


def test_results_are_named_as_the_tables_of_the_gpu_are(monkeypatch):
    monkeypatch.setenv("OUT", "/results")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = gpu_check.results_folder(torch.device("cuda", 0))
    assert found == Path("/results/nvidia_h200")
    assert gpu_check.results_folder(CPU) == Path("/results", gpu_check.DRY_FOLDER)


def test_a_case_of_every_op_comes_first():
    cases = select(Selection())
    order = gpu_kernels.by_need(cases)
    assert sorted(map(id, order)) == sorted(map(id, cases))
    ops = [case.op for case in order]
    count = len(set(ops))
    assert len(set(ops[:count])) == count
    assert tuple(ops[: len(gpu_kernels.FIRST_OPS)]) == gpu_kernels.FIRST_OPS


# ---- trainings


@pytest.mark.parametrize(
    ("last", "status"), [(2.0, "ok"), (6.0, "failed"), (math.nan, "failed")], ids=str
)
def test_a_loss_that_does_not_fall_fails(last, status):
    (step, *_) = gpu_commands.trainings(dry_run=True)
    written = {"loss_first": 5.5, "loss_last": last, "peak_mib": 80.0, "reserved_mib": None}
    outcome = gpu_commands.Outcome(0, "", 1.0, json.dumps(written))
    assert step.judge([outcome]).status == status


def test_what_the_allocator_reserved_stands_beside_the_peak():
    (step, *_) = gpu_commands.trainings(dry_run=True)
    written = {"loss_first": 5.5, "loss_last": 2.0, "peak_mib": 80.0, "reserved_mib": 96.0}
    told = step.judge([gpu_commands.Outcome(0, "", 1.0, json.dumps(written))])
    assert told.detail == "loss 5.500 -> 2.000; peak 80 MiB, 96 reserved"


def test_levels_that_lead_elsewhere_fail():
    def trained(loss, sha256):
        return Result("ok", "", {"loss_last": loss, "params_sha256": sha256})

    agree = gpu_commands.same_training
    assert agree(trained(2.0, "a"), trained(2.001, "b")).detail.endswith("same bits: no")
    assert agree(trained(2.0, "a"), trained(2.001, "b")).status == "ok"
    assert agree(trained(2.0, "a"), trained(2.2, "b")).status == "failed"
    assert agree(trained(2.0, "a"), Result("failed", "")).status == "not run"


@pytest.mark.slow
def test_a_rank_over_a_group_of_one_trains_as_alone():
    """The trainings themselves, tiny on a CPU."""
    _, alone, group, *_ = gpu_commands.trainings(dry_run=True)
    results = side_by_side(Budget(110), [alone, group], lambda _: None)
    assert [result.status for result in results] == ["ok", "ok"], results
    assert gpu_commands.same_training(*results).values == {"same_bits": True}


def test_a_command_is_told_in_its_own_words():
    step, tuned = gpu_commands.timed(dry_run=True)
    output = "zero3 against fsdp2\nzero3    fsdp2   1.0 / 2.0   0.5 [0.4, 0.6]  equal bits\n"
    told = step.judge([gpu_commands.Outcome(0, output, 1.0, "{}")])
    assert told.detail == "zero3 fsdp2 1.0 / 2.0 0.5 [0.4, 0.6] equal bits"
    assert tuned.judge([gpu_commands.Outcome(2, "no such op", 1.0)]).status == "failed"
