"""The measurement of kernel cases: a red gate has no times, shares are of a copy timed in turn."""

from dataclasses import replace

import pytest
import torch

from sidestream.bench import clocks, kernel_table
from sidestream.bench.kernel_cases import many_tensors
from sidestream.bench.kernel_cases.case import OURS
from sidestream.bench.kernel_cases.selection import Selection, select
from sidestream.bench.kernel_table import Pace, measure, report_of
from sidestream.bench.reports import format_table
from sidestream.training.errors import UsageError

CPU = torch.device("cpu")
TINY = Pace(passes=1, min_rounds=1, max_rounds=1, seconds=0.0, sample_s=0.0)
NUMEL = 20_000


def _cases(*names):
    return [case for case in select(Selection()) if case.name in names]


class FakeClock:
    """Says that candidate number n takes (n + 1) ms, the copy being the first; tells the order."""

    cache_bytes = memory_bytes = 1 << 40

    def __init__(self):
        self.asked = []
        self.runs = []

    def tickers(self, runs, *, uncaptured):
        self.uncaptured = uncaptured
        self.runs.append({name: len(calls) for name, calls in runs.items()})
        return {
            name: clocks.Ticker(lambda name=name, index=index: self._sample(name, index), "fake")
            for index, name in enumerate(runs)
        }

    def _sample(self, name, index):
        self.asked.append(name)
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
    measured = measure(_cases("reduce world 2 bf16 -> fp32"), [1 << 16], CPU, TINY)
    ours, rival = measured.rows
    num_bytes = (1 << 15) * (2 * 2 + 4)
    assert (ours.candidate, rival.candidate) == (OURS, "torch.sum")
    assert (ours.num_bytes, ours.world, ours.numel) == (num_bytes, 2, 1 << 16)
    assert ours.median_us == pytest.approx(2000.0)
    assert ours.gb_per_s == pytest.approx(num_bytes / 2e-3 / 1e9)
    assert ours.copy_gb_per_s == pytest.approx(num_bytes / 1e-3 / 1e9)
    assert ours.percent_of_copy == pytest.approx(50.0)
    assert rival.percent_of_copy == pytest.approx(100.0 / 3)
    assert (ours.target_percent, rival.target_percent) == (pytest.approx(90.0), None)
    assert (ours.method, ours.rotated, ours.cold) == ("fake", 3, False)
    assert clock.runs == [{"copy": 3, OURS: 3, "torch.sum": 3}]
    assert clock.uncaptured == frozenset()


@pytest.mark.parametrize(
    ("cache_bytes", "rotated", "cold"),
    [(60_000, 2, True), (2_400_000, 3, False), (160_000, 3, True)],
    ids=["fits twice", "too large", "fits not"],
)
def test_bytes_that_move_twice_count_once_in_the_rotation(cache_bytes, rotated, cold, clock):
    """80 kB and 5 kB of scales, of which 160 kB move."""
    clock.cache_bytes = cache_bytes
    (row,) = measure(_cases("update_fp8_scales of 16"), [NUMEL], CPU, TINY).rows
    assert (row.num_bytes, row.rotated, row.cold) == (160_000, rotated, cold)


def test_what_must_not_be_captured_is_told_to_the_clock(clock):
    measure(_cases("unpack bf16 -> bf16"), [NUMEL], CPU, TINY)
    assert "split_with_sizes" in clock.uncaptured


def test_the_copy_moves_the_bytes_of_the_case(monkeypatch):
    seen = []
    real = torch.Tensor.copy_

    def copy_(target, source):
        seen.append(target.nbytes + source.nbytes)
        return real(target, source)

    calls = kernel_table._copies(6144, CPU, 2)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    for call in calls:
        call()
    assert seen == [6144, 6144]


def test_candidates_take_turns_in_every_pass(clock):
    pace = Pace(passes=2, min_rounds=3, max_rounds=3, seconds=0.0)
    measured = measure(_cases("cast bf16 -> e4m3"), [NUMEL], CPU, pace)
    turn = ["copy", OURS, "Tensor.copy_"]
    assert clock.asked == [*turn, *turn[::-1], *turn] * 2
    assert {row.num_samples for row in measured.rows} == {6}


def test_passes_end_in_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(kernel_table.time, "monotonic", lambda: now[0])
    passes = []
    for number in kernel_table._passes(replace(TINY, passes=9, limit_s=35.0)):
        passes.append(number)
        now[0] += 10.0
    assert passes == [1, 2, 3]
    assert list(kernel_table._passes(replace(TINY, passes=2, limit_s=0.0))) == [1, 2]


def test_a_wrong_result_has_no_times_and_is_told(monkeypatch):
    monkeypatch.setattr(many_tensors, "reduce_", lambda out, parts, **options: out.fill_(1.0))
    cases = _cases("reduce world 2 bf16 -> fp32", "pack bf16 -> bf16")
    measured = measure(cases, [NUMEL], CPU, TINY)
    assert {row.case for row in measured.rows} == {"pack bf16 -> bf16"}
    (fault,) = measured.wrong
    assert fault.startswith("reduce world 2 bf16 -> fp32, 20000 elements: not the bits")
    text = format_table(report_of(measured, CPU, TINY, "command"))
    assert f"WRONG, so not timed: {fault}" in text


def test_a_kernel_that_cannot_run_is_as_wrong(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(many_tensors, "unpack_", fail)
    measured = measure(_cases("unpack bf16 -> bf16"), [NUMEL], CPU, TINY)
    assert measured.rows == ()
    assert "RuntimeError: no such instruction" in measured.wrong[0]


def _raises(error):
    def bind(operands):
        raise error

    return bind


def test_rivals_that_fail_are_left_out_and_told_and_missing_ones_once():
    rivals = {"absent": _raises(ImportError("no x")), "broken": _raises(OSError("y\nz"))}
    cases = [
        replace(case, rivals=rivals) for case in _cases("cast bf16 -> e4m3", "cast bf16 -> e2m1")
    ]
    measured = measure(cases, [NUMEL], CPU, replace(TINY, passes=2))
    assert [row.candidate for row in measured.rows] == [OURS, OURS]
    assert measured.notes == (
        "absent is left out: no x",
        "broken is left out of cast bf16 -> e4m3: OSError: y",
        "broken is left out of cast bf16 -> e2m1: OSError: y",
    )


@pytest.mark.parametrize("fits", [0, 4096], ids=["nor in the gate", "but in the gate"])
def test_what_does_not_fit_is_left_out_and_told(fits, monkeypatch):
    (case,) = _cases("cast bf16 -> e4m3")

    def ours(operands):
        if operands.read[0].numel() > fits:
            raise torch.OutOfMemoryError("full")
        return case.ours(operands)

    monkeypatch.setattr(kernel_table, "GATE_NUMEL", 4096)
    measured = measure([replace(case, ours=ours)], [NUMEL], CPU, TINY)
    assert measured.rows == ()
    assert measured.wrong == ()
    assert "do not fit" in measured.notes[0]


def test_sizes_beyond_the_memory_are_refused_before():
    with pytest.raises(UsageError, match=r"--numel: expected sizes that fit into .* MiB"):
        kernel_table.require_memory(_cases("cast bf16 -> e4m3"), [1 << 40], CPU)
    kernel_table.require_memory(select(Selection()), [1 << 16], CPU)


def test_the_usual_size_is_halved_until_it_fits(clock):
    cases = _cases("cast bf16 -> e4m3", "adamw bf16 -> bf16")
    assert kernel_table.default_numel(cases, CPU) == 1 << 20
    clock.memory_bytes = 28 * 3 * 5 * (1 << 20) // 2
    assert kernel_table.default_numel(cases, CPU) == 1 << 19


def test_every_size_has_its_rows_and_the_table_names_all(clock):
    cases = _cases("cast bf16 -> e4m3", "hadamard16 bf16")
    told = []
    measured = measure(cases, [8192, 16384], CPU, TINY, told.append)
    assert {(row.case, row.numel) for row in measured.rows} == {
        (case.name, numel) for case in cases for numel in (8192, 16384)
    }
    assert any(case.name in text for text in told for case in cases)
    text = format_table(report_of(measured, CPU, TINY, "command"))
    for row in measured.rows:
        assert row.case in text
        assert row.candidate in text
    assert "too small to leave the cache between calls: cast bf16 -> e4m3, 8192" in text


@pytest.mark.parametrize("numels", [(1000, 2000), (600_000, 700_000)], ids=str)
def test_sizes_that_are_one_for_a_case_are_measured_once(numels, clock):
    """The matrix has the same rows for both, the optimizer's shard has not."""
    cases = _cases("cast bf16 -> e4m3", "adamw bf16 -> bf16")
    rows = measure(cases, numels, CPU, TINY).rows
    sizes = {case.name: [case.numel(numel) for numel in numels] for case in cases}
    found = [(row.case, row.numel) for row in rows if row.candidate == OURS]
    assert found == [(name, numel) for name in sizes for numel in dict.fromkeys(sizes[name])]
    assert len(found) == 3


def test_spread_is_of_the_samples():
    assert kernel_table.spread(range(1, 12)) == (6, 2, 10)
    assert kernel_table.spread(range(6)) == (2.5, 0, 5)
    assert kernel_table.spread([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["reduce world 2 bf16 -> fp32", "quantize_mx e2m1 bf16", "quantize_nvfp4 bf16"]
)
def test_compiled_pytorch_competes_where_it_is_asked_for(name):
    """Where there is no C++ compiler, a note says why it does not."""
    measured = measure(_cases(name), [NUMEL], CPU, replace(TINY, compiled=True))
    told = [row.candidate for row in measured.rows] + list(measured.notes)
    assert any("torch.compile" in one for one in told)
    assert not any("torch.compile is left out:" in one for one in told)
