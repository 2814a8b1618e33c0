"""Tests of `sidestream bench overlap`: a tiny recording on two gloo ranks, and its bad input."""

import json

import pytest

from sidestream.bench import overlap
from sidestream.bench.commands import overlap as overlap_command
from sidestream.bench.models import TINY_CONFIG
from sidestream.bench.ranks import RanksFailed
from sidestream.cli import main

COMMAND = ["bench", "overlap", "--layers", "1", "--steps", "1"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_records_ours_and_fsdp2(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(overlap_command, "STEP_TIME_CONFIG", TINY_CONFIG)
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    assert main([*COMMAND, "--trace", str(trace), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    ours, theirs = printed.split("fsdp2: ")
    for lane in ("compute", "pack", "sum", "optimizer", "gather", "exchange", "wait"):
        assert f"\n  {lane} " in ours
    assert "\n  wait " in theirs
    assert "2 gloo ranks" in printed
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert "sidestream::complete gradient exchange of unit 'blocks.0'" in names
    assert "sidestream::start gather of unit 'blocks.0'" in names
    assert any(name.startswith("sidestream::wait gather of unit") for name in names)
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("option", ["--trace", "--html"])
def test_refuses_an_unwritable_file_before_it_records(option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(overlap, "record", lambda _: pytest.fail("recorded all the same"))
    assert main([*COMMAND, option, str(tmp_path / "nowhere" / "file")]) == 2
    assert option in capsys.readouterr().err


def test_ranks_that_fail_are_reported(capsys, monkeypatch):
    def fail(_case):
        raise RanksFailed("rank 1: out of luck")

    monkeypatch.setattr(overlap, "record", fail)
    assert main(COMMAND) == 1
    assert "rank 1: out of luck" in capsys.readouterr().err
