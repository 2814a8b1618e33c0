"""The comparison of a report with an earlier one of the same machine; all of it is pure.

A row of ours has become slower if all of this holds; each alone happens to the same code too:

    its median is more than 15 % above that of the baseline
    their spreads do not touch: now its 10 % quantile is above the 90 % quantile of then
    its share of the copy's rate has fallen by as much: the machine is not slower as a whole

Rivals' ratios are printed, and nobody fails for them. Times that were taken by different methods
have no ratio. A baseline that no row of ours can be held against is refused; what one of the two
lacks is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .kernel_cases.competitors import OURS
from .reports import Report, ReportError, Row, read_report

LIMIT = 1.15
RULE = (
    f"slower: more than {LIMIT - 1:.0%} above the baseline's median, spreads apart, and share of "
    "the copy's rate down by as much"
)
# What must be equal for two times to be comparable.
_SAME_MACHINE = ("device", "threads")

Key = tuple[str, int, str, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row beside the same row of the baseline; `ratio` is its median by that of then."""

    row: Row
    ratio: float
    slower: bool


def read_baseline(path: Path, machine: Mapping[str, object]) -> Report:
    """The report at `path`, of a machine like this one.

    Raises:
        ReportError: it cannot be read, or was measured on another device.
    """
    baseline = read_report(path)
    for name in _SAME_MACHINE:
        if baseline.machine.get(name) != machine.get(name):
            raise ReportError(
                f"--baseline: expected {name} {machine.get(name)!r} as here, got "
                f"{baseline.machine.get(name)!r} in {path}; measure a baseline on this machine"
            )
    return baseline


def require_comparable(asked: Sequence[tuple[str, int]], baseline: Report, path: str) -> None:
    """Refuse a baseline with none of the cases and sizes that were asked for.

    Raises:
        ReportError: there is nothing to compare.
    """
    if _ours(baseline.rows).keys().isdisjoint(asked):
        case, numel = asked[0]
        (before, *_) = sorted({row.case for row in baseline.rows}) or ["no case"]
        raise ReportError(
            f"--baseline: expected a row of what is to be measured, such as {case} of {numel} "
            f"elements, got none in {path}; ask for what it has, such as {before}, by: "
            f"{baseline.command}; where cases have other names now, measure it again"
        )


def compare(rows: Iterable[Row], baseline: Sequence[Row]) -> list[Comparison]:
    """Each of `rows` that the baseline has too."""
    earlier = {_key(row): row for row in baseline}
    return [_compare(row, earlier[_key(row)]) for row in rows if _key(row) in earlier]


def passes(rows: Iterable[Row], baseline: Sequence[Row]) -> bool:
    """Whether some row of ours could be compared, and none is slower."""
    ours = [one for one in compare(rows, baseline) if one.row.candidate == OURS]
    return bool(ours) and not any(one.slower for one in ours)


def _ours(rows: Iterable[Row]) -> dict[tuple[str, int], Row]:
    """Rows of ours by case and size."""
    return {(row.case, row.numel): row for row in rows if row.candidate == OURS}


def _key(row: Row) -> Key:
    return row.case, row.numel, row.candidate, row.method


def _compare(row: Row, before: Row) -> Comparison:
    ratio = row.median_us / before.median_us
    slower = (
        row.candidate == OURS
        and ratio > LIMIT
        and row.low_us > before.high_us
        and row.percent_of_copy * LIMIT < before.percent_of_copy
    )
    return Comparison(row, ratio, slower)


def format_comparison(rows: Sequence[Row], baseline: Report) -> str:
    """The ratios, ours and rivals', what of ours has none, and what became of the rule."""
    found = compare(rows, baseline.rows)
    lines = [f"\nbeside {baseline.command} of {baseline.date}, medians: now by then"]
    lines.append(f"{'case':<44} {'elements':>10} {'candidate':<24} {'ratio':>7}")
    for one in found:
        row, verdict = one.row, "  SLOWER" if one.slower else ""
        lines.append(
            f"{row.case:<44} {row.numel:>10} {row.candidate:<24} {one.ratio:7.3f}{verdict}"
        )
    now, then = _ours(rows), _ours(baseline.rows)
    for word, only in (("now", now.keys() - then.keys()), ("then", then.keys() - now.keys())):
        lines += [f"{case:<44} {numel:>10} only {word}" for case, numel in sorted(only)]
    slower = sum(one.slower for one in found)
    lines.append(f"{slower} of {len(found)} rows slower ({RULE})")
    return "\n".join(lines)
