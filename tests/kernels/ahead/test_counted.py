"""What follows from the file of counts: limits elsewhere, and targets that pipes leave."""

import dataclasses
import json

import pytest

from sidestream.kernels.ahead import counted, measure
from sidestream.kernels.ahead.compile import TARGETS
from sidestream.kernels.ahead.machines import GPUS, predict
from sidestream.kernels.case import GATED_TARGET, Gate
from sidestream.kernels.cases import case_of, cases
from sidestream.tests.kernels.ahead.test_controls import MEASURED

CASE = case_of("cast_", "e4m3 from bf16")
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")
LOW_SHARE = 0.5


@pytest.fixture
def file(monkeypatch, tmp_path):
    """A file in the place of ours."""
    monkeypatch.setattr(counted, "FILE", tmp_path / "counted.json")
    counted.counts.cache_clear()
    yield counted.FILE
    counted.counts.cache_clear()


def test_the_file_is_of_all_cases_with_gates_or_standard_and_of_targets_that_there_are():
    names = {f"{case.op} {case.name}" for case in cases() if case.gate is not None or case.standard}
    assert set(counted.counts()) == set(counted.TARGETS) <= set(TARGETS)
    for rows in counted.counts().values():
        assert set(rows) == names
        assert all(0 < one.registers <= 255 for one in rows.values())


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([3.26, 1.0, 40], Gate(4.0, 64)),
        ([3.0, 1.0, 72], Gate(3.5, 80)),
        ([None, None, 70], Gate(None, 78)),
        ([3.0, 1.0, 250], Gate(3.5, 255)),
    ],
    ids=str,
)
def test_limits_elsewhere_are_a_little_more_than_was_counted(file, counts, expected):
    file.write_text(json.dumps({"sm_100": {"cast_ e4m3 from bf16": counts}}))
    assert counted.gate_of(CASE, "sm_100") == expected
    assert counted.gate_of(CASE, "sm_120") is None
    assert counted.gate_of(CASE, GATED_TARGET) is CASE.gate


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([3.0, 1.0, 40], 0.88),
        # While an H200 moves 3 bytes it issues 20.7 instructions.
        ([41.4, 1.0, 40], 0.85 / 2),
        ([21.0, 20.7, 40], 0.85 / 2),
        ([None, None, 40], 0.88),
    ],
    ids=["bytes", "instructions", "integers", "uncounted"],
)
def test_a_target_is_no_more_than_the_pipes_leave(file, counts, expected):
    file.write_text(json.dumps({"sm_90": {"cast_ e4m3 from bf16": counts}}))
    assert counted.target_share(CASE, H200) == pytest.approx(expected, rel=1e-2)
    low = dataclasses.replace(CASE, copy_share=LOW_SHARE)
    assert counted.target_share(low, H200) == pytest.approx(min(LOW_SHARE, expected), rel=1e-2)
    assert counted.target_share(dataclasses.replace(CASE, copy_share=None), H200) is None


def test_what_is_not_known_has_its_share(file):
    file.write_text("{}")
    assert counted.target_share(CASE, H200) == counted.target_share(CASE, None) == 0.88


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_has_targets_of_its_own_code_but_those_that_no_pipe_bounds(gpu):
    if gpu.target != "sm_89":
        assert counted.counts_of(CASE, gpu.target) is not None
        return
    for case in cases():
        if (found := counted.counts_of(case, "sm_80")) and found.instructions and case.copy_share:
            most = predict(gpu, case.moved_bytes, found.instructions, found.integers)
            assert most.target(case.copy_share) == case.copy_share


def test_writing_counts_every_case_and_keeps_other_targets(file, monkeypatch):
    seen = []

    def measure_all(tasks, *_):
        seen.extend(tasks)
        return (MEASURED,) * len(tasks)

    monkeypatch.setattr(measure, "measure_all", measure_all)
    file.write_text(json.dumps({"sm_80": {"kept": [1, 1, 1]}, "sm_90": {"old": [1, 1, 1]}}))
    counted.write(["sm_90"])
    tasks = [(case.op, case.name, "sm_90") for case in cases() if counted.is_counted(case)]
    assert seen == tasks
    found = json.loads(file.read_text())
    assert found["sm_80"] == {"kept": [1, 1, 1]}
    assert found["sm_90"] == {f"{op} {name}": [3.0, 1.0, 32] for op, name, _ in tasks}
