"""The roofline: which GPU, roofs, points, labels."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream.bench.report.roofline import spread_out, subject_of
from sidestream.bench.report.series import size_text
from sidestream.kernels.ahead.machines import GPUS, PIPE_SHARE, gpu_of, gpus_of
from sidestream.kernels.cases import SECTIONS
from sidestream.tests.bench.report_samples import (
    OURS,
    SIZES,
    cpu_report,
    report_of,
    roofline_made_up,
)

H100, H200 = gpus_of("sm_90")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        *((f"NVIDIA {gpu.name}", gpu.name) for gpu in GPUS),
    ],
)
def test_only_a_known_gpu_is_known(device, name):
    found = gpu_of(device)
    assert (found and found.name) == name


def test_a_gpu_s_report_is_of_that_gpu_and_a_cpu_s_of_a_predicted_one():
    assert subject_of(report_of("hadamard16_")) == H200
    assert subject_of(report_of("hadamard16_", device="a GPU")) is None
    assert subject_of(cpu_report("hadamard16_")) == H100


def test_points_are_below_both_roofs_and_hold_what_was_measured():
    report = report_of("quantize_nvfp4_", "hadamard16_")
    found = roofline_made_up(report)
    assert not found.is_prediction
    assert found.copy_gb_s == max(row.copy_gb_per_s for row in report.rows if row.cold)
    assert found.issue_gb_s(found.ridge) == pytest.approx(found.copy_gb_s)
    # 4 warps of 32 threads a cycle.
    assert found.issue_gb_s(10.0) == pytest.approx(4 * 32 * 132 * 1.755 / 10)
    points = {point.case.full_name: point for point in found.points}
    quantized = points["quantize_nvfp4 from bf16"]
    limit = quantized.case.gate.instructions
    assert quantized.per_byte == pytest.approx(limit / (2 + 0.5 + 1 / 16), rel=1e-3)
    assert quantized.roof_gb_s == pytest.approx(found.issue_gb_s(quantized.per_byte))
    assert quantized.roof_gb_s < found.copy_gb_s
    assert points["hadamard16 of bf16"].roof_gb_s == found.copy_gb_s
    assert (quantized.bound, points["hadamard16 of bf16"].bound) == ("instructions", "bytes")
    left = quantized.roof_gb_s / found.copy_gb_s
    assert quantized.target == pytest.approx(min(0.70, PIPE_SHARE * left))
    assert points["hadamard16 of bf16"].target == 0.88
    measured = {point.measured.case for point in found.points if point.measured}
    assert measured == {row.case for row in report.rows}
    assert points["quantize_nvfp4 from bf16 swizzled"].measured is None
    rows = [point.measured for point in found.points if point.measured]
    assert {(row.numel, row.candidate) for row in rows} == {(max(SIZES), OURS)}
    assert (found.unknown, found.uncounted) == ((), ())


def test_a_cpu_s_report_has_predicted_points_alone():
    found = roofline_made_up(cpu_report("hadamard16_"))
    assert found.is_prediction
    assert found.copy_gb_s == H100.copy_gb_s
    assert {point.measured for point in found.points} == {None}
    assert found.unknown == ()


def test_the_copy_s_roof_is_out_of_memory_where_any_was():
    first, *others = report_of("hadamard16_").rows
    cached = replace(first, copy_gb_per_s=1e6, cold=False)
    report = report_of("hadamard16_", rows=(cached, *others))
    assert roofline_made_up(report).copy_gb_s < 1e4
    read = replace(first, copy_gb_per_s=1e6, baseline="read")
    assert roofline_made_up(report_of("hadamard16_", rows=(read, *others))).copy_gb_s < 1e4
    warm = report_of("hadamard16_", rows=(cached, replace(cached, copy_gb_per_s=9e5)))
    assert roofline_made_up(warm).copy_gb_s == 1e6


def test_what_cannot_be_drawn_is_named():
    report = report_of("update_fp8_scales_")
    found = roofline_made_up(report)
    assert (found.points, found.unknown) == ((), ())
    assert found.uncounted == (report.rows[0].case,)
    renamed = replace(report, rows=tuple(replace(row, case="once") for row in report.rows))
    assert roofline_made_up(renamed).unknown == ("once",)


def test_families_are_those_of_the_ops_in_order():
    found = roofline_made_up(report_of()).families()
    assert list(found) == [title for title, _ in SECTIONS]
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
    [(1000, "1000"), (16640, "16K"), (1600, "1.6K"), (218103808, "208M"), (3 << 30, "3G")],
)
def test_sizes_are_short(numel, text):
    assert size_text(numel) == text
