"""How rows look: a table for each target, and what changed between two sets of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...kernels.ahead.machines import Gpu, Prediction, gpus_of
from .measuring import Row

NONE = "-"
HEADS = (
    *("registers", "spills", "shared", "occupancy", "loads", "stores", "instr", "integer"),
    "bytes",
)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The tables, a line at a time."""
    for target in dict.fromkeys(row.target for row in rows):
        yield from _target_lines(target, [row for row in rows if row.target == target])


def change_lines(before: Sequence[Row], after: Sequence[Row]) -> Iterator[str]:
    """What differs between rows of the same name, and which are on one side alone."""
    table = [("target", "op", "case", "", "before", "", "after")]
    old_rows, new_rows = ({row.key: row for row in rows} for rows in (before, after))
    for key in {**old_rows, **new_rows}:
        op, case, target = key
        for name, old, new in _changes(old_rows.get(key), new_rows.get(key)):
            table.append((target, op, case, name, old, "->", new))
    yield from _aligned(table) if len(table) > 1 else ("no case has changed",)


def _changes(before: Row | None, after: Row | None) -> Iterator[tuple[str, str, str]]:
    if before is None or after is None:
        yield "case", "absent" if before is None else "there", "there" if before is None else "gone"
        return
    gpus = gpus_of(after.target)
    names = [*HEADS, *(gpu.name for gpu in gpus)]
    for name, old, new in zip(names, _cells(before, gpus), _cells(after, gpus), strict=True):
        # A limit is no property of the code.
        old, new = old.partition("/")[0], new.partition("/")[0]
        if old != new:
            yield name, old, new


def _target_lines(target: str, rows: Sequence[Row]) -> Iterator[str]:
    gpus = gpus_of(target)
    yield f"{target}: {len(rows)} case{'s' if len(rows) > 1 else ''}"
    table = [("op", "case", *HEADS, *(gpu.name for gpu in gpus), "")]
    last = ""
    for row in rows:
        op = "" if row.op == last else row.op
        last = row.op
        over = "over its gate" if row.is_over_its_gate else ""
        table.append((op, row.case, *_cells(row, gpus), over))
    yield from _aligned(table)
    for gpu in gpus:
        yield _summary(gpu, rows)
    yield ""


def _cells(row: Row, gpus: Sequence[Gpu]) -> list[str]:
    predicted = {found.gpu: found for found in row.predictions}
    cells = [
        _limited(str(row.registers), row.register_limit),
        str(row.spill_bytes),
        str(row.shared_bytes),
        NONE if row.occupancy is None else f"{row.occupancy:.0%}",
        "+".join(map(str, row.load_bits)) or NONE,
        "+".join(map(str, row.store_bits)) or NONE,
        NONE
        if row.instructions is None
        else _limited(f"{row.instructions:.2f}", row.instruction_limit),
        NONE if row.integers is None else f"{row.integers:.2f}",
        f"{row.moved_bytes:.2f}",
    ]
    for gpu in gpus:
        found = predicted.get(gpu.name)
        cells.append(NONE if found is None else _predicted(found))
    return cells


def _predicted(found: Prediction) -> str:
    bound = "instr" if found.bound == "instructions" else found.bound
    return f"{bound} {found.share:.2f} {max(found.issued, found.integers):.0%}"


def _limited(value: str, limit: float | None) -> str:
    return value if limit is None else f"{value}/{limit:g}"


def _summary(gpu: Gpu, rows: Sequence[Row]) -> str:
    found = [(row, said) for row in rows for said in row.predictions if said.gpu == gpu.name]
    bound = [(row, said) for row, said in found if said.bound != "bytes"]
    head = (
        f"{gpu.name} ({gpu.multiprocessors} SMs, {gpu.clock_ghz:g} GHz, "
        f"copy {gpu.copy_gb_s:,.0f} GB/s): "
    )
    if not bound:
        return f"{head}none of {len(found)} is bound by its instructions or integers"
    row, said = min(bound, key=lambda pair: pair[1].share)
    return (
        f"{head}{len(bound)} of {len(found)} bound by instructions or integers; "
        f"the lowest share of a copy's rate is {said.share:.2f}, {row.op} {row.case}"
    )


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield "  ".join(padded).rstrip()
