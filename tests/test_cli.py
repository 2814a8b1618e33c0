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


@pytest.fixture(scope="module")
def loaded():
    """The modules that are there after the import, and after some help as well, in one process."""
    script = (
        "import contextlib, json, sys\n"
        "import sidestream\n"
        "loaded = {'import': [*sys.modules]}\n"
        "from sidestream import cli\n"
        "for command in ('train', ''):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):\n"
        "        cli.main([*command.split(), '--help'])\n"
        "    loaded[command] = [*sys.modules]\n"
        "print(json.dumps(loaded))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return {name: set(modules) for name, modules in json.loads(found.stdout).items()}


def test_the_import_leaves_out_what_is_slow_and_seldom_needed(loaded):
    assert "torch" in loaded["import"]
    slow = {"torch.distributed.checkpoint", "torch.distributed.tensor", "sympy", "triton"}
    assert not (slow | {"fsspec"}) & loaded["import"]


def test_training_loads_nothing_of_the_layer_above(loaded):
    """Every rank of a run starts with this import."""
    assert "sidestream.training.train_command" in loaded["train"]
    assert not [name for name in loaded["train"] if name.startswith("sidestream.bench")]


def test_help_loads_neither_the_rivals_nor_the_compiler(loaded):
    assert "sidestream.bench.commands.step" in loaded[""]
    slow = {"sidestream.bench.rivals", "torch.distributed.fsdp", "sympy", "triton"}
    assert not slow & loaded[""]


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
