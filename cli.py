"""The command line, `sidestream COMMAND`, also as `python -m sidestream`: finds and runs a command.

A command is a module with two functions:

    add_parser(subparsers)    adds its parser and options, with `set_defaults(run=run)`
    run(options) -> int       does the work and returns the exit code

and has a row in `COMMANDS`. Those of `sidestream bench` are modules of bench/commands, listed in
its `__init__.py` in the same way. All the modules are imported for `--help`, so what takes long to
import had better wait until `run`. `options.arguments` are all arguments, as they were given.

Only the command that was named is imported: the ranks of `train` load nothing of `bench`.
"""

import argparse
import importlib
import io
import signal
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, cast

from .training.errors import UsageError
from .training.launch.interruption import Interrupted

EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "training.train_command",
        "doctor": "training.doctor",
        "schedule": "training.schedule_command",
        "inspect": "bench.commands.inspect",
        "bench": "bench.commands",
        "autotune": "bench.commands.autotune",
    }
)


class Command(Protocol):
    """The module of a command."""

    def add_parser(self, subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        """Add the command's parser, with its `run` as a default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 cannot be done as asked, 128 +
    signal interrupted.
    """
    _print_whatever_comes()
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser(arguments).parse_args(arguments, argparse.Namespace(arguments=arguments))
    try:
        return int(options.run(options))
    except UsageError as error:
        print(f"sidestream: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Interrupted as interrupted:
        print(f"sidestream: {interrupted}", file=sys.stderr)
        return 128 + interrupted.signal_number
    except KeyboardInterrupt:
        print("sidestream: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _print_whatever_comes() -> None:
    """Let no character end a command: names of files may be bytes in no encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that the arguments begin with; of all, where they name none."""
    parser = argparse.ArgumentParser(
        prog="sidestream", description="Sharded data-parallel training on Triton kernels."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    named = [name for name in arguments[:1] if name in COMMANDS]
    for name in named or COMMANDS:
        module = importlib.import_module(f".{COMMANDS[name]}", __package__)
        cast(Command, module).add_parser(subparsers)
    return parser
