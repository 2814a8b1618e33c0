"""Batch sizes by consumed samples, the text that describes them, and what a step has consumed."""

import time

import pytest

from sidestream.training.schedules import BatchPhase, BatchSchedule
from sidestream.training.schedules.batch_schedule import read_batch_schedule


def _megatron_ramp(start, increment, ramp_samples, final, consumed):
    """Sizes as Megatron's ramp-up gives them, in exact arithmetic."""
    if consumed > ramp_samples:
        return final
    num_increments = (final - start) // increment
    return start + consumed * num_increments // ramp_samples * increment


@pytest.mark.parametrize(
    "ramp",
    [(16, 16, 1000, 64), (8, 4, 7, 32), (2, 1, 999, 8), (5, 5, 10, 5)],
    ids=["even", "steep", "uneven", "constant"],
)
def test_ramps_are_those_of_megatron(ramp):
    start, increment, samples, final = ramp
    schedule = BatchSchedule.ramp_up(start, increment, samples, final=final)
    for consumed in range(samples + 3):
        assert schedule.at(consumed) == _megatron_ramp(*ramp, consumed)


def test_a_ramp_without_samples_is_at_its_end():
    assert BatchSchedule.ramp_up(8, 8, 0, final=32) == BatchSchedule.constant(32)


@pytest.mark.parametrize(
    ("final", "text"),
    [(30, "got 30; take 24 or 32"), (4, "got 4; take 8")],
    ids=["between", "below"],
)
def test_a_final_size_that_no_increments_lead_to_is_refused(final, text):
    with pytest.raises(ValueError, match=text):
        BatchSchedule.ramp_up(8, 8, 100, final=final)


def test_texts_are_read_in_samples():
    schedule = BatchSchedule.parse(" 10M:128, 0:64\t1.5b:1k 2T:2048")
    assert schedule.phases == (
        BatchPhase(0, 64),
        BatchPhase(10_000_000, 128),
        BatchPhase(1_500_000_000, 1000),
        BatchPhase(2 * 10**12, 2048),
    )
    assert [schedule.at(consumed) for consumed in (0, 9_999_999, 10_000_000)] == [64, 64, 128]


def test_thresholds_of_tokens_are_rounded_down_to_samples():
    schedule = BatchSchedule.parse("0:4 1000:8", seq_length=512)
    assert schedule.phases == (BatchPhase(0, 4), BatchPhase(1, 8))


BAD_TEXTS = {
    "nothing": ("", 1, "THRESHOLD:SIZE", "the end"),
    "no colon": ("0:64 10M", 9, "':' and a batch size", "the end"),
    "no size": ("0:", 3, "a number such as", "the end"),
    "no threshold": (":64", 1, "a number such as", "':64'"),
    "a word": ("0:64 ten:128", 6, "a number such as", "'ten:128'"),
    "another suffix": ("0:64 10G:128", 8, "one of K, M, B and T", "'G:128'"),
    "two colons": ("0:64:2", 5, "one of K, M, B and T", "':2'"),
    "part of a sample": ("0:64 1.5:128", 6, "a whole number", "'1.5:128'"),
    "minus": ("0:64 -1:128", 6, "a number such as", "'-1:128'"),
    "no samples": ("0:64 10:0", 9, "a batch size of at least 1", "'0'"),
    "late start": ("5:64 10:128", 1, "a first threshold of 0", "'5:64'"),
    "twice": ("0:64 1K:8 1000:9", 11, "one threshold alone at sample 1000", "'1000:9'"),
}


@pytest.mark.parametrize(
    ("text", "character", "expected", "got"), BAD_TEXTS.values(), ids=BAD_TEXTS
)
def test_errors_say_at_which_character_and_what_was_expected(text, character, expected, got):
    with pytest.raises(ValueError, match=r"^expected ") as error:
        BatchSchedule.parse(text)
    assert str(error.value).startswith(f"expected {expected}")
    assert f" at character {character} of {text!r}, got {got}; " in str(error.value)


def test_options_name_a_constant_a_ramp_or_steps():
    assert read_batch_schedule(None, 64) == BatchSchedule.constant(64)
    assert read_batch_schedule("0:16 1K:32", 64) == BatchSchedule.parse("0:16 1K:32")
    ramp = BatchSchedule.ramp_up(16, 16, 1000, final=64)
    assert read_batch_schedule("16 16 1K", 64) == ramp
    assert read_batch_schedule("16,16,512K", 64, seq_length=512) == ramp
    with pytest.raises(ValueError, match="at character 3"):
        read_batch_schedule("16 16", 64)


@pytest.mark.parametrize(
    "phases",
    [(), (BatchPhase(1, 4),), (BatchPhase(0, 4), BatchPhase(0, 8))],
    ids=["none", "late", "twice"],
)
def test_phases_begin_at_0_and_are_in_order(phases):
    with pytest.raises(ValueError, match="first at sample 0"):
        BatchSchedule(phases)


@pytest.mark.parametrize("multiple_of", [1, 3], ids="multiple_of{}".format)
@pytest.mark.parametrize(
    "text", ["0:5", "0:4 10:7 11:9 40:3", "0:64 100:8 101:16"], ids=["one", "many", "falling"]
)
def test_what_steps_have_consumed_is_what_a_loop_finds(text, multiple_of):
    schedule = BatchSchedule.parse(text)
    consumed = 0
    for step in range(1, 60):
        assert schedule.consumed_before(step, multiple_of=multiple_of) == consumed
        consumed += schedule.at(consumed) // multiple_of * multiple_of


def test_phases_that_a_step_overruns_do_not_begin():
    schedule = BatchSchedule.parse("0:16 8:7 16:32 100:8")
    assert [*schedule.begun()] == [(1, 0, 16), (2, 16, 32), (5, 112, 8)]
    assert [*BatchSchedule.parse("0:16 32:9").begun(multiple_of=4)] == [(1, 0, 16), (3, 32, 8)]


@pytest.mark.parametrize("phases", [((0, 64),), (64,)], ids=["tuples", "sizes"])
def test_phases_are_batch_phases(phases):
    with pytest.raises(TypeError, match="expected BatchPhases"):
        BatchSchedule(phases)


def test_ten_million_steps_take_no_time():
    schedule = BatchSchedule.ramp_up(16, 16, 10**9, final=1024)
    start = time.perf_counter()
    consumed = schedule.consumed_before(10**7)
    assert time.perf_counter() - start < 0.1
    assert schedule.consumed_before(10**7 + 1) == consumed + 1024


def test_a_size_that_rounds_down_to_nothing_is_refused_where_it_is_reached():
    schedule = BatchSchedule.parse("0:8 16:2")
    assert schedule.consumed_before(3, multiple_of=4) == 16
    with pytest.raises(ValueError, match="at least 4, got 2 from sample 16"):
        schedule.consumed_before(4, multiple_of=4)
