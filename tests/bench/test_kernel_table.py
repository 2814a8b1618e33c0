"""The measurement of kernel cases: a red gate has no times, shares are of a copy timed in turn."""

from dataclasses import replace

import pytest
import torch

from sidestream.bench import clocks, kernel_table
from sidestream.bench.kernel_cases import candidates, parts
from sidestream.bench.kernel_cases.competitors import OURS
from sidestream.bench.kernel_cases.selection import Selection, select
from sidestream.bench.kernel_table import Pace, measure, report_of
from sidestream.bench.reports import EVENTS_METHOD, GRAPH_METHOD, format_table
from sidestream.training.errors import UsageError

CPU = torch.device("cpu")
TINY = Pace(passes=1, min_rounds=1, max_rounds=1, seconds=0.0, sample_s=0.0)
NUMEL = 20_000
SUM, CAST = "reduce bf16 to fp32 world 2", "cast e4m3 from bf16"


def _cases(*names):
    return [case for case in select(Selection()) if case.full_name in names]


class FakeClock:
    """Says that call number n takes (n + 1) ms, the copy being the first; by graphs, where it may.
    Tells the order.
    """

    cache_bytes = memory_bytes = 1 << 40

    def __init__(self):
        self.asked = []
        self.tell = lambda name: None
        self.runs = {}

    def tickers(self, runs, *, uncaptured):
        first = len(self.runs)
        self.runs |= {name: len(calls) for name, calls in runs.items()}
        return {
            name: clocks.Ticker(
                lambda name=name, index=index, calls=calls: self._sample(name, index, calls),
                EVENTS_METHOD if name in uncaptured else GRAPH_METHOD,
            )
            for index, (name, calls) in enumerate(runs.items(), first)
        }

    def _sample(self, name, index, calls):
        self.asked.append(name)
        self.tell(name)
        for call in calls:
            call()
        return (index + 1) / 1000

    def synchronize(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    made = FakeClock()
    monkeypatch.setattr(kernel_table, "clock_of", lambda device, sample_s=0.0: made)
    monkeypatch.setattr(clocks, "MAX_ROTATED", 3)
    return made


def test_rows_hold_times_rates_and_the_share_of_a_copy(clock):
    ours, rival = measure(_cases(SUM), [1 << 16], CPU, TINY).rows
    num_bytes = (1 << 15) * (2 * 2 + 4)
    assert (ours.case, ours.candidate, rival.candidate) == (SUM, OURS, "torch.sum")
    assert (ours.num_bytes, ours.world, ours.numel) == (num_bytes, 2, 1 << 16)
    assert ours.median_us == pytest.approx(2000.0)
    assert ours.gb_per_s == pytest.approx(num_bytes / 2e-3 / 1e9)
    assert ours.copy_gb_per_s == pytest.approx(num_bytes / 1e-3 / 1e9)
    assert ours.percent_of_copy == pytest.approx(50.0)
    assert rival.percent_of_copy == pytest.approx(100.0 / 3)
    assert (ours.target_percent, rival.target_percent) == (pytest.approx(90.0), None)
    assert (ours.method, ours.rotated, ours.cold) == (GRAPH_METHOD, 3, False)
    assert clock.runs == {"copy": 3, OURS: 3, "torch.sum": 3}


def test_what_no_graph_may_hold_is_beside_ours_and_a_copy_that_are_launched_too(clock):
    rows = {
        row.candidate: row
        for row in measure(_cases("unpack bf16 to bf16"), [NUMEL], CPU, TINY).rows
    }
    assert rows[OURS].percent_of_copy == pytest.approx(50.0)
    launched = [row for row in rows.values() if row.method == EVENTS_METHOD]
    assert {row.candidate for row in launched} == {"split_with_sizes", f"{OURS}, launched"}
    # The copy is timed again as call number 5, split_with_sizes is number 4.
    assert rows["split_with_sizes"].percent_of_copy == pytest.approx(100 * 5 / 4)
    assert rows[f"{OURS}, launched"].target is None


def test_the_share_is_of_the_fastest_copy(clock, monkeypatch):
    """The first of three is slow here."""

    def copies(num_bytes, device, count):
        return {name: [lambda: None] * count for name in ("Triton copy", "copy")}

    monkeypatch.setattr(kernel_table, "copies", copies)
    (ours, _) = measure(_cases(CAST), [NUMEL], CPU, TINY).rows
    assert (ours.baseline, ours.percent_of_copy) == ("Triton copy", pytest.approx(100 / 3))


def test_what_only_reads_is_beside_a_read(clock):
    cases = _cases("amax_nvfp4 of bf16", "l2_norm of bf16")
    assert {row.baseline for row in measure(cases, [NUMEL], CPU, TINY).rows} == {"read"}


@pytest.mark.parametrize(
    ("cache_bytes", "rotated", "cold"),
    [(60_000, 2, True), (2_400_000, 3, False), (160_000, 3, True)],
    ids=["fits twice", "too large", "fits not"],
)
def test_bytes_that_move_twice_count_once_in_the_rotation(cache_bytes, rotated, cold, clock):
    """80 kB and 5 kB of scales, of which 160 kB move."""
    clock.cache_bytes = cache_bytes
    (row,) = measure(_cases("update_fp8_scales max of 16"), [NUMEL], CPU, TINY).rows
    assert (row.num_bytes, row.rotated, row.cold) == (160_000, rotated, cold)


def test_candidates_take_turns_in_every_pass(clock):
    pace = Pace(passes=2, min_rounds=3, max_rounds=3, seconds=0.0)
    measured = measure(_cases(CAST), [NUMEL], CPU, pace)
    turn = ["copy", OURS, "Tensor.copy_"]
    assert clock.asked == [*turn, *turn[::-1], *turn] * 2
    assert {row.num_samples for row in measured.rows} == {6}


def test_passes_end_in_time(clock, monkeypatch):
    """Each takes ten seconds."""
    now = [0.0]

    def pass_time(name):
        now[0] += 10.0 if name == OURS else 0.0

    clock.tell = pass_time
    monkeypatch.setattr(kernel_table.time, "monotonic", lambda: now[0])
    for limit_s, num_passes in ((35.0, 3), (0.0, 1)):
        pace = replace(TINY, passes=9, limit_s=limit_s)
        (ours, _) = measure(_cases(CAST), [NUMEL], CPU, pace).rows
        assert ours.num_samples == num_passes


@pytest.mark.parametrize("numel", [NUMEL, 400_000], ids=["small", "large"])
def test_a_wrong_result_has_no_times_and_is_told(numel, clock, monkeypatch):
    """A small one as a whole, a large one in its tail."""
    (wrong, right) = _cases(SUM, CAST)
    monkeypatch.setattr(parts, "PART_NUMEL", 4096)

    def agrees(case, device, numel):
        return case.full_name != SUM

    if numel == NUMEL:
        monkeypatch.setattr(type(wrong), "agrees", agrees)

    def call(operands):
        wrong.call(operands)
        if len(operands.written[0]) > 140_000:
            operands.written[0][-1] += 1

    measured = measure([replace(wrong, call=call), right], [numel], CPU, replace(TINY, passes=2))
    assert {row.case for row in measured.rows} == {CAST}
    (fault,) = measured.wrong
    assert fault.startswith(f"{SUM}, {numel} elements: not the bits of its definition")
    assert fault.endswith("in the tail") or numel == NUMEL
    text = format_table(report_of(measured, CPU, TINY, "command"))
    assert f"WRONG, so not timed: {fault}" in text


@pytest.mark.parametrize(
    "name", [CAST, "hadamard16 of bf16", "l2_norm of bf16", "pack bf16 to fp32 accumulate"]
)
def test_timed_calls_that_go_wrong_are_found_by_what_they_leave(name, clock):
    """The first half of the calls is right: all before the clock starts, and some by the clock."""
    (case,) = _cases(name)
    num_calls = 0

    def call(operands, **options):
        nonlocal num_calls
        results = case.results(operands, **options)
        if operands.footprint_bytes > 600_000:
            num_calls += 1
            if num_calls > late:
                results[0].view(-1).view(torch.uint8)[0] ^= 1
        return tuple(results)

    late = 1 << 30
    measured = measure([replace(case, call=call)], [400_000], CPU, TINY)
    assert measured.wrong == () and measured.rows
    late, num_calls = num_calls // 2, 0
    measured = measure([replace(case, call=call)], [400_000], CPU, TINY)
    assert measured.rows == ()
    assert "not the bits of its definition in the" in measured.wrong[0]


@pytest.mark.parametrize("passes", [1, 2])
def test_ours_that_fails_before_it_is_timed_is_wrong_and_others_keep_their_rows(passes, clock):
    """In the last pass: what was measured of it before is no longer told."""
    failing, right = _cases(SUM, CAST)
    num_calls = 0

    def call(operands):
        nonlocal num_calls
        num_calls += 1
        if num_calls > fatal:
            raise RuntimeError("no such address")
        return failing.call(operands)

    cases, pace = [right, replace(failing, call=call)], replace(TINY, passes=passes)
    fatal = 1 << 30
    measure(cases, [NUMEL], CPU, pace)
    fatal, num_calls = num_calls - 4, 0  # but what a pass calls
    measured = measure(cases, [NUMEL], CPU, pace)
    assert {row.case for row in measured.rows} == {CAST}
    assert measured.wrong == (f"{SUM}, {NUMEL} elements: RuntimeError: no such address",)


def _raises(error):
    def bind(operands):
        raise error

    return bind


def test_a_kernel_that_cannot_run_is_as_wrong():
    (case,) = _cases(CAST)
    failing = replace(case, call=_raises(RuntimeError("no such instruction")))
    measured = measure([failing], [NUMEL], CPU, TINY)
    assert measured.rows == ()
    assert "RuntimeError: no such instruction" in measured.wrong[0]


def test_rivals_that_fail_are_left_out_and_told_and_missing_ones_once(monkeypatch):
    rivals = {"absent": _raises(ImportError("no x")), "broken": _raises(OSError("y\nz"))}
    monkeypatch.setattr(candidates, "rivals_of", lambda case: rivals)
    measured = measure(_cases(CAST, "cast e2m1 from bf16"), [NUMEL], CPU, replace(TINY, passes=2))
    assert [row.candidate for row in measured.rows] == [OURS, OURS]
    assert measured.notes == (
        "absent is left out: no x",
        "broken is left out of cast e4m3 from bf16: OSError: y",
        "broken is left out of cast e2m1 from bf16: OSError: y",
    )


@pytest.mark.parametrize("fits", [0, 4096], ids=["nor in the gate", "but in the gate"])
def test_what_does_not_fit_is_left_out_and_told(fits, monkeypatch):
    (case,) = _cases(CAST)

    def call(operands):
        if operands.read[0].numel() > fits:
            raise torch.OutOfMemoryError("full")
        case.call(operands)

    monkeypatch.setattr(kernel_table, "GATE_NUMEL", 4096)
    measured = measure([replace(case, call=call)], [NUMEL], CPU, TINY)
    assert (measured.rows, measured.wrong) == ((), ())
    assert "do not fit" in measured.notes[0]


def test_sizes_beyond_the_memory_are_refused_before():
    with pytest.raises(UsageError, match=r"--numel: expected sizes that fit into .* MiB"):
        kernel_table.require_memory(_cases(CAST), [1 << 40], CPU)
    kernel_table.require_memory(select(Selection()), [1 << 16], CPU)


def test_the_usual_size_is_halved_until_it_fits(clock):
    cases = _cases(CAST, "flat_adamw bf16 to bf16")
    assert kernel_table.default_numel(cases, CPU) == 1 << 20
    clock.memory_bytes = 28 * 3 * 5 * (1 << 20) // 2
    assert kernel_table.default_numel(cases, CPU) == 1 << 19


def test_sizes_that_are_one_for_a_case_are_measured_once_and_all_are_in_the_table(clock):
    """The matrix has the same rows for both, the optimizer's shard has not."""
    shard = "flat_adamw bf16 to bf16"
    measured = measure(_cases(CAST, shard), (1000, 1001), CPU, TINY)
    found = [(row.case, row.numel) for row in measured.rows if row.candidate == OURS]
    assert found == [(CAST, 999), (shard, 1000), (shard, 1001)]
    text = format_table(report_of(measured, CPU, TINY, "command"), 1000.0)
    assert all(row.case in text and row.candidate in text for row in measured.rows)
    assert f"too small to leave the cache between calls: {CAST}, {found[0][1]}" in text
    assert "% peak" in text and "the data sheet's 1000 GB/s" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [SUM, "quantize_nvfp4 from bf16"])
def test_compiled_pytorch_competes_where_it_is_asked_for(name):
    """Where there is no C++ compiler, a note says why it does not."""
    measured = measure(_cases(name), [NUMEL], CPU, replace(TINY, compiled=True))
    told = [row.candidate for row in measured.rows] + list(measured.notes)
    assert any("torch.compile" in one for one in told)
    assert not any("torch.compile is left out:" in one for one in told)
