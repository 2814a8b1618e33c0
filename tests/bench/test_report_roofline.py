"""The roofline: which compiled case a measured one is, which GPU, roofs, points, labels."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream.bench.ahead.machines import GPUS, gpus_of
from sidestream.bench.kernel_cases.case import OURS
from sidestream.bench.kernel_cases.selection import all_cases
from sidestream.bench.report.matches import name_ahead
from sidestream.bench.report.roofline import gpu_of, roofline_of, spread_out, subject_of
from sidestream.bench.report.series import size_text
from sidestream.kernels import ahead
from sidestream.tests.bench.report_samples import SIZES, compiled, cpu_report, report_of, row_of

H100, H200 = gpus_of("sm_90")
AHEAD = {(case.op, case.name): case for case in ahead.cases()}
NUMEL = 1 << 22
# Where one call is several kernels, or the code of other options.
UNMATCHED = {
    "quantize_fp8 tensor bf16",
    "update_fp8_scales of 16",
    "reduce world 2 bf16 -> fp32",
    "reduce world 8 bf16 -> fp32",
    "pack bf16 -> fp32",
    "pack fp32 -> bf16",
    "cast fp32 -> bf16 SR",
    "adamw fp32 -> none",
}


def _matched():
    """Every case of the benchmark, with a row of it."""
    for case in all_cases():
        yield case, row_of(case, NUMEL)


def test_a_match_moves_the_same_bytes():
    found = 0
    for case, row in _matched():
        there = AHEAD.get((row.op, name_ahead(row)))
        if there is not None:
            results = row.numel / (row.world or 1)
            assert row.num_bytes / results == pytest.approx(there.moved_bytes, rel=0.01), case.name
            found += 1
    assert found > 60


def test_most_standard_cases_match_and_no_two_the_same():
    standard = [(case, row) for case, row in _matched() if case.standard]
    names = [(row.op, name_ahead(row)) for _, row in standard]
    matched = [name for name in names if name in AHEAD]
    assert len(set(matched)) == len(matched)
    left = {
        case.name for (case, row), name in zip(standard, names, strict=True) if name not in AHEAD
    }
    assert left == UNMATCHED


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("", None),
        *((f"NVIDIA {gpu.name}", gpu.name) for gpu in GPUS),
    ],
)
def test_only_a_known_gpu_is_known(device, name):
    found = gpu_of(device)
    assert (found and found.name) == name


def test_a_gpu_s_report_is_of_that_gpu_and_a_cpu_s_of_a_predicted_one():
    assert subject_of(report_of("hadamard16")) == H200
    assert subject_of(report_of("hadamard16", device="a GPU")) is None
    assert subject_of(cpu_report("hadamard16")) == H100


def test_points_are_below_both_roofs_and_hold_what_was_measured():
    report = report_of("quantize_nvfp4", "hadamard16")
    found = roofline_of(report, H200, compiled("quantize_nvfp4_", "hadamard16_"))
    assert not found.is_prediction
    assert found.copy_gb_s == max(row.copy_gb_per_s for row in report.rows if row.cold)
    assert found.issue_gb_s(found.ridge) == pytest.approx(found.copy_gb_s)
    # 4 warps of 32 threads a cycle.
    assert found.issue_gb_s(10.0) == pytest.approx(4 * 32 * 132 * 1.755 / 10)
    points = {(point.op, point.case): point for point in found.points}
    nearest = points["quantize_nvfp4_", "nearest"]
    assert nearest.per_byte == pytest.approx(22.5 / (2 + 0.5 + 1 / 16))
    assert (nearest.bound, nearest.roof_gb_s < found.copy_gb_s) == ("instructions", True)
    assert points["hadamard16_", "forward bf16"].bound == "bytes"
    assert points["hadamard16_", "forward bf16"].roof_gb_s == found.copy_gb_s
    measured = {key: point.measured for key, point in points.items()}
    assert measured["quantize_nvfp4_", "nearest"].case == "quantize_nvfp4 bf16"
    assert measured["quantize_nvfp4_", "hadamard"].case == "quantize_nvfp4 bf16 hadamard"
    assert measured["quantize_nvfp4_", "swizzled"] is None
    assert measured["hadamard16_", "inverse fp32"] is None
    assert {row.numel for row in measured.values() if row} == {max(SIZES)}
    assert {row.candidate for row in measured.values() if row} == {OURS}


def test_a_cpu_s_report_has_predicted_points_alone():
    found = roofline_of(cpu_report("hadamard16"), H100, compiled("hadamard16_"))
    assert found.is_prediction
    assert found.copy_gb_s == H100.copy_gb_s
    assert [point.measured for point in found.points] == [None, None]
    assert found.unmatched == ()


def test_the_copy_s_roof_is_out_of_memory_where_any_was():
    first, *others = report_of("hadamard16").rows
    cached = replace(first, copy_gb_per_s=1e6, cold=False)
    report = report_of("hadamard16", rows=(cached, *others))
    assert roofline_of(report, H200, ()).copy_gb_s < 1e4
    warm = report_of("hadamard16", rows=(cached, replace(cached, copy_gb_per_s=9e5)))
    assert roofline_of(warm, H200, ()).copy_gb_s == 1e6


def test_what_cannot_be_drawn_is_named():
    found = roofline_of(report_of("update_fp8_scales"), H200, compiled("update_fp8_scales_"))
    assert found.points == ()
    assert found.uncounted == ("update_fp8_scales_ max",)
    assert found.unmatched == ("update_fp8_scales of 16",)


def test_families_are_the_registry_s_in_order():
    found = roofline_of(report_of(), H200, compiled()).families()
    assert list(found) == ["Many tensors at once", "Casts", "Block formats", "Wire messages",
                           "Optimizers"]  # fmt: skip
    for points in found.values():
        assert points == sorted(points, key=lambda point: point.per_byte)


@given(st.lists(st.floats(0, 100), max_size=30).map(sorted), st.floats(0.5, 9))
def test_labels_are_apart_and_inside(positions, gap):
    placed = spread_out(positions, gap, 100.0)
    assert len(placed) == len(positions)
    gap = min(gap, 100.0 / max(1, len(positions) - 1))
    assert all(right - left >= gap - 1e-9 for left, right in pairwise(placed))
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in placed)


def test_labels_with_room_stay_where_they_are():
    assert spread_out([10, 30, 50], 5, 100) == [10, 30, 50]
    assert spread_out([50, 50, 99, 100], 5, 100) == [50, 55, 95, 100]


@pytest.mark.parametrize(
    ("numel", "text"),
    [(1, "1"), (1000, "1000"), (16384, "16K"), (16640, "16K"), (1600, "1.6K"), (1 << 20, "1M"),
     (218103808, "208M"), (1048575, "1024K"), (3 << 30, "3G")],
)  # fmt: skip
def test_sizes_are_short(numel, text):
    assert size_text(numel) == text
