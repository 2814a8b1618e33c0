"""Which cases are measured: what was asked for, checked against the table of all.

Nothing asked for: the standard cases. Formats or dtypes asked for: all that have them, also those
that are left out otherwise. Worlds asked for: the sums over so many ranks, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...kernels.case import Case
from ...kernels.cases import cases as all_cases
from ...training.errors import UsageError
from ..op_names import ops_named

MAX_WORLD = 1024


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What was asked for; None is all. Ops go by the names that `op_names` takes."""

    ops: tuple[str, ...] | None = None
    formats: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    worlds: tuple[int, ...] | None = None


def select(selection: Selection) -> list[Case]:
    """The cases asked for, at least one.

    Raises:
        UsageError: a name that is not known, or nothing that has all that was asked for.
    """
    for world in selection.worlds or ():
        if not 1 <= world <= MAX_WORLD:
            raise UsageError(f"--world: expected 1 to {MAX_WORLD}, got {world}; count the ranks")
    cases = all_cases(selection.worlds)
    ops = None
    if selection.ops is not None:
        ops = ops_named(selection.ops, (case.op for case in cases))
    _check("--format", selection.formats, [case.format for case in cases])
    _check("--dtype", selection.dtypes, [case.dtype for case in cases])
    wide = selection.formats is not None or selection.dtypes is not None
    chosen = [
        case
        for case in cases
        if (wide or case.standard)
        and (ops is None or case.op in ops)
        and (selection.formats is None or case.format in selection.formats)
        and (selection.dtypes is None or case.dtype in selection.dtypes)
        and (selection.worlds is None or case.world is not None)
    ]
    if not chosen:
        raise UsageError(
            f"expected a case that has all of {_describe(selection)}, got none; leave one out: "
            f"{_known(cases, ops)}"
        )
    return chosen


def _check(option: str, asked: Iterable[str] | None, known: Iterable[str]) -> None:
    names = list(dict.fromkeys(known))
    for name in asked or ():
        if name not in names:
            raise UsageError(
                f"{option}: expected one of {', '.join(sorted(names))}, got {name!r}; choose one"
            )


def _describe(selection: Selection) -> str:
    asked = {
        "op": selection.ops,
        "format": selection.formats,
        "dtype": selection.dtypes,
        "world": selection.worlds,
    }
    return " and ".join(
        f"{name} {', '.join(map(str, values))}" for name, values in asked.items() if values
    )


def _known(cases: Sequence[Case], ops: frozenset[str] | None) -> str:
    """The formats and dtypes that the ops asked for have."""
    having = [case for case in cases if ops is None or case.op in ops]
    formats = ", ".join(dict.fromkeys(case.format for case in having))
    dtypes = ", ".join(dict.fromkeys(case.dtype for case in having))
    sums = "some" if any(case.world for case in having) else "none"
    return f"formats {formats}; dtypes {dtypes}; {sums} of them sum over ranks"
