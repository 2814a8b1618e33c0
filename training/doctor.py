"""`sidestream doctor`: shows what `diagnostics` found, as a table or as JSON, and says whether
training will run.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .diagnostics import Check, collect

STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "error": "bold red"}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor` and its option."""
    parser = subparsers.add_parser(
        "doctor", help="look at this machine and say what will be used, and why"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda options: run_doctor(as_json=options.json))


def run_doctor(*, as_json: bool = False) -> int:
    """Print all checks and return 1 if one of them would stop training, else 0."""
    checks = collect()
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        console = Console()
        console.print(table_of(checks))
        console.print(verdict(checks), highlight=False)
    return int(any(check.status == "error" for check in checks))


def table_of(checks: Sequence[Check]) -> Table:
    """Return the checks as a table; the fix stands below what was found."""
    table = Table(title="sidestream doctor", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.fix:
            found.append(f"\nfix: {check.fix}", style="bold")
        table.add_row(check.name, Text(check.status, style=STYLES[check.status]), found)
    return table


def verdict(checks: Sequence[Check]) -> str:
    """Return one sentence on whether training will run."""
    errors = [check.name for check in checks if check.status == "error"]
    warnings = [check.name for check in checks if check.status == "warning"]
    if errors:
        return f"Training will not run: {', '.join(errors)}."
    if warnings:
        return f"Training will run; look at: {', '.join(warnings)}."
    return "Training will run."
