"""Tests of the command line as a whole: every command has help, and loads nothing of the others."""

import json
import subprocess
import sys
import types

import pytest

from sidestream import cli
from sidestream.bench import commands
from sidestream.training.errors import UsageError

LEAVES = [[name] for name in cli.COMMANDS if name != "bench"]
LEAVES += [["bench", name] for name in commands.GROUP]


@pytest.mark.parametrize("command", LEAVES, ids=" ".join)
def test_help_is_there(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert f"usage: sidestream {' '.join(command)} " in capsys.readouterr().out


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {name} " in printed for name in cli.COMMANDS)


def test_unknown_commands_are_told_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["fly"])
    assert ended.value.code == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert "'fly'" in error
    assert all(name in error for name in cli.COMMANDS)


def test_doctor_runs(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    assert {"name", "status", "found", "fix"} == set(json.loads(capsys.readouterr().out)[0])


def test_training_loads_nothing_of_the_layer_above():
    """Every rank of a run starts with this import."""
    script = (
        "import sys\n"
        "from sidestream import cli\n"
        "try:\n"
        "    cli.main(['train', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print([name for name in sys.modules if name.startswith('sidestream.bench')])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_a_command_gets_its_arguments_and_its_errors_are_one_line(monkeypatch, capsys):
    """A command that knows how to run, to fail, and to be interrupted."""
    seen = []

    def run(options):
        seen.append(options.arguments)
        if options.fail:
            raise {"usage": UsageError("expected a, got b; pass a"), "stop": KeyboardInterrupt()}[
                options.fail
            ]
        return 7

    def add_parser(subparsers):
        parser = subparsers.add_parser("made")
        parser.add_argument("--fail")
        parser.set_defaults(run=run)

    module = types.SimpleNamespace(add_parser=add_parser)
    monkeypatch.setattr(cli, "COMMANDS", {"made": "x.made"})
    monkeypatch.setattr(cli.importlib, "import_module", lambda name, package: module)
    assert cli.main(["made"]) == 7
    assert cli.main(["made", "--fail", "usage"]) == cli.EXIT_USAGE
    assert capsys.readouterr().err == "sidestream: error: expected a, got b; pass a\n"
    assert cli.main(["made", "--fail", "stop"]) == cli.EXIT_INTERRUPTED
    assert seen == [["made"], ["made", "--fail", "usage"], ["made", "--fail", "stop"]]
