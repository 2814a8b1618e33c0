"""What was measured is kept: under what it follows from, and never trusted when damaged."""

import json

import pytest

from sidestream.kernels.ahead import measure
from sidestream.kernels.cases import by_name, case_of
from sidestream.tests.kernels.compiling import compiled

TASK = ("cast_back_", "fp16 to bf16", "sm_90")
CASE = case_of(*TASK[:2])


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sidestream" / "measured"


@pytest.fixture
def compilations(monkeypatch):
    counted = []

    def counting(launch, target):
        counted.append(target)
        return compiled(*TASK[:2], target)

    monkeypatch.setattr(measure, "compile_launch", counting)
    return counted


def test_a_case_is_compiled_once_for_each_target(folder, compilations):
    first = measure.measure(CASE, "sm_90")
    assert measure.measure(CASE, "sm_90") == first
    seen = []
    assert measure.measure_all([TASK] * 2, 2, lambda task, _: seen.append(task)) == (first, first)
    assert seen == [TASK, TASK]
    assert compilations == ["sm_90"]
    measure.measure(CASE, "gfx942")
    assert compilations == ["sm_90", "gfx942"]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"registers": 3}', "\x00"], ids=repr)
def test_a_file_that_is_damaged_is_written_anew(folder, compilations, text):
    first = measure.measure(CASE, "sm_90")
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    file.write_text(text)
    assert measure.measure(CASE, "sm_90") == first
    assert json.loads(file.read_text()) == kept
    assert len(compilations) == 2


def test_a_number_that_is_text_is_measured_anew(folder, compilations):
    first = measure.measure(CASE, "sm_90")
    (file,) = folder.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"registers": "9"}))
    assert measure.measure(CASE, "sm_90") == first
    assert len(compilations) == 2


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path, compilations):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert measure.measure(CASE, "sm_90") == measure.measure(CASE, "sm_90")
    assert len(compilations) == 2


@pytest.mark.usefixtures("compilations")
def test_a_disk_that_is_full_leaves_no_part_behind(monkeypatch, folder):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measure.os, "replace", full)
    measure.measure(CASE, "sm_90")
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("folder", "compilations")
def test_many_tasks_make_the_cases_once(monkeypatch):
    made = []
    monkeypatch.setattr(measure, "by_name", lambda: made.append(by_name()) or made[0])
    measure.measure_all([TASK, (*TASK[:2], "sm_80")], 1, lambda *_: None)
    assert len(made) == 1


def test_errors_of_the_compiler_name_the_case(monkeypatch, folder):
    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(measure, "compile_launch", fail)
    with pytest.raises(RuntimeError) as raised:
        measure.measure(CASE, "sm_80")
    assert raised.value.__notes__ == ["while compiling cast_back fp16 to bf16 for sm_80"]
    assert not folder.exists()


@pytest.mark.usefixtures("folder", "compilations")
def test_processes_measure_what_is_left_in_the_order_of_the_tasks(monkeypatch):
    """Eight are left of nine, so that there are two processes, which are stood in for."""
    used = []

    class Pool:
        def __init__(self, size, mp_context):
            used.append((size, mp_context.get_start_method()))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return False

        def submit(self, function, task):
            future = measure.concurrent.futures.Future()
            future.set_result(function(task))
            return future

    monkeypatch.setattr(measure.concurrent.futures, "ProcessPoolExecutor", Pool)
    names = ("bf16", "fp16", "e4m3", "e5m2", "e2m1", "e8m0", "bf16", "fp16", "e4m3")
    tasks = [
        ("cast_back_", f"{name} to {'bf16' if at < 6 else 'fp32'}", "sm_90")
        for at, name in enumerate(names)
    ]
    kept = measure.measure(case_of(*tasks[2][:2]), "sm_90")
    seen = []
    found = measure.measure_all(tasks, 16, lambda task, one: seen.append((task, one)))
    assert used == [(2, "spawn")]
    assert found[2] == kept
    assert seen[0] == (tasks[2], kept)
    assert sorted(task for task, _ in seen) == sorted(tasks)
    assert [dict(seen)[task] for task in tasks] == list(found)
