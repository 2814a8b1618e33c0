"""Commands of `make gpu-check`: what hangs is ended, what it said is kept, time ends all."""

import sys
import time

import pytest

from sidestream.bench import gpu_steps
from sidestream.bench.gpu_steps import FILE, FOLDER, Budget, Result, Step, side_by_side

HANG = "import time; print('begun', flush=True); time.sleep(100)"


def _tell(outcomes):
    (outcome,) = outcomes
    return Result("ok", f"{outcome.code}, {outcome.whole_check}", {"outcome": outcome})


def _step(code, *arguments, limit_s=60.0, judge=_tell, **options):
    return Step("it", [[sys.executable, "-c", code, *arguments]], judge, limit_s, **options)


def _run(budget, *steps):
    told = []
    results = side_by_side(budget, steps, told.append)
    assert told == results
    return results


def test_a_command_is_heard_with_what_it_wrote():
    code = "import os, sys; open(sys.argv[1], 'w').write('found'); print(os.environ['A']); exit(3)"
    (result,) = _run(Budget(60), _step(code, FILE, variables={"A": "why"}))
    outcome = result.values["outcome"]
    assert (outcome.code, outcome.output, outcome.written) == (3, "why\n", "found")
    assert outcome.tail.startswith("exit 3: why\n")


def test_a_variable_may_name_a_place_in_the_folder():
    code = "import os, sys; assert os.environ['A'] == f'{os.path.dirname(sys.argv[1])}/b'"
    (result,) = _run(Budget(60), _step(code, FILE, variables={"A": f"{FOLDER}/b"}))
    assert result.values["outcome"].code == 0


@pytest.mark.parametrize(
    ("budget_s", "limit_s", "whole_check"),
    [pytest.param(60, 1.5, False, id="its-own"), pytest.param(1.5, 30, True, id="the-check's")],
)
def test_a_limit_ends_what_hangs(monkeypatch, budget_s, limit_s, whole_check):
    monkeypatch.setattr(gpu_steps, "LEAST_S", 0.1)
    (result,) = _run(Budget(budget_s), _step(HANG, limit_s=limit_s))
    outcome = result.values["outcome"]
    assert (outcome.code, outcome.whole_check) == (None, whole_check)
    assert outcome.seconds < 30


def test_a_machine_that_limits_are_not_made_for_is_given_more():
    (result,) = _run(Budget(1, patience=60.0), _step("import time; time.sleep(1)", limit_s=0.5))
    assert result.detail == "0, False"


def test_without_time_nothing_begins(tmp_path):
    place = tmp_path / "begun"
    (result,) = _run(Budget(1), _step("import sys; open(sys.argv[1], 'w')", str(place)))
    assert result.detail == "None, True"
    assert result.seconds == 0.0 and not place.exists()


def test_what_cannot_be_told_fails_alone():
    def broken(outcomes):
        raise KeyError("loss")

    results = _run(Budget(60), _step("", judge=broken), _step(""), Step("none", [], broken))
    assert [result.status for result in results] == ["failed", "ok", "failed"]
    assert results[0].detail.startswith("KeyError: 'loss'")


def test_an_interrupt_ends_what_runs_beside():
    def interrupted(outcomes):
        raise KeyboardInterrupt

    budget, began = Budget(60), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _run(budget, _step("", judge=interrupted), _step(HANG), _step(HANG))
    assert time.monotonic() - began < 30
    assert budget.left_s == 0.0
