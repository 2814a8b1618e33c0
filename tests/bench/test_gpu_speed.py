"""Times in `make gpu-check`: what comes first, what the time does not reach, what is told."""

from collections import Counter
from dataclasses import asdict

import pytest
import torch

from sidestream.bench import gpu_speed, kernel_table, step_time, tunables, tuned_files
from sidestream.bench.gpu_steps import Budget, Outcome
from sidestream.bench.kernel_cases.selection import Selection, select
from sidestream.bench.sweep import Sweep, Trial
from sidestream.bench.timing import Estimate
from sidestream.kernels import LaunchConfig

CPU = torch.device("cpu")


@pytest.fixture
def _few_cases(monkeypatch):
    some = Selection(ops=("pack", "reduce"))
    monkeypatch.setattr(gpu_speed, "select", lambda selection: select(some))
    monkeypatch.setattr(gpu_speed, "DRY_NUMEL", 20_000)


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
    cases = [case.name for case in gpu_speed.by_need(gpu_speed.select(Selection()))]
    late = cases[num:]
    told = f"no time left for {len(late)}: {', '.join(late)}"
    assert step.detail == f"{num} of {len(cases)} cases right and measured; {told}"
    assert step.values["not_reached"] == late
    assert [case.name for case in measured] == cases[:num]
    assert report.notes == (f"no time left for {', '.join(late)}",)


def test_a_case_of_every_op_comes_first():
    cases = select(Selection())
    order = gpu_speed.by_need(cases)
    assert Counter(case.name for case in order) == Counter(case.name for case in cases)
    ops = [case.op for case in order]
    num_ops = len({case.op for case in cases})
    assert len(set(ops[:num_ops])) == num_ops
    assert tuple(ops[: len(gpu_speed.FIRST_OPS)]) == gpu_speed.FIRST_OPS
    # The second turn likewise, of those that have a second case.
    assert ops[num_ops : num_ops + 3] == ["pack_", "reduce_", "flat_adamw_"]


@pytest.mark.usefixtures("_few_cases")
def test_kernels_are_reported_in_the_order_of_the_registry():
    _, report = gpu_speed.kernels(Budget(600), CPU, dry_run=True)
    rows = list(dict.fromkeys(row.case for row in report.rows))
    assert rows == [case.name for case in gpu_speed.select(Selection())]


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
        untimed = Trial(LaunchConfig(2048, 2))
        chosen = fast if score < 1.0 else slow
        sweep = Sweep((slow, fast, untimed), chosen.config)
        found.append(tuned_files.entry_of(tunable, sweep, {}, numel=1 << 20))
    told = gpu_speed.tuned_detail({"entries": found})
    timed = "2 of 3 candidates timed"
    assert f"1024 B 2 W, 10.0% faster than the default, {timed}; " in told
    assert told.endswith(f"W, the default, {timed}")


def test_one_process_compiles_what_is_tuned():
    given = []

    class Ended:
        def run(self, command, *, limit_s):
            given.extend(command)
            return Outcome(1, "", 1.0)

    gpu_speed.autotune(Ended(), dry_run=False)
    assert given[given.index("--jobs") + 1] == "1"
