"""`sidestream inspect`: what it prints and writes, what it refuses, before anything is compiled."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sidestream.bench.ahead import checkout, measuring, selection, table
from sidestream.cli import main
from sidestream.kernels.ahead import measure
from sidestream.kernels.ahead.compile import TARGETS
from sidestream.kernels.ahead.machines import Prediction
from sidestream.kernels.cases import case_of

ROOT = Path(__file__).resolve().parents[2]
CASE = ["--op", "hadamard16", "--case", "fp32 inverse"]
GIT = shutil.which("git")
ROW = measuring.Row(
    op="cast_",
    case="e4m3",
    target="sm_90",
    registers=31,
    register_limit=64,
    spill_bytes=0,
    shared_bytes=2048,
    occupancy=0.75,
    load_bits=(128,),
    store_bits=(128, 8),
    instructions=2.97,
    instruction_limit=4.0,
    integers=1.2,
    moved_bytes=3.0,
    predictions=(
        Prediction("H100", "bytes", 1.0, 0.1, 0.05),
        Prediction("H200", "instructions", 0.8, 1.25, 1.0),
    ),
)


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(measure, "measure", refuse)
    monkeypatch.setattr(measuring, "compile_launch", refuse)


def test_one_case_is_measured_shown_and_written(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert main(["inspect", *CASE, "--arch", "sm_90,gfx942", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    content = json.loads(path.read_text())
    hopper, amd = (measuring.row_from_json(row) for row in content["rows"])
    assert (hopper.op, hopper.case, hopper.target) == ("hadamard16_", "of fp32 inverse", "sm_90")
    assert hopper.load_bits == hopper.store_bits == (128,)
    assert amd.load_bits and amd.store_bits
    assert hopper.moved_bytes == amd.moved_bytes == 8.0
    assert hopper.spill_bytes == amd.spill_bytes == 0
    limit = case_of(hopper.op, hopper.case).gate.instructions
    assert 2 < hopper.instructions <= hopper.instruction_limit == limit
    assert hopper.registers <= hopper.register_limit == 64
    assert [found.gpu for found in hopper.predictions] == ["H100", "H200"]
    assert {found.bound for found in hopper.predictions} == {"bytes"}
    assert all(0 < row.occupancy <= 1 for row in (hopper, amd))
    assert (amd.instructions, amd.instruction_limit, amd.predictions) == (None, None, ())
    assert content["kind"] == "inspect"
    assert content["command"].startswith("sidestream inspect --op hadamard16")
    assert f"{hopper.registers}/64" in printed.out
    assert "bytes 1.00" in printed.out
    assert printed.out.count("hadamard16_  of fp32 inverse") == 2
    # What another test has left in the cache is told first.
    assert "compiled 2/2: hadamard16_ of fp32 inverse" in printed.err


@pytest.mark.parametrize(
    ("option", "text"), [("--ptx", ".visible .entry _cast_kernel"), ("--sass", "STG.E.")]
)
def test_the_code_of_one_case_is_printed(option, text, capsys):
    """Of the one of this whole name, though it is in "bf16 from bf16 stochastic" as well."""
    assert main(["inspect", "--op", "cast_", "--case", "bf16 from bf16", option]) == 0
    assert text in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--op cats", "--op: expected some of pack_, unpack_, reduce_, cast, .*got 'cats'"),
        ("--arch sm_75", "--arch: expected some of sm_80, .*gfx942, or all, got 'sm_75'"),
        ("--case nothing", "--case: expected a part of .*got 'nothing'; choose of pack_ 'fp32 to"),
        ("--ptx", "--ptx: expected one case, got 1[0-9]+: pack_ .*, ...; choose one with --op"),
        (
            "--ptx --op update_fp8_scales --arch all",
            "--ptx: expected one --arch, got sm_80",
        ),
        ("--ptx --op update_fp8_scales --arch gfx942", "expected a target of NVIDIA"),
        ("--ptx --json x.json", "expected --ptx without --json"),
        ("--json /does/not/exist/rows.json", "make the folder first"),
        ("--compare no-such-ref", "expected a commit, branch or tag of .*got 'no-such-ref'"),
        ("--compare --output=x", "expected a commit, branch or tag of"),
    ],
)
def test_bad_input_is_told_before_any_work(arguments, expected, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(checkout, "ROOT", _repository(tmp_path, {"a.txt": "a"}))
    arguments = arguments.replace("--compare --", "--compare=--").split()
    assert main(["inspect", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sidestream: error: ")
    assert re.search(expected, error, re.DOTALL), error


@pytest.mark.usefixtures("nothing_is_compiled")
def test_commits_that_cannot_be_looked_at(tmp_path, capsys, monkeypatch):
    repository = _repository(tmp_path / "old", {"a.txt": "a", "inner/b.txt": "b"})

    def refusal(root):
        monkeypatch.setattr(checkout, "ROOT", root)
        assert main(["inspect", "--compare", "HEAD"]) == 2
        return capsys.readouterr().err

    assert "expected sidestream in a git checkout" in refusal(tmp_path)
    assert "expected sidestream in a git checkout" in refusal(repository / "inner")
    assert "expected a commit that has `sidestream inspect`" in refusal(repository)
    monkeypatch.setenv("PATH", "")
    assert "expected git on the PATH" in refusal(repository)


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.skipif(GIT is None, reason="needs git")
def test_a_commit_that_git_cannot_read_is_told_before_any_work(tmp_path, capsys, monkeypatch):
    repository = _repository(tmp_path, {checkout.COMMAND: "a", "b.txt": "b"})
    blob = subprocess.run(
        [GIT, "rev-parse", "HEAD:b.txt"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.strip()
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    monkeypatch.setattr(checkout, "ROOT", repository)
    assert main(["inspect", *CASE, "--compare", "HEAD"]) == 2
    error = capsys.readouterr().err
    assert "--compare: expected git to read all of" in error and blob in error


@pytest.mark.slow
@pytest.mark.skipif(GIT is None, reason="needs git")
def test_what_changed_since_a_commit_is_printed(tmp_path, capsys, monkeypatch):
    """The commit has blocks of half the size, which the whole of its own process must show."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for layer in (".", "kernels", "buffers", "sharding", "training", "bench")
        for path in (ROOT / layer).glob("*.py" if layer == "." else "**/*.py")
    }
    old = sources["kernels/nvfp4/hadamard.py"].replace("TILE_NUMEL = 4096", "TILE_NUMEL = 2048")
    assert old != sources["kernels/nvfp4/hadamard.py"]
    repository = _repository(tmp_path, sources | {"kernels/nvfp4/hadamard.py": old})
    monkeypatch.setattr(checkout, "ROOT", repository)
    assert main(["inspect", *CASE, "--compare", "HEAD"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1 cases, from HEAD (")
    changed = [line.split() for line in printed.splitlines()[2:]]
    assert {line[0] for line in changed} == {"sm_90"}
    (instructions,) = (line for line in changed if line[5] == "instr")
    assert instructions[1:5] == ["hadamard16_", "of", "fp32", "inverse"]
    assert float(instructions[6]) > float(instructions[8])


def test_changes_are_told_and_only_they():
    other = dataclasses.replace(ROW, registers=40, register_limit=80, store_bits=(128,))
    gone = dataclasses.replace(ROW, case="e5m2")
    lines = [" ".join(line.split()) for line in table.change_lines([ROW, gone], [other])]
    assert lines[1:] == [
        "sm_90 cast_ e4m3 registers 31 -> 40",
        "sm_90 cast_ e4m3 stores 128+8 -> 128",
        "sm_90 cast_ e5m2 case there -> gone",
    ]
    limits = dataclasses.replace(ROW, register_limit=48, instruction_limit=None)
    assert list(table.change_lines([ROW], [limits])) == ["no case has changed"]


def test_the_table_says_what_exceeds_its_gate_and_what_is_bound_by_instructions():
    spilling = dataclasses.replace(ROW, case="e5m2", spill_bytes=8)
    crowded = dataclasses.replace(ROW, case="e2m1", registers=65)
    slow = dataclasses.replace(ROW, case="e8m0", instructions=4.5, predictions=())
    lines = list(table.lines([ROW, spilling, crowded, slow]))
    assert [line.endswith("over its gate") for line in lines[2:6]] == [False, True, True, True]
    assert [line.split()[0] for line in lines[2:6]] == ["cast_", "e5m2", "e2m1", "e8m0"]
    assert "31/64" in lines[2]
    assert "2.97/4" in lines[2]
    assert "H100 (132 SMs, 1.755 GHz, copy 3,000 GB/s): none of 3" in lines[6]
    assert (
        "3 of 3 bound by instructions or integers; the lowest share of a copy's rate is 0.80"
        in lines[7]
    )


def test_all_is_every_target_and_none_comes_twice():
    assert selection.targets_of("all") == tuple(TARGETS)
    assert selection.targets_of("sm_80,gfx942,sm_80") == ("sm_80", "gfx942")


def test_usual_cases_are_looked_at_unless_one_is_named():
    found = selection.cases_of(("cast_",), None)
    assert all(case.gate is not None or case.standard for case in found)
    (named,) = selection.cases_of(("cast_",), "e5m2 from fp16 stochastic")
    assert named not in found


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_a_row_of_an_op_that_may_not_be_counted(target, tmp_path):
    """What cannot be counted is a dash in its row, whichever Triton is here."""
    path = tmp_path / "rows.json"
    cases = ["--op", "cast_back,hadamard16,reduce", "--case", "world 64"]
    assert main(["inspect", *cases, "--arch", target, "--json", str(path)]) == 0
    (row,) = map(measuring.row_from_json, json.loads(path.read_text())["rows"])
    assert row.instructions is None
    assert row.spill_bytes == 0


def _repository(folder, files):
    """A git repository with one commit."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    who = ["-c", "user.name=test", "-c", "user.email=test@test"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run([GIT, *arguments], cwd=folder, check=True, timeout=60)
    return folder
