"""What an option of `sidestream train` is: a field of a dataclass that says its help, what it can
be and what it needs; the parser and the checks follow from it.

    steps: int = option(200, "optimizer steps", group=RUN, metavar="N", least=1, defines=True)
"""

import argparse
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from .errors import OptionsError

MAX_COUNT = 2**31 - 1
_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a field is as an option.

    group: the heading of its help. kind: what text becomes; bool: a flag. choices: all it can be.
    least, most, above, below: its range, where it is a number. is_path: not "", and `~` is the home
    folder. needs: the option without which it means nothing. defines: it decides the numbers of the
    run, not only how they are computed, so a checkpoint resumes only a run that agrees in it.
    both_ways: a flag that can also be denied.
    """

    text: str
    group: str
    kind: type = str
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    is_path: bool = False
    needs: str | None = None
    defines: bool = False
    both_ways: bool = False


def option(default: Any, text: str, **what: Any) -> Any:
    """A field of an options dataclass, with all that `Option` says of it."""
    return field(default=default, metadata={_KEY: Option(text=text, **what)})


def count(default: int | None, text: str, *, group: str, metavar: str = "N", **what: Any) -> Any:
    """A field that counts something, from 1 on where `what` says nothing else."""
    bounds = {"least": 1, "most": MAX_COUNT} | what
    return option(default, text, group=group, kind=int, metavar=metavar, **bounds)


def flag(name: str) -> str:
    """Return the command-line spelling of an option's name."""
    return "--" + name.replace("_", "-")


def options_of(kind: type) -> Iterator[tuple[str, Any, Option]]:
    """The name, the default and the `Option` of each field of a dataclass."""
    for one in fields(kind):
        assert one.default is not MISSING, f"{one.name} has no default"
        yield one.name, one.default, one.metadata[_KEY]


def add_arguments(
    parser: argparse.ArgumentParser, kind: type, groups_in_order: Sequence[str] = ()
) -> None:
    """Declare every option of `kind` on the parser, with the same defaults, under its group."""
    every = [*groups_in_order, *(what.group for _, _, what in options_of(kind))]
    groups = {group: parser.add_argument_group(group) for group in dict.fromkeys(every)}
    for name, default, what in options_of(kind):
        shown = f" (default: {default})" if default not in (None, False) else ""
        groups[what.group].add_argument(
            flag(name), default=default, help=what.text + shown, **_keywords(what)
        )


def values_from(namespace: argparse.Namespace, kind: type) -> dict[str, Any]:
    """What a parser with `add_arguments` read, by name.

    Raises:
        OptionsError: a path in the home folder of nobody.
    """
    return {
        name: _expanded(name, getattr(namespace, name))
        if what.is_path
        else getattr(namespace, name)
        for name, _, what in options_of(kind)
    }


def check_each(options: Any) -> None:
    """Refuse what no option may be by itself, or without the one it needs.

    Raises:
        OptionsError: it says what was expected, what came and the fix.
    """
    for name, default, what in options_of(type(options)):
        value = getattr(options, name)
        if what.is_path and value == "":
            raise OptionsError(f"expected a path for {flag(name)}, got ''; name it or leave it out")
        if what.choices is not None and value not in (default, *what.choices):
            raise OptionsError(
                f"expected {flag(name)} among {what.choices}, got {value!r}; pass one of these"
            )
        if value is not None:
            _require_in_range(name, value, what)
        if what.needs is not None and value not in (None, default):
            _require_beside(name, what.needs, options)


def _keywords(what: Option) -> Mapping[str, Any]:
    if what.both_ways:
        return {"action": argparse.BooleanOptionalAction}
    if what.kind is bool:
        return {"action": "store_true"}
    if what.choices is not None:
        return {"type": what.kind, "choices": [one for one in what.choices if one is not None]}
    return {"type": what.kind, "metavar": what.metavar}


def _require_in_range(name: str, value: Any, what: Option) -> None:
    bounds = (
        (">=", what.least, operator.ge, "larger"),
        (">", what.above, operator.gt, "larger"),
        ("<=", what.most, operator.le, "smaller"),
        ("<", what.below, operator.lt, "smaller"),
    )
    for sign, bound, holds, fix in bounds:
        if bound is None or holds(value, bound):  # of NaN nothing holds
            continue
        if bound == math.inf:
            sign, bound = next((sign, bound) for sign, bound, _, _ in bounds if bound is not None)
        finite = "a finite " if what.below == math.inf else ""
        raise OptionsError(
            f"expected {finite}{flag(name)} {sign} {bound}, got {value}; pass a {fix} number"
        )


def _require_beside(name: str, needed: str, options: Any) -> None:
    if getattr(options, needed) in (None, False):
        metavar = next(what.metavar for one, _, what in options_of(type(options)) if one == needed)
        raise OptionsError(
            f"expected {flag(needed)}{f' {metavar}' if metavar else ''} beside {flag(name)}, got "
            f"none; give both, or leave out {flag(name)}"
        )


def _expanded(name: str, path: str | None) -> str | None:
    """`path` with the home folder in place of `~`: a shell leaves it in --json=~/result.json."""
    expanded = None if path is None else os.path.expanduser(path)
    if expanded is not None and expanded.startswith("~"):
        raise OptionsError(
            f"expected the home folder of a user behind ~ in {flag(name)}, got {path}, which is "
            f"nobody's; for a file of this name pass ./{path}"
        )
    return expanded
