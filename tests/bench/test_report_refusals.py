"""What keeps a page from being made is said before any work: its file, matplotlib, no report."""

import json

import pytest

from sidestream import cli
from sidestream.bench import kernel_table
from sidestream.bench.ahead import measuring
from sidestream.bench.report import build
from sidestream.bench.reports import ReportError, format_table, read_report, write_text
from sidestream.tests.bench.report_samples import COMMAND, report_of


def _refuse(*arguments, **options):
    raise AssertionError("worked")


def _command(name, folder):
    if name == "kernels":
        return COMMAND
    write_text(folder / "r.json", report_of("hadamard16").as_json())
    return ["bench", "report", str(folder / "r.json")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere/r.html", "make the folder"),
        ("", "folder"),
        ("file/r.html", "make the folder"),
    ],
    ids=["no folder", "folder", "in a file"],
)
@pytest.mark.parametrize("command", ["kernels", "report"])
def test_a_page_that_cannot_be_written_is_refused_before_work(
    command, name, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(kernel_table, "measure", _refuse)
    monkeypatch.setattr(measuring, "measure_all", _refuse)
    (tmp_path / "file").touch()
    path = str(tmp_path / name)
    assert cli.main([*_command(command, tmp_path), "--html", path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sidestream: error: ")
    assert all(word in error for word in ("--html", path, words)), error


@pytest.mark.parametrize("command", ["kernels", "report"])
def test_without_matplotlib_it_says_what_to_install(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernel_table, "measure", _refuse)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    assert cli.main([*_command(command, tmp_path), "--html", str(tmp_path / "r.html")]) == 2
    error = capsys.readouterr().err
    assert "--html: expected matplotlib, got none; pip install 'sidestream[report]'" in error
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("{", "damaged"), (json.dumps({"kind": "inspect"}), "'inspect'")],
    ids=["missing", "damaged", "another kind"],
)
def test_what_is_no_report_is_refused(content, words, tmp_path, capsys):
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["bench", "report", str(path), "--html", str(tmp_path / "r.html")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"machine": None}, "machine is NoneType, no mapping"),
        ({"machine": "a CPU"}, "machine is str, no mapping"),
        ({"machine": ["device"]}, "machine is list, no mapping"),
        (
            {"machine": {"device": "a CPU", "torch": "2.13.0"}},
            "machine has no threads, triton, commit",
        ),
        ({"settings": None}, "settings is NoneType, no mapping"),
        ({"settings": [["passes", 3]]}, "settings is list, no mapping"),
        ({"settings": {"passes": 3, "seconds": "0.1"}}, "seconds of settings is '0.1', no number"),
        ({"settings": {"passes": [3]}}, r"passes of settings is \[3\], no number"),
        ({"settings": {"passes": "3" * 999}}, "passes of settings is '3{30,90}, no number"),
    ],
    ids=[
        *("no machine", "a machine's name", "a list of a machine", "a part of a machine"),
        *("no settings", "a list of settings", "text as a number", "a list as a number", "long"),
    ],
)
def test_a_report_of_no_machine_or_settings_is_refused(fields, words, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(report_of("hadamard16", **fields).as_json())
    expected = f"r.json: expected the fields of a report, got .*{words}.*; write one with --json"
    with pytest.raises(ReportError, match=expected):
        read_report(path)


def test_what_is_asked_of_a_machine_is_enough_for_the_table(tmp_path):
    report = report_of("hadamard16")
    write_text(tmp_path / "r.json", report.as_json())
    assert format_table(read_report(tmp_path / "r.json")) == format_table(report)
