import json
import os
import subprocess
import sys
import types

import pytest

from sidestream import cli
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
def test_a_training_goes_on_with_names_that_its_terminal_cannot_show(tmp_path):
    odd = os.fsencode(tmp_path) + b"/caf\xc3\xa9-\xff"
    os.mkdir(odd)
    text, saved = odd + b"/t\xfe.txt", odd + b"/saved"
    with open(text, "wb") as file:
        file.write(b"the quick brown fox. " * 500)
    command = [sys.executable, "-m", "sidestream", *TRAIN, "--steps", "2", "--nproc", "2"]
    command += ["--data", text, "--checkpoint", saved, "--json", odd + b"/result.json"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, env=environment, timeout=90, check=False)
    assert run.returncode == 0, run.stderr
    assert b"saved" in run.stdout and b"caf\\xe9-\\udcff" in run.stdout
    with open(odd + b"/result.json") as file:
        assert json.load(file)["steps"] == 2
    again = subprocess.run(command, capture_output=True, env=environment, timeout=90, check=False)
    assert again.returncode == cli.EXIT_USAGE
    assert b"sidestream: error: expected no checkpoints in " in again.stderr
