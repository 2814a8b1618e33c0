"""`sidestream bench kernels`: what it prints, writes and returns, what it refuses before work."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sidestream import cli
from sidestream.bench import kernel_table
from sidestream.bench.kernel_table import Pace
from sidestream.bench.report import build
from sidestream.bench.reports import read_report
from sidestream.kernels.pack import cases as pack_cases

ROOT = Path(__file__).resolve().parents[2]
TINY = ["bench", "kernels", "--device", "cpu", "--op", "reduce", "--world", "2", "--numel", "16k"]


PACE = Pace(passes=1, min_rounds=3, max_rounds=3, seconds=0.0, sample_s=0.0)


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(kernel_table, "CPU_PACE", PACE)


def _refuse(*arguments, **options):
    raise AssertionError("measured")


@pytest.fixture
def _no_work(monkeypatch):
    monkeypatch.setattr(kernel_table, "measure", _refuse)


@pytest.mark.usefixtures("_quick")
def test_it_prints_and_writes_what_it_measured(tmp_path, capsys):
    files = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    assert cli.main([*TINY, *files]) == 0
    report = read_report(tmp_path / "r.json")
    assert report.command.endswith(f"--csv {tmp_path / 'r.csv'}")
    assert {row.case for row in report.rows} == {
        "reduce bf16 to fp32 world 2",
        "reduce bf16 to fp32 world 2 accumulate",
    }
    with (tmp_path / "r.csv").open() as file:
        assert len(list(csv.reader(file))) == 1 + len(report.rows)
    printed = capsys.readouterr().out
    assert "torch.sum" in printed
    assert "% copy" in printed
    assert "on a CPU ours is the definition" in printed
    assert not any(line.endswith(" 90") for line in printed.splitlines())


@pytest.mark.usefixtures("_quick")
def test_a_wrong_kernel_is_told_not_timed_and_fails(tmp_path, monkeypatch, capsys):
    values = iter(range(100))  # so that no two calls agree
    monkeypatch.setattr(
        pack_cases, "reduce_", lambda out, parts, **options: out.fill_(next(values))
    )
    assert cli.main([*TINY, "--json", str(tmp_path / "r.json")]) == 1
    report = read_report(tmp_path / "r.json")
    assert report.rows == ()
    assert len(report.wrong) == 2
    assert capsys.readouterr().out.count("WRONG, so not timed: reduce bf16 to fp32 world 2") == 2


def _edited(path, change):
    content = json.loads(path.read_text())
    for row in content["rows"]:
        change(row)
    path.write_text(json.dumps(content))


@pytest.mark.usefixtures("_quick")
def test_a_baseline_that_was_much_faster_fails(tmp_path, capsys):
    path = tmp_path / "then.json"
    assert cli.main([*TINY, "--json", str(path)]) == 0

    def faster(row):
        for name in ("median_us", "low_us", "high_us"):
            row[name] /= 1000
        row["percent_of_copy"] *= 1000

    _edited(path, faster)
    assert cli.main([*TINY, "--baseline", str(path)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("  SLOWER") == 2
    assert "2 of 4 rows slower" in printed


@pytest.mark.usefixtures("_quick")
def test_a_baseline_of_other_sizes_or_names_is_refused_before_any_work(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "then.json"
    assert cli.main([*TINY, "--json", str(path)]) == 0
    monkeypatch.setattr(kernel_table, "measure", _refuse)
    assert cli.main([*TINY[:-1], "32k", "--baseline", str(path)]) == 2
    error = capsys.readouterr().err
    assert "such as reduce bf16 to fp32 world 2 of 32768 elements, got none in" in error
    assert "--numel 16k" in error
    _edited(path, lambda row: row.update(case="reduce world 2 bf16 -> fp32"))
    assert cli.main([*TINY, "--baseline", str(path)]) == 2
    error = capsys.readouterr().err
    assert "such as reduce world 2 bf16 -> fp32, by: " in error
    assert "where cases have other names now, measure it again" in error


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(("one", "other"), [("--json", "--csv"), ("--csv", "--html")])
def test_one_file_for_two_outputs_is_refused(one, other, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "find_spec", lambda name: object())
    first, second = tmp_path / "x", tmp_path / "link"
    second.symlink_to(first)
    assert cli.main([*TINY, one, str(first), other, str(second)]) == 2
    error = capsys.readouterr().err
    assert f"{other}: expected another file than that of {one}, got {second} for both" in error


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "cast", "--format", "nvfp4"], ("got none", "e4m3")),
        (["--json", "/nowhere/r.json"], ("--json", "/nowhere/r.json", "make the folder")),
        (["--csv", "/dev/null/r.csv"], ("--csv", "make the folder")),
        (["--baseline", "/nowhere/then.json"], ("/nowhere/then.json", "No such file")),
        (["--numel", "900G"], ("--numel", "MiB")),
    ],
    ids=["nothing", "no folder", "in a file", "then", "large"],
)
def test_what_cannot_be_done_is_refused_before_any_work(arguments, words, capsys):
    assert cli.main(["bench", "kernels", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sidestream: error: ")
    assert all(word in error for word in words), error


@pytest.mark.usefixtures("_no_work")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_works(capsys):
    assert cli.main(["bench", "kernels", "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "expected a GPU that torch sees, got none" in error
    assert "cpu" in error


@pytest.mark.slow
def test_the_cases_run_under_pytest_benchmark(tmp_path):
    command = [sys.executable, "-m", "pytest", "bench/", "--benchmark-only", "-q"]
    command += ["-k", "reduce and accumulate", "-p", "no:cacheprovider"]
    command += [f"--benchmark-json={tmp_path / 'b.json'}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NUMEL": "16384", "DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "b.json").read_text())["benchmarks"]
    assert len(found) == 4
    assert all(one["extra_info"]["op"] == "reduce_" for one in found)
