"""The machine in one process: runs again, restarts, what it refuses, and what it never does."""

import contextlib
import itertools
import math
import random
import re
from typing import Any

import numpy
import pytest
import torch

from sidestream.tests.training.rerun.tiny import NUM_MICROBATCHES, Training, equal
from sidestream.training.rerun import (
    InjectedFault,
    RejectedResultError,
    RerunDataIterator,
    RerunErrorInjector,
    RerunStateMachine,
    VerdictKind,
    has_open_question,
)
from sidestream.training.rerun.validation import NONE, Validation, Validations, shown

FAULTS = {kind.value: InjectedFault(kind.value, 2, call=1, hardware="a") for kind in VerdictKind}


def trained(**options: Any) -> Training:
    training = Training(**options)
    training.train()
    return training


def test_without_a_rejection_each_step_runs_once_and_as_if_there_were_no_machine() -> None:
    training = trained()
    assert training.runs == [1, 2, 3, 4, 5]
    plain = Training(mode="disabled")
    plain.train()
    assert equal(training.params(), plain.params())


def test_after_a_transient_fault_that_is_not_fatal_the_bits_are_those_without_it() -> None:
    training = trained(fatal=False, injector=FAULTS["transient"])
    assert training.runs == [1, 2, 2, 3, 4, 5]
    assert equal(training.params(), trained().params())
    assert training.machine.verdict is not None
    assert training.machine.verdict.kind is VerdictKind.TRANSIENT


@pytest.mark.parametrize("with_rng", [True, False], ids=["with rng", "without rng"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_checkpoint_written_at_the_exit_goes_on(kind: str, with_rng: bool) -> None:
    """Megatron-LM#3884: a fatal transient fault, saved at the exit, did not resume."""
    first = trained(injector=FAULTS[kind], hardware="a")
    decision = first.machine.should_checkpoint_and_exit()
    assert decision == (True, True, 17 if kind == "transient" else 16)
    saved = first.saved()
    assert has_open_question(saved["rerun"]) == (kind != "transient")
    resumed = Training(hardware="b")
    resumed.load(saved, with_rng=with_rng)
    if kind == "transient":
        assert resumed.machine.verdict == first.machine.verdict
        assert resumed.train() == (False, False, 0)
        assert resumed.machine.verdict is not None and resumed.machine.step == 6
        assert not with_rng or equal(resumed.params(), trained().params())
        return
    # Whatever random numbers the process began with, the step has those of its first run.
    elsewhere = Training(hardware="b", injector=FAULTS[kind] if kind == "bug" else None)
    elsewhere.load(saved, with_rng=with_rng)
    assert elsewhere.train() == (True, True, 17)
    assert elsewhere.machine.verdict is not None
    assert elsewhere.machine.verdict.kind.value == kind
    judged = elsewhere.saved()
    again = Training(hardware="c")
    again.load(judged)
    assert again.train() == (False, False, 0) and again.machine.step == 6
    assert again.machine.verdict == elsewhere.machine.verdict
    assert equal(again.params(), trained().params())


def test_a_state_saved_while_the_step_runs_begins_it_anew() -> None:
    training, seen = Training(injector=FAULTS["bug"], hardware="a"), []
    original = training.machine.validate_result

    def saving(*arguments: Any, **options: Any) -> None:
        seen.append(training.saved())
        original(*arguments, **options)

    training.machine.validate_result = saving  # type: ignore[method-assign]
    training.train()
    assert len(seen) == 3 * NUM_MICROBATCHES
    for saved in seen:
        resumed = Training()
        resumed.load(saved)
        assert not has_open_question(saved["rerun"])
        resumed.train()
        assert resumed.machine.step == 6


def test_the_state_has_the_same_keys_whatever_has_happened() -> None:
    """Megatron-LM#4378: a plan of a checkpoint that is cached does not see that the state grows."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    states = [Training().machine.state_dict()]
    for kind in FAULTS:
        training = trained(injector=FAULTS[kind], hardware="a")
        states.append(training.machine.state_dict())
        training.machine.is_unexpectedly_large(1.0, 2, "loss")
        other = Training(hardware="b")
        other.machine.load_state_dict(training.machine.state_dict())
        states += [training.machine.state_dict(), other.machine.state_dict()]
    keys = [set(flatten_state_dict({"rerun": state})[0]) for state in states]
    assert all(one == keys[0] for one in keys) and len(keys[0]) == len(states[0])
    assert not any(isinstance(x, dict | list) for state in states for x in state.values())


DIFFERENT = {
    "program": ({"program": "another"}, {}, "program: expected 'another', got ''"),
    "world": ({}, {"world_size": 4}, "world_size: expected 1, got 4"),
    "rank": ({}, {"rank": 1}, "rank: expected 0, got 1"),
    "version": ({}, {"version": 0}, "version: expected 1, got 0"),
    "mode": ({"mode": "disabled"}, {}, "mode: expected 'disabled', got 'validate_results'"),
    "phase": ({}, {"phase": "rerun"}, "expected a phase of idle, suspended, got 'rerun'"),
}


@pytest.mark.parametrize("options, changes, message", DIFFERENT.values(), ids=DIFFERENT)
def test_a_state_of_another_run_is_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    state = trained(injector=FAULTS["bug"], hardware="a").machine.state_dict()
    machine = RerunStateMachine(hardware="b", **options)
    before = machine.state_dict()
    with pytest.raises(ValueError, match=re.escape(message)):
        machine.load_state_dict({**state, **changes})
    assert machine.state_dict() == before


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a state_dict"):
        RerunStateMachine().validate_state_dict({"phase": "idle"})
    with pytest.raises(ValueError, match="mode: expected one of disabled"):
        RerunStateMachine(mode="on")


def test_a_step_that_makes_other_validations_elsewhere_is_refused() -> None:
    saved = trained(injector=FAULTS["bug"], hardware="a").machine.state_dict()
    machine = RerunStateMachine(hardware="b")
    machine.load_state_dict(saved)
    assert machine.should_run_forward_backward()
    machine.validate_result(1.0, math.isnan, "norm")
    with pytest.raises(RuntimeError, match=r"rank 0: expected .*'loss'.*got .*'norm'"):
        machine.should_run_forward_backward()


def test_a_used_machine_takes_a_state_whole() -> None:
    state = trained(injector=FAULTS["bug"], hardware="a").machine.state_dict()
    fresh = RerunStateMachine(hardware="b")
    used = trained(hardware="b").machine
    assert used.should_run_forward_backward()
    for machine in (fresh, used):
        machine.load_state_dict(state)
    assert fresh.state_dict() == used.state_dict() == state


# ---- rewinding


def test_all_random_numbers_and_the_users_state_are_rewound() -> None:
    user, drawn = {"count": 0}, []
    machine = RerunStateMachine(
        state_save_func=lambda: dict(user),
        state_restore_func=lambda saved: user.update(saved),
        injector=InjectedFault("transient", 1),
    )
    while machine.should_run_forward_backward():
        user["count"] += 1
        drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item(), user["count"]))
        machine.validate_result(1.0, math.isnan, "one", fatal=False)
    assert len(drawn) == 2 and drawn[0] == drawn[1]


def test_iterators_give_a_step_twice_and_no_more() -> None:
    one, other = RerunDataIterator(range(10)), RerunDataIterator("abcdef")
    machine, given = RerunStateMachine(injector=InjectedFault("transient", 2)), []
    for _ in range(3):
        while machine.should_run_forward_backward([one, None, other]):
            given.append((next(one), next(one), next(other)))
            machine.validate_result(1.0, math.isnan, "one", fatal=False)
    assert given == [(0, 1, "a"), (2, 3, "b"), (2, 3, "b"), (4, 5, "c")]


def test_what_an_iterator_will_give_again_is_its_state() -> None:
    data = RerunDataIterator(range(4))
    next(data)
    data.advance()
    first = next(data), next(data)
    data.rewind()
    other = RerunDataIterator(range(3, 4))
    other.load_state_dict(data.state_dict())
    assert (*first, 3) == tuple(other) == tuple(data)
    with pytest.raises(ValueError, match="expected the result of state_dict"):
        other.load_state_dict({})


def test_what_cannot_be_rewound_is_refused() -> None:
    machine = RerunStateMachine(injector=InjectedFault("transient", 1))
    with pytest.raises(TypeError, match="wrap it: RerunDataIterator"):
        machine.should_run_forward_backward(iter([1]))  # type: ignore[arg-type]
    data = RerunDataIterator([{"tokens": (torch.zeros(2),)}])
    assert machine.should_run_forward_backward(data)
    next(data)["tokens"][0].add_(1)
    machine.validate_result(1.0, math.isnan, "one")
    with pytest.raises(RuntimeError, match="number 0 of this step changed in place"):
        machine.should_run_forward_backward(data)


# ---- validations

NAN, INF = math.nan, math.inf
COMPARED = {
    "equal": (1.0, 1.0, 0.0),
    "apart": (1.0, 3.0, 1.0),
    "nan twice": (NAN, NAN, 0.0),
    "nan once": (NAN, 1.0, INF),
    "inf twice": (INF, INF, 0.0),
    "both infinities": (INF, -INF, INF),
    "opposite": (1.0, -1.0, INF),
    "zeros": (0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("first, second, difference", COMPARED.values(), ids=COMPARED)
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_results_are_the_same_within_the_tolerance(
    kind: Any, first: float, second: float, difference: float
) -> None:
    tolerances = [0.0, 0.999, 1.0]
    for tolerance in tolerances:
        machine = RerunStateMachine()
        results = iter([first, second])
        while machine.should_run_forward_backward():
            machine.validate_result(kind(next(results)), lambda _: True, "one", tolerance=tolerance)
        is_same = machine.should_checkpoint_and_exit().code == 16
        assert is_same == (difference <= tolerance)


def test_the_users_comparison_decides() -> None:
    machine, results = RerunStateMachine(), iter([torch.ones(9), torch.zeros(9)])
    while machine.should_run_forward_backward():
        machine.validate_result(next(results), lambda x: x > -1, "nine", lambda a, b: 0.5, 0.5)
    assert machine.should_checkpoint_and_exit().code == 16


def test_a_second_fault_that_is_fatal_ends_a_run_that_would_go_on() -> None:
    machine, runs = RerunStateMachine(), iter([(NAN, 1.0), (1.0, NAN)])
    while machine.should_run_forward_backward():
        first, second = next(runs)
        machine.validate_result(first, math.isnan, "first", fatal=False)
        machine.validate_result(second, math.isnan, "second")
    assert machine.should_checkpoint_and_exit().code == 17
    assert machine.verdict is not None
    assert "rejected in that run: rank 0 on" in machine.verdict.line()
    assert "'second' got nan" in machine.verdict.line()


@pytest.mark.parametrize("mode", ["disabled", "report_determinism_stats"])
def test_other_modes_raise_what_is_fatal_and_pass_over_the_rest(mode: str) -> None:
    machine = RerunStateMachine(mode=mode)
    for fatal in (False, True):
        with (
            pytest.raises(RejectedResultError, match=r"step 2.*'loss' got nan")
            if fatal
            else NOTHING
        ):
            while machine.should_run_forward_backward():
                machine.validate_result(torch.tensor(NAN), torch.isnan, "loss", fatal=fatal)
            assert machine.should_checkpoint_and_exit() == (False, False, 0)


YES, NO = torch.tensor(True), torch.tensor(False)
FLAGS: dict[str, tuple[list[Any], list[int]]] = {
    "none": ([], [NONE, NONE]),
    "all accepted": ([(NO, True), (False, True)], [NONE, NONE]),
    "tensor": ([(NO, True), (YES, False), (YES, True)], [1, 2]),
    "number": ([(False, True), (True, False), (True, True), (True, True)], [1, 2]),
    "number first": ([(True, True), (YES, False)], [0, 0]),
    "tensor first": ([(YES, False), (True, True)], [0, 1]),
}
NOTHING: Any = contextlib.nullcontext()


def test_disabled_keeps_no_data() -> None:
    data, machine = RerunDataIterator(range(100)), RerunStateMachine(mode="disabled")
    for _ in range(10):
        while machine.should_run_forward_backward(data):
            next(data)
    assert len(data._kept) == 1


def test_determinism_is_reported() -> None:
    machine, noise = RerunStateMachine(mode="report_determinism_stats"), itertools.count(1)
    for _ in range(4):
        while machine.should_run_forward_backward():
            machine.validate_result(torch.rand(()), torch.isnan, "steady")
            machine.validate_result(float(next(noise)), math.isnan, "loose")
    steady, loose = machine.determinism["steady"], machine.determinism["loose"]
    assert (steady.count, steady.num_zero, loose.count, loose.num_zero) == (4, 4, 4, 0)
    assert loose.largest == pytest.approx(2 / 3)
    lines = machine.determinism_report().splitlines()
    assert lines[1] == "steady: 4 recorded, all 0" and lines[0].startswith("loose: 4 recorded, 100")


def test_what_is_unexpectedly_large() -> None:
    machine = RerunStateMachine()

    def is_large(result: Any, **options: Any) -> bool:
        return bool(machine.is_unexpectedly_large(result, 10, "loss", num_samples=3, **options))

    assert [is_large(x) for x in (1.0, torch.tensor(-2.0), NAN, 500.0, 20.0, -20.5, INF)] == [
        *(False, False, True, True, False, True, True)
    ]
    other = RerunStateMachine()
    other.load_state_dict(machine.state_dict())
    machine = other
    assert [is_large(20.0), is_large(21.0)] == [False, True]
    assert [is_large(500.0, resample=True), is_large(5000.0)] == [False, False]


def test_samples_of_a_run_again_count_once() -> None:
    training, counts = Training(injector=FAULTS["transient"], fatal=False), []
    for _ in range(3):
        training.machine.is_unexpectedly_large(1.0, 2, "outside")
        while training.machine.should_run_forward_backward():
            training.machine.is_unexpectedly_large(torch.rand(()), 2, "loss")
            training.machine.validate_result(1.0, math.isnan, "a", fatal=False)
            training.machine.validate_result(1.0, math.isnan, "b", fatal=False)
        counts.append(training.machine.state_dict()["samples"])
    assert [(name, n) for name, n, _ in counts[-1]] == [("outside", 3), ("loss", 3)]


def test_outside_of_the_loop_nothing_is_validated() -> None:
    machine = RerunStateMachine()
    machine.validate_result(NAN, math.isnan, "evaluation")
    assert machine.state_dict()["phase"] == "idle"


def test_what_cannot_be_compared_is_refused() -> None:
    machine = RerunStateMachine()
    machine.should_run_forward_backward()
    with pytest.raises(TypeError, match="expected a number or a tensor of real numbers, got a str"):
        machine.validate_result("loss", bool, "text")  # type: ignore[arg-type]


def test_no_validation_waits_for_a_device() -> None:
    """Tensors without values: who asked for one would fail."""
    machine, result = RerunStateMachine(injector=FAULTS["bug"]), torch.ones(2, device="meta")
    machine.should_run_forward_backward()
    machine.validate_result(result, torch.isnan, "loss")
    machine.validate_result(1.0, math.isnan, "number")
    machine.validate_result(
        result, lambda x: machine.is_unexpectedly_large(x, 2.0, "loss"), "loss", fatal=False
    )
    assert machine._run is not None
    assert machine._run.validations.firsts().is_meta


@pytest.mark.parametrize("flags, firsts", FLAGS.values(), ids=FLAGS)
def test_the_first_that_was_rejected(flags: list[Any], firsts: list[int]) -> None:
    validations = Validations()
    for rejected, fatal in flags:
        validations.calls.append(Validation(0.0, rejected, "x", max, 0.0, fatal, False))
    assert validations.firsts().tolist() == firsts


@pytest.mark.parametrize(
    "result, text",
    [
        (0.1, "0.1"),
        (torch.tensor(NAN), "nan"),
        (torch.tensor([1.0, -INF]), "[1, -inf]"),
        (torch.tensor([NAN, 1, -7, 2, 0]), "5 numbers, magnitudes up to 7, 1 not finite"),
    ],
    ids=["number", "tensor of one", "few", "many"],
)
def test_results_are_told_in_a_few_characters(result: Any, text: str) -> None:
    assert shown(result) == text


# ---- injectors


def test_random_faults_come_at_their_rate_and_again_as_their_kind_does() -> None:
    for kind, codes in {"transient": {0, 17}, "bug": {0, 16}}.items():
        found = []
        for seed in range(40):
            machine = RerunStateMachine(injector=RerunErrorInjector(4, kind, seed=seed))
            while machine.should_run_forward_backward():
                machine.validate_result(1.0, math.isnan, "one")
            found.append(machine.should_checkpoint_and_exit().code)
        assert set(found) == codes and 3 <= sum(map(bool, found)) <= 20


BAD = {
    "kind": (lambda: InjectedFault("cosmic", 1), "expected one of transient, persistent, bug"),
    "rate": (
        lambda: RerunErrorInjector(-1, "bug"),
        "rate: .* of at least 0, got -1",
    ),
}


@pytest.mark.parametrize("make, message", BAD.values(), ids=BAD)
def test_bad_faults_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
