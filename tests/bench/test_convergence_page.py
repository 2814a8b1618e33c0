"""Tests of the page of `sidestream bench convergence`, from results that were made up."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sidestream.bench.convergence import Result
from sidestream.bench.convergence_page import (
    curves_of,
    is_repeated,
    lines_of,
    page_of,
    rows_of,
    table_of,
)
from sidestream.bench.convergence_wires import WIRES
from sidestream.bench.curves import Line, Panel, as_svg, ticks

SVG = "{http://www.w3.org/2000/svg}"
STEPS = 200


def result(wire: str, seed: int, *losses: float | None, attempt: int = 0) -> Result:
    """One whose validation losses are those of steps 100, 150 and 200, or of the first of them."""
    final = None if None in losses else sum(losses[1:]) / 2
    return Result(
        wire=wire,
        seed=seed,
        attempt=attempt,
        settings_digest="d",
        settings={
            "steps": STEPS, "ranks": 2, "rows": 4, "learning_rate": 0.004, "clip_norm": 1.0,
            "data_sha256": "ab" * 32, "validation_rows": 64,
            "model": {"num_layers": 2, "width": 96, "context": 64},
        },
        wire_settings=WIRES[wire].described(),
        num_parameters=279168,
        unigram_loss=3.25,
        final_validation_loss=final,
        grad_bytes=4.0 if wire == "fp32" else 0.5625,
        weight_bytes=None,
        seconds=20.0 + seed,
        weights_sha256=f"{wire} {seed}",
        date="2026-01-01",
        command="sidestream bench convergence",
        machine={
            "device": "a CPU", "cores": 2, "python": "3.11.7", "torch": "2.13.0", "commit": "abc"
        },
        validation=[list(pair) for pair in zip((100, 150, 200), losses, strict=False)],
        losses=[3.0],
    )  # fmt: skip


RESULTS = [
    result("nvfp4", 0, 3.0, 2.02, 2.02),
    result("fp32", 0, 2.5, 2.1, 1.9),
    result("fp32", 1, 2.7, 2.0, 2.0),
    result("fp32", 0, 2.5, 2.1, 1.9, attempt=1),
    result("nvfp4", 1, 3.2, 2.0, 2.04),
    result("bf16", 0, 2.4, 2.0, 2.02),
    result("mxfp4-naive", 0, 4.0, None),
    result("mxfp4-naive", 1, 4.0, 2.2, 2.2),
]


def test_gaps_are_those_of_a_seed_over_the_baseline():
    rows = {row.wire: row for row in rows_of(RESULTS)}
    assert list(rows) == ["fp32", "bf16", "nvfp4", "mxfp4-naive"]
    fp32, bf16, nvfp4, naive = rows.values()
    assert (fp32.final.mean, fp32.gap_percent.mean, fp32.seeds) == (2.0, 0.0, 2)
    assert (nvfp4.final.low, nvfp4.final.high) == (2.02, 2.02)
    assert nvfp4.gap_percent.mean == pytest.approx(1.0)
    assert (nvfp4.limit_percent, bf16.limit_percent, fp32.limit_percent) == (1.0, 0.3, None)
    assert bf16.gap_percent.mean == pytest.approx(0.5) and bf16.verdict == "0.3: missed"
    assert (naive.seeds, naive.broken, naive.final.mean) == (2, 1, 2.2)
    assert naive.gap_percent.mean == pytest.approx(10.0) and naive.verdict == ""
    assert fp32.seconds == 20.5


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ((3.0, 2.0, 2.0), "1: held"),
        ((3.0, 1.9, 1.9), "1: held"),
        ((3.0, 2.1, 2.1), "1: missed"),
        ((3.0, None), "1: missed"),
    ],
    ids=["equal", "below", "above", "not-finite"],
)
def test_a_limit_is_held_or_missed(losses, verdict):
    results = [result("fp32", 0, 3.0, 2.0, 2.0), result("nvfp4", 0, *losses)]
    assert rows_of(results)[1].verdict == verdict


def test_a_wire_without_the_baseline_has_no_gap():
    (row,) = rows_of([result("nvfp4", 3, 3.0, 2.0, 2.0)])
    assert row.gap_percent is None and row.verdict == "1: missed"
    assert "| 2.0000 | - |" in "\n".join(table_of([row]))


def test_the_table_has_a_line_for_each_wire():
    lines = table_of(rows_of(RESULTS))
    assert len({line.count("|") for line in lines}) == 1
    nvfp4 = (
        "nvfp4 | nvfp4, stochastic: 0.562 | mxfp8: - | 2.0200 | +1.00 | 1: held | never | 2 | 20"
    )
    assert lines[4] == f"| {nvfp4} |"
    assert "| +10.00 |  | 1 of 2 | 2 |" in lines[5]


def test_curves_are_means_between_the_lowest_and_the_highest_seed():
    lines = {line.name: line.points for line in lines_of(RESULTS)}
    assert lines["fp32"] == [(100, 2.5, 2.6, 2.7), (150, 2.0, 2.05, 2.1), (200, 1.9, 1.95, 2.0)]
    assert lines["bf16"][0] == (100, 2.4, 2.4, 2.4)
    # As far as it is finite with all seeds.
    assert lines["mxfp4-naive"] == [(100, 4.0, 4.0, 4.0)]


def test_the_picture_puts_points_where_they_are():
    panel = Panel("a < b", "x", "y", (0.0, 10.0), (1.0, 2.0))
    line = Line("one & only", [(0.0, 1.0, 1.5, 2.0), (10.0, 1.0, 1.0, 1.5)], 2)
    picture = ElementTree.fromstring(as_svg([panel], [line]))
    (window,) = picture.iter(f"{SVG}clipPath")
    width, height = (float(window[0].get(side)) for side in ("width", "height"))
    (curve,), (band,) = picture.iter(f"{SVG}polyline"), picture.iter(f"{SVG}polygon")
    assert curve.get("points") == f"0.0,{height / 2:.1f} {width:.1f},{height:.1f}"
    assert band.get("points") == (
        f"0.0,{height:.1f} {width:.1f},{height:.1f} {width:.1f},{height / 2:.1f} 0.0,0.0"
    )
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"a < b", "one & only", "10", "1.2"} <= set(texts)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.0, 2000.0), [0, 500, 1000, 1500, 2000]),
        ((1.93, 2.11), [1.95, 2.0, 2.05, 2.1]),
        ((0.0, 6.0), [0, 1, 2, 3, 4, 5, 6]),
        ((1500.0, 2000.0), [1500, 1600, 1700, 1800, 1900, 2000]),
    ],
    ids=["thousands", "hundredths", "ones", "part"],
)
def test_ticks_are_round(ends, expected):
    assert ticks(*ends) == pytest.approx(expected)


def test_the_last_quarter_shows_what_is_near_the_baseline():
    panels = list(ElementTree.fromstring(curves_of(RESULTS)).iter(f"{SVG}g"))
    whole, last = panels[0], panels[2]
    labels = [[float(t.text) for t in panel.iter(f"{SVG}text") if _is_number(t.text)]
              for panel in (whole, last)]  # fmt: skip
    assert {0.0, 200.0, 4.0} <= set(labels[0])
    # From step 150; 5 % above 2.1, whatever the naive wire does.
    assert min(value for value in labels[1] if value > 10) == 150.0
    assert max(value for value in labels[1] if value < 10) <= 2.22


def _is_number(text: str) -> bool:
    return text.replace(".", "").isdecimal()


def test_the_page_says_what_was_run_and_what_came_of_it():
    page = page_of(RESULTS, left_out=3)
    for part in (
        "279,168 parameters", "200 steps on 2 ranks", "128 sequences", "would have 3.250",
        "    sidestream bench convergence\n", "a CPU, 2 cores", "torch 2.13.0, commit abc",
        "![validation loss by step](curves.svg)", "| nvfp4 | nvfp4, stochastic: 0.562 |",
        "the same losses, and the same bits", "Left out: 3 results of other settings",
        "some wires have fewer seeds",
    ):  # fmt: skip
        assert part in page
    assert page_of(RESULTS, left_out=3) == page


def test_a_baseline_that_does_not_repeat_is_told():
    assert is_repeated(RESULTS) is True
    assert is_repeated(RESULTS[:3]) is None
    for change in ({"weights_sha256": "other"}, {"losses": [3.00001]}):
        others = [*RESULTS[:3], replace(RESULTS[3], **change), *RESULTS[4:]]
        assert is_repeated(others) is False
        assert "**other bits" in page_of(others)
    assert "fp32 trained twice: not yet." in page_of(RESULTS[:3])
