"""Owns what a figure compares: the candidates of one case, each by size, and the copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..kernel_cases.case import OURS
from ..reports import Row

BYTES_PER_US_IN_A_GB_PER_S = 1e3
_SUFFIXES = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))
_FEW = 10.0  # of a unit have a digit after the point


@dataclass(frozen=True, slots=True)
class Group:
    """One case of an op: its rows by candidate, ours first, each by ascending size."""

    case: str
    op: str
    candidates: Mapping[str, tuple[Row, ...]]

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return tuple(row for rows in self.candidates.values() for row in rows)

    @property
    def copies(self) -> dict[int, float]:
        """GB/s of the copy by the case's elements, ascending."""
        found = {row.numel: row.copy_gb_per_s for row in self.rows}
        return dict(sorted(found.items()))

    @property
    def has_sizes(self) -> bool:
        """Whether a curve can be drawn through more than one point."""
        return len(self.copies) > 1


def groups_of(rows: Iterable[Row]) -> tuple[Group, ...]:
    """The cases in the order of their first rows; a size measured twice counts as it was first."""
    cases: dict[tuple[str, str], dict[str, dict[int, Row]]] = {}
    for row in rows:
        sizes = cases.setdefault((row.op, row.case), {}).setdefault(row.candidate, {})
        sizes.setdefault(row.numel, row)
    return tuple(
        Group(
            case,
            op,
            {
                name: tuple(sorted(candidates[name].values(), key=lambda row: row.numel))
                for name in sorted(candidates, key=lambda name: name != OURS)
            },
        )
        for (op, case), candidates in cases.items()
    )


def by_op(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """The cases of each op."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.op, []).append(group)
    return found


def styles_of(groups: Iterable[Group]) -> dict[str, int]:
    """A number for each candidate of an op's cases, 0 for ours: its colour and its marker."""
    names = dict.fromkeys([OURS, *(name for group in groups for name in group.candidates)])
    return {name: number for number, name in enumerate(names)}


def largest(rows: Iterable[Row]) -> list[Row]:
    """Of each case and candidate the row of its largest size."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row.numel):
        found[row.op, row.case, row.candidate] = row
    return list(found.values())


def rates(row: Row) -> tuple[float, float]:
    """GB/s at the 90 % and the 10 % quantile of the times, the lower one first."""
    low, high = (
        row.num_bytes / time_us / BYTES_PER_US_IN_A_GB_PER_S
        for time_us in (row.high_us, row.low_us)
    )
    return low, high


def shares(row: Row) -> tuple[float, float]:
    """Its percentage of the copy at the same two times."""
    return (
        row.percent_of_copy * row.median_us / row.high_us,
        row.percent_of_copy * row.median_us / row.low_us,
    )


def is_below_target(row: Row) -> bool:
    """Whether it has a target, on the device that it ran on, and misses it."""
    return row.target is not None and row.percent_of_copy < row.target


def size_text(numel: int) -> str:
    """Such as 16K, 1.5M or 208M: what was asked for, about."""
    for unit, suffix in _SUFFIXES:
        if numel >= unit:
            count = numel / unit
            return f"{round(count, 1 if count < _FEW else 0):g}{suffix}"
    return str(numel)


def labels_apart(sizes: Sequence[int], most: int) -> list[int]:
    """At most `most` of the sizes, evenly, the last one among them: for the marks of an axis."""
    step = -(-len(sizes) // most)
    return list(sizes[::-1][::step])[::-1]
