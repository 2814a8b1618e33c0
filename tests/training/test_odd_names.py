import json
import os
import subprocess
import sys
import types

import pytest

from sidestream import cli
from sidestream.tests.training.processes import one_thread_each, parse_result
from sidestream.training.errors import OptionsError
from sidestream.training.options import options_from

TRAIN = ["train", "--device", "cpu", "--model", "tiny", "--seq-len", "16", "--batch", "8"]


def _parsed(monkeypatch, home, *arguments):
    monkeypatch.setenv("HOME", str(home))
    parser = cli._parser(["train"])
    return options_from(parser.parse_args(["train", *arguments]))


@pytest.mark.parametrize("name", ["data", "checkpoint", "json"])
def test_the_home_folder_stands_for_a_tilde(name, tmp_path, monkeypatch):
    assert getattr(_parsed(monkeypatch, tmp_path, f"--{name}=~/a~b"), name) == f"{tmp_path}/a~b"
    assert getattr(_parsed(monkeypatch, tmp_path, f"--{name}=./~/a"), name) == "./~/a"


def test_the_tilde_of_a_user_who_is_not_there_is_refused(tmp_path, monkeypatch):
    with pytest.raises(OptionsError, match=r"behind ~ in --json, got ~nobody-of-this-name/x"):
        _parsed(monkeypatch, tmp_path, "--json=~nobody-of-this-name/x")


def test_no_character_ends_a_command(monkeypatch, capsys):
    def run(options):
        print("saved \udcff\ud800")
        print("failed \udcff", file=sys.stderr)
        return 0

    def add_parser(subparsers):
        subparsers.add_parser("odd").set_defaults(run=run)

    monkeypatch.setattr(cli, "COMMANDS", {"odd": "odd"})
    monkeypatch.setattr(
        cli.importlib, "import_module", lambda *_: types.SimpleNamespace(add_parser=add_parser)
    )
    assert cli.main(["odd"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "saved \\udcff\\ud800\n"
    assert captured.err == "failed \\udcff\n"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_ranks_train_to_a_result_with_names_that_their_terminal_cannot_show(tmp_path, capsys):
    odd = os.fsencode(tmp_path) + b"/caf\xc3\xa9-\xff"
    os.mkdir(odd)
    text, saved = odd + b"/t\xfe.txt", odd + b"/saved"
    with open(text, "wb") as file:
        file.write(b"the quick brown fox. " * 500)
    arguments = [*TRAIN, "--steps", "2", "--nproc", "2", "--grad-wire", "bf16"]
    arguments += ["--bucket-mib", "0.1", "--data", text, "--checkpoint", saved]
    arguments += ["--json", odd + b"/result.json"]
    environment = {**one_thread_each(), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "sidestream", *arguments]
    run = subprocess.run(command, capture_output=True, env=environment, timeout=90, check=False)
    assert run.returncode == 0, run.stderr
    assert b"saved" in run.stdout and b"caf\\xe9-\\udcff" in run.stdout
    last_line = run.stdout.decode("ascii").rstrip("\n").splitlines()[-1]
    result = parse_result(last_line)
    with open(odd + b"/result.json") as file:
        assert json.load(file) == result
    assert (result["steps"], result["world"]) == (2, 2)
    assert result["wire_bytes_per_step"] > 0
    assert len(result["params_sha256"]) == 64
    assert cli.main([os.fsdecode(argument) for argument in arguments]) == cli.EXIT_USAGE
    assert "sidestream: error: expected no checkpoints in " in capsys.readouterr().err
