"""`sidestream bench WHAT`: the group of all that is timed; one module of this folder each.

To add one, write `bench/commands/<name>.py` with `add_parser(subparsers)` and `run(options) -> int`
as `sidestream.cli` says, and add its name to `GROUP`. Modules of this folder that are commands by
themselves, such as `inspect`, have a row in `cli.COMMANDS` instead.
"""

import argparse
import importlib

GROUP = ("kernels", "report", "host", "step", "overlap", "network", "convergence")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench` with all of `GROUP` below it."""
    parser = subparsers.add_parser("bench", help="time kernels, host and steps, beside the rivals")
    group = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name in GROUP:
        importlib.import_module(f".{name}", __name__).add_parser(group)
    for command in group.choices.values():
        # Examples in a description have lines of their own.
        command.formatter_class = argparse.RawDescriptionHelpFormatter
