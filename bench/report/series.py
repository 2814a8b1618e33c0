"""What a figure compares: the candidates of one case, each by size, and the copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..kernel_cases.competitors import OURS
from ..reports import Row

BYTES_PER_US_IN_A_GB_PER_S = 1e3
_SUFFIXES = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))
_FEW = 10.0  # of a unit have a digit after the point
_NUM_COLOURS = 6
# matplotlib's markers, and the same as characters, for legends.
_MARKERS = "os^DvPX"
_SIGNS = "\u25cf\u25a0\u25b2\u25c6\u25bc\u271a\u2716"


@dataclass(frozen=True, slots=True)
class Style:
    """How one candidate is drawn: the name of its colour, matplotlib's marker, and its sign."""

    colour: str
    marker: str
    sign: str


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
    def largest(self) -> Row | None:
        """Ours at its largest size."""
        return self.candidates[OURS][-1] if OURS in self.candidates else None

    @property
    def copies(self) -> dict[int, float]:
        """GB/s of the copy by the case's elements, ascending: of each the one beside ours."""
        found = {row.numel: row.copy_gb_per_s for row in reversed(self.rows)}
        return dict(sorted(found.items()))

    @property
    def has_sizes(self) -> bool:
        """Whether a curve can be drawn through more than one point."""
        return len(self.copies) > 1


def groups_of(rows: Iterable[Row]) -> dict[str, list[Group]]:
    """The cases by op, in the order of their first rows; a size measured twice counts as it was
    first.
    """
    cases: dict[tuple[str, str], dict[str, dict[int, Row]]] = {}
    for row in rows:
        sizes = cases.setdefault((row.op, row.case), {}).setdefault(row.candidate, {})
        sizes.setdefault(row.numel, row)
    groups: dict[str, list[Group]] = {}
    for (op, case), found in cases.items():
        candidates = {
            name: tuple(sorted(found[name].values(), key=lambda row: row.numel))
            for name in sorted(found, key=lambda name: name != OURS)
        }
        groups.setdefault(op, []).append(Group(case, op, candidates))
    return groups


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name, in their order; after some, colours and markers come again."""
    return {
        name: Style(
            f"series-{number % _NUM_COLOURS}",
            _MARKERS[number % len(_MARKERS)],
            _SIGNS[number % len(_SIGNS)],
        )
        for number, name in enumerate(dict.fromkeys(names))
    }


def rates(row: Row) -> tuple[float, float]:
    """GB/s at the 90 % and the 10 % quantile of the times, the lower one first."""
    low, high = (
        row.num_bytes / time_us / BYTES_PER_US_IN_A_GB_PER_S
        for time_us in (row.high_us, row.low_us)
    )
    return low, high


def shares(row: Row) -> tuple[float, float]:
    """Its percentage of the copy at the same two times."""
    share_us = row.percent_of_copy * row.median_us
    return share_us / row.high_us, share_us / row.low_us


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
