"""Microbatches of a step, at sizes that divide and at others; Megatron's functions over them."""

import inspect
import logging

import pytest

from sidestream.training.schedules import BatchSchedule, MicrobatchCalculator, Microbatches
from sidestream.training.schedules import num_microbatches_calculator as megatron


def _calculator(schedule, micro_batch_size=2, data_parallel_size=4, **options):
    if isinstance(schedule, int):
        schedule = BatchSchedule.constant(schedule)
    return MicrobatchCalculator(
        schedule=schedule,
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
        **options,
    )


def test_batches_are_divided_over_ranks_and_microbatches():
    calculator = _calculator(BatchSchedule.parse("0:8 100:32"))
    assert calculator.at(0) == Microbatches(8, 8, 1)
    assert calculator.at(99) == Microbatches(8, 8, 1)
    assert calculator.at(100) == Microbatches(32, 32, 4)


@pytest.mark.parametrize(
    ("size", "micro", "ranks", "nearest"),
    [(10, 1, 4, "8 or 12"), (12, 5, 2, "10 or 20"), (3, 1, 4, "4")],
    ids=["ranks", "microbatch", "too small"],
)
def test_sizes_that_cannot_be_divided_are_told_with_the_nearest_that_can(
    size, micro, ranks, nearest
):
    with pytest.raises(ValueError, match=f"got {size}; take {nearest}"):
        _calculator(size, micro, ranks)


def test_sizes_are_rounded_down_if_asked_and_the_running_one_is_told():
    decreasing = {"decrease_batch_size_if_needed": True}
    assert _calculator(10, 1, 4, **decreasing).at(0) == Microbatches(10, 8, 2)
    ramp = BatchSchedule.ramp_up(6, 3, 60, final=12)
    calculator = _calculator(ramp, 1, 4, **decreasing)
    assert [calculator.at(consumed) for consumed in (0, 30, 60)] == [
        Microbatches(6, 4, 1),
        Microbatches(9, 8, 2),
        Microbatches(12, 12, 3),
    ]
    assert calculator.consumed_before(2) == 4
    with pytest.raises(ValueError, match=r"got 3; take 4$"):
        _calculator(3, 1, 4, **decreasing)


def test_a_size_is_no_schedule():
    with pytest.raises(
        TypeError, match=r"BatchSchedule .* got int .* BatchSchedule.constant\(64\)"
    ):
        MicrobatchCalculator(schedule=64, micro_batch_size=2, data_parallel_size=4)


def test_only_the_phase_that_runs_has_to_divide():
    calculator = _calculator(BatchSchedule.parse("0:4 40:8 80:16"))
    assert calculator.at(40).num_microbatches == 1
    with pytest.raises(ValueError, match=r"2 \* 4 = 8, got 4; take 8$"):
        calculator.at(0)


def test_the_last_window_has_what_is_left():
    calculator = _calculator(4, 1, 1, total_samples=10)
    windows = [calculator.at(consumed).num_microbatches for consumed in (0, 4, 8, 10, 12)]
    assert windows == [4, 4, 2, 0, 0]
    assert calculator.at(8) == Microbatches(4, 2, 2)
    assert [calculator.consumed_before(step) for step in (1, 3, 4, 9)] == [0, 8, 10, 10]


def test_samples_that_fill_no_microbatch_of_all_ranks_are_left_out():
    calculator = _calculator(16, 2, 2, total_samples=29)
    assert calculator.at(16) == Microbatches(16, 12, 3)
    assert calculator.at(28) == Microbatches(16, 0, 0)


@pytest.fixture
def global_calculator():
    megatron.destroy_num_microbatches_calculator()
    yield megatron
    megatron.destroy_num_microbatches_calculator()


def _all_of(functions):
    return (
        functions.get_num_microbatches(),
        functions.get_current_global_batch_size(),
        functions.get_current_running_global_batch_size(),
        functions.get_micro_batch_size(),
    )


def test_functions_have_the_parameters_of_megatron():
    expected = [
        "rank",
        "rampup_batch_size",
        "global_batch_size",
        "micro_batch_size",
        "data_parallel_size",
        "decrease_batch_size_if_needed",
        "step_batch_size_schedule",
        "seq_length",
    ]
    for function in (
        megatron.init_num_microbatches_calculator,
        megatron.reconfigure_num_microbatches_calculator,
    ):
        assert [*inspect.signature(function).parameters][:8] == expected


def test_a_calculator_can_be_made_destroyed_and_made_anew(global_calculator):
    functions = global_calculator
    functions.init_num_microbatches_calculator(0, None, 32, 2, 4)
    assert _all_of(functions) == (4, 32, 32, 2)
    with pytest.raises(RuntimeError, match="got a second one"):
        functions.init_num_microbatches_calculator(0, None, 64, 2, 4)
    assert _all_of(functions) == (4, 32, 32, 2)
    functions.destroy_num_microbatches_calculator()
    with pytest.raises(RuntimeError, match="expected a calculator, got none"):
        functions.get_num_microbatches()
    functions.init_num_microbatches_calculator(0, None, 10, 1, 4, True)
    assert _all_of(functions) == (2, 10, 8, 1)
    functions.unset_num_microbatches_calculator()
    functions.init_num_microbatches_calculator(0, [8, 8, 100], 32, 2, 4)
    functions.update_num_microbatches(100)
    assert _all_of(functions) == (4, 32, 32, 2)


def test_updates_follow_the_samples_and_are_refused_whole(global_calculator, caplog):
    functions = global_calculator
    functions.init_num_microbatches_calculator(
        0,
        micro_batch_size=2,
        data_parallel_size=4,
        step_batch_size_schedule="0:4 4K:8 8K:16",
        seq_length=100,
    )
    with pytest.raises(ValueError, match="got 4; take 8"):
        functions.get_num_microbatches()
    caplog.set_level(logging.INFO, "sidestream")
    functions.update_num_microbatches(40, verbose=True)
    assert _all_of(functions) == (1, 8, 8, 2)
    assert "global batch size: 8, until now 4" in caplog.text
    with pytest.raises(ValueError, match="got 4; take 8"):
        functions.update_num_microbatches(0)
    assert _all_of(functions) == (1, 8, 8, 2)
    functions.update_num_microbatches(0, consistency_check=False)
    assert functions.get_current_global_batch_size() == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"global_batch_size": None}, "global_batch_size: expected a whole number"),
        ({"micro_batch_size": 0}, "micro_batch_size: expected a whole number"),
        ({"rampup_batch_size": [8, 8]}, r"as rampup_batch_size, got \[8, 8\]"),
        ({"step_batch_size_schedule": "0:8 10:16"}, "step_batch_size_schedule alone"),
    ],
    ids=["no size", "no microbatch", "two numbers", "two schedules"],
)
def test_what_does_not_fit_leaves_the_calculator(global_calculator, options, text):
    functions = global_calculator
    sizes = {"global_batch_size": 32, "micro_batch_size": 2, "data_parallel_size": 4}
    functions.init_num_microbatches_calculator(0, **sizes)
    with pytest.raises((ValueError, TypeError), match=text):
        functions.reconfigure_num_microbatches_calculator(0, **sizes | options)
    assert _all_of(functions) == (4, 32, 32, 2)
