"""Which cases and targets are looked at, by what was asked for; unknown names are told.

Where no case is named: those that have a gate, and those that the benchmark measures unasked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...kernels.ahead.compile import TARGETS
from ...kernels.case import Case
from ...kernels.cases import cases
from ...training.errors import UsageError
from ..op_names import ops_named

ALL = "all"
MAX_NAMES = 20


class SelectionError(UsageError):
    """A case or a target that there is not, or more than one where one is needed."""


def targets_of(text: str) -> tuple[str, ...]:
    """The targets in a list with commas, or all of them.

    Raises:
        SelectionError: a name that is none.
    """
    if text == ALL:
        return tuple(TARGETS)
    found = tuple(dict.fromkeys(text.split(",")))
    for target in found:
        if target not in TARGETS:
            known = ", ".join(TARGETS)
            raise SelectionError(
                f"--arch: expected some of {known}, or {ALL}, got {target!r}; choose of these"
            )
    return found


def cases_of(ops: Iterable[str] | None, text: str | None) -> tuple[Case, ...]:
    """The cases of the ops called `ops` whose names contain `text`; by default the usual ones.

    Raises:
        UsageError: a name that is none, or no case with that text.
    """
    found = cases()
    if ops is not None:
        wanted = ops_named(ops, (case.op for case in found))
        found = tuple(case for case in found if case.op in wanted)
    if text is None:
        return tuple(case for case in found if case.gate is not None or case.standard)
    selected = tuple(case for case in found if text in case.name)
    if not selected:
        raise SelectionError(
            f"--case: expected a part of a case's name, got {text!r}; choose of {_names(found)}"
        )
    return selected


def only_case(found: Sequence[Case], text: str | None, option: str) -> Case:
    """The one case that is left; or of several, the one whose whole name is `text`.

    Raises:
        SelectionError: there are several.
    """
    exact = [case for case in found if case.name == text]
    left = exact if len(exact) == 1 else found
    if len(left) > 1:
        raise SelectionError(
            f"{option}: expected one case, got {len(left)}: {_names(left)}; "
            "choose one with --op and --case"
        )
    return left[0]


def only_target(targets: Sequence[str], option: str) -> str:
    """The one target.

    Raises:
        SelectionError: there are several.
    """
    if len(targets) > 1:
        raise SelectionError(f"{option}: expected one --arch, got {', '.join(targets)}; leave one")
    return targets[0]


def _names(cases: Sequence[Case]) -> str:
    names = [f"{case.op} {case.name!r}" for case in cases[:MAX_NAMES]]
    return ", ".join(names) + (", ..." if len(cases) > MAX_NAMES else "")
