"""Reports survive their file, and files that are none are refused; the rule of the baseline."""

import csv
import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sidestream.bench import baseline
from sidestream.bench.reports import Report, ReportError, Row, read_report, write_json, write_text
from sidestream.training.errors import UsageError

ROW = Row(
    case="pack bf16 -> fp32", op="pack_", format="fp32", dtype="bf16", world=None, numel=1024,
    num_bytes=6144, candidate="sidestream", median_us=100.0, low_us=95.0, high_us=105.0,
    num_samples=15, gb_per_s=0.06, copy_gb_per_s=0.1, percent_of_copy=60.0, target_percent=92.0,
    method="perf_counter", rotated=4, cold=True,
)  # fmt: skip
RIVAL = replace(ROW, candidate="torch.cat", target_percent=None)
REPORT = Report(
    date="2026-01-02T03:04:05+00:00",
    command="sidestream bench kernels",
    machine={
        "device": "a CPU",
        "threads": 2,
        "torch": "2.13.0",
        "triton": "3.7.1",
        "commit": "0123abc",
    },
    settings={"passes": 3},
    rows=(ROW, RIVAL),
    wrong=("cast: not the bits of its definition",),
    notes=("a note, with a comma",),
)


def test_json_comes_back_as_it_was(tmp_path):
    write_json(tmp_path / "r.json", REPORT.content())
    assert read_report(tmp_path / "r.json") == REPORT
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_text(path, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert path.is_fifo()


def test_what_a_link_names_is_written_to(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["r.json"]


def test_a_full_disk_is_told():
    with pytest.raises(UsageError, match="/dev/full: expected room for 3 characters, got No space"):
        write_text(Path("/dev/full"), "new")


def test_csv_has_a_line_a_row():
    read = list(csv.DictReader(io.StringIO(REPORT.as_csv())))
    assert [row["candidate"] for row in read] == ["sidestream", "torch.cat"]
    assert (read[0]["median_us"], read[0]["world"], read[1]["target_percent"]) == ("100.0", "", "")


def _changed(**fields):
    return json.dumps(REPORT.content() | fields)


def _with_row(**fields):
    return _changed(rows=[REPORT.content()["rows"][0] | fields])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("expected a report at", "No such file")),
        (json.dumps(REPORT.content())[:-20], ("damaged",)),
        ("\x00\x01", ("damaged",)),
        ("[]", ("kind 'kernels'", "'list'")),
        (_changed(kind="host"), ("kind 'kernels'", "'host'")),
        (_changed(schema_version=99), ("schema_version 1", "99")),
        (_changed(rows=[{"case": "pack"}]), ("fields of a report",)),
        (_changed(rows=None), ("fields of a report",)),
        (_changed(surprise=1), ("fields of a report", "surprise")),
        (_with_row(median_us=0.0), ("median_us of pack", "0.0, no positive number")),
        (_with_row(low_us=math.nan), ("low_us of pack", "nan, no positive number")),
        (_with_row(high_us=10**400), ("high_us of pack", "no positive number")),
        (_with_row(gb_per_s="5"), ("gb_per_s of pack", "'5', no positive number")),
        (_with_row(numel=True), ("numel of pack", "True, no positive number")),
        (_with_row(candidate=None), ("candidate of a row", "None, no text")),
        (_changed(machine=None), ("machine is NoneType, no mapping",)),
        (_changed(machine={"device": "a CPU"}), ("machine has no threads, torch, triton, commit",)),
        (_changed(settings=[["passes", 3]]), ("settings is list, no mapping",)),
        (_changed(settings={"seconds": "0.1"}), ("seconds of settings is '0.1', no number",)),
    ],
)
def test_a_file_that_is_no_report_is_refused(text, words, tmp_path):
    path = tmp_path / "then.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ReportError) as refused:
        read_report(path)
    assert all(word in str(refused.value) for word in (str(path), *words)), str(refused.value)


@pytest.mark.parametrize("field", ["device", "threads"])
def test_a_baseline_of_another_machine_is_refused(field, tmp_path):
    write_json(tmp_path / "then.json", REPORT.content())
    assert baseline.read_baseline(tmp_path / "then.json", REPORT.machine) == REPORT
    here = {**REPORT.machine, field: "another"}
    with pytest.raises(ReportError, match=f"{field} 'another'"):
        baseline.read_baseline(tmp_path / "then.json", here)
    assert baseline.read_baseline(tmp_path / "then.json", {**REPORT.machine, "torch": "3.0.0"})


def _later(**fields):
    return replace(ROW, **fields)


SLOWER = {"median_us": 120.0, "low_us": 110.0, "high_us": 130.0, "percent_of_copy": 50.0}


@pytest.mark.parametrize(
    ("row", "slower"),
    [
        (_later(**SLOWER), True),
        (_later(**SLOWER | {"median_us": 114.0}), False),
        (_later(**SLOWER | {"low_us": 104.0}), False),
        (_later(**SLOWER | {"percent_of_copy": 55.0}), False),
        (replace(RIVAL, **SLOWER), False),
        (ROW, False),
        (_later(median_us=10.0, low_us=9.0, high_us=11.0, percent_of_copy=600.0), False),
    ],
    ids=["all three", "within 15 %", "spreads touch", "copy too", "a rival", "same", "faster"],
)
def test_the_rule(row, slower):
    (found,) = baseline.compare([row], REPORT.rows)
    assert found.slower == slower
    assert found.ratio == pytest.approx(row.median_us / 100.0)


def test_rows_are_paired_by_case_size_candidate_and_method():
    others = [
        replace(ROW, case="cast"), replace(ROW, numel=2048), replace(ROW, candidate="new"),
        replace(ROW, method="CUDA events"),
    ]  # fmt: skip
    assert baseline.compare(others, REPORT.rows) == []
    found = baseline.compare([ROW, *others, RIVAL], REPORT.rows)
    assert [one.row for one in found] == [ROW, RIVAL]


def test_the_comparison_says_rule_and_verdicts():
    text = baseline.format_comparison([_later(**SLOWER), RIVAL], REPORT)
    assert "1.200  SLOWER" in text
    assert "1 of 2 rows slower" in text
    assert baseline.RULE in text
    assert "only" not in text


def test_the_comparison_lists_rows_of_ours_that_one_side_lacks():
    new, rival = replace(ROW, numel=2048), replace(RIVAL, case="cast")
    lines = baseline.format_comparison([new, rival], REPORT).splitlines()
    assert [" ".join(line.split()) for line in lines if " only " in line] == [
        "pack bf16 -> fp32 2048 only now",
        "pack bf16 -> fp32 1024 only then",
    ]
    assert "0 of 0 rows slower" in lines[-1]


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ([(ROW.case, 1024), ("cast", 1024)], True),
        ([(ROW.case, 2048)], False),
        ([("cast", 1024)], False),
    ],
    ids=["one of two", "other size", "other case"],
)
def test_a_baseline_with_nothing_that_is_asked_for_is_refused(asked, fits):
    if fits:
        baseline.require_comparable(asked, REPORT, "then.json")
        return
    with pytest.raises(ReportError, match=r"--baseline: .* got none in then\.json; ask for .*kern"):
        baseline.require_comparable(asked, REPORT, "then.json")
    with pytest.raises(ReportError):  # a rival's row alone is nothing of ours
        baseline.require_comparable([(ROW.case, 1024)], replace(REPORT, rows=(RIVAL,)), "then.json")
