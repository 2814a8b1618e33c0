"""The result of a benchmark of kernels: its rows, its JSON document, its CSV and its table.

    {"schema_version": 1, "kind": "kernels", "date": ..., "command": ..., "machine": {...},
     "settings": {...}, "rows": [...], "wrong": [...], "notes": [...]}

`Row` says what a row holds, `bench.machine` what a machine is. `schema_version` goes up when a
reader of the old documents would misread the new ones.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..training.errors import UsageError
from .machine import describe

SCHEMA_VERSION = 1
KIND = "kernels"
_MEASURED = (
    "median_us", "low_us", "high_us", "gb_per_s", "copy_gb_per_s", "percent_of_copy", "numel",
)  # fmt: skip
_WORDS = ("case", "op", "format", "dtype", "candidate", "method", "baseline")
_MOST = 1e30  # more than any of these can be, and still a float
# What is read of a machine; GPUs have more.
_MACHINE_FIELDS = ("device", "threads", "torch", "triton", "commit")
CPU_METHOD, GRAPH_METHOD, EVENTS_METHOD = "perf_counter", "CUDA graph", "CUDA events"


class ReportError(UsageError):
    """A file that is no result of the benchmark, or of another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate of one case at one size.

    num_bytes: what any implementation must move, by the op's cost model. median_us, low_us,
    high_us: of the samples, the last two their 10 % and 90 % quantiles. percent_of_copy: its rate
    by that of a copy of as many bytes, timed in turn with it and alike, which is copy_gb_per_s.
    method: the clock. rotated: over how many sets of operands it went; cold: whether all of them
    are more than the last cache holds. target_percent: what percent_of_copy is to be on this GPU,
    of ours alone. baseline: what made the copy, or where nearly nothing is written only read.
    """

    case: str
    op: str
    format: str
    dtype: str
    world: int | None
    numel: int
    num_bytes: int
    candidate: str
    median_us: float
    low_us: float
    high_us: float
    num_samples: int
    gb_per_s: float
    copy_gb_per_s: float
    percent_of_copy: float
    target_percent: float | None
    method: str
    rotated: int
    cold: bool
    baseline: str = "copy"

    @property
    def target(self) -> float | None:
        """`target_percent` where it counts, which is on a GPU."""
        return None if self.method == CPU_METHOD else self.target_percent

    @property
    def is_below_target(self) -> bool:
        """Whether it has a target, on the device that it ran on, and misses it."""
        return self.target is not None and self.percent_of_copy < self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of one run. wrong: cases whose results are not as defined, and so have no times."""

    date: str
    command: str
    machine: Mapping[str, str | int | None]
    settings: Mapping[str, float]
    rows: tuple[Row, ...]
    wrong: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION
    kind: str = KIND

    def content(self) -> dict[str, Any]:
        """The document."""
        return dataclasses.asdict(self)

    def as_csv(self) -> str:
        """The rows under the names of their fields."""
        text = io.StringIO()
        names = [field.name for field in dataclasses.fields(Row)]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in self.rows)
        return text.getvalue()


def read_report(path: Path) -> Report:
    """The document in the file at `path`.

    Raises:
        ReportError: there is no such file, it is damaged, or of another kind or version.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(
            f"expected a report at {path}, got {error.strerror}; write one with --json"
        ) from None
    except ValueError as error:
        raise ReportError(
            f"{path}: expected JSON, got a damaged file ({error}); write one with --json"
        ) from None
    kind = found.get("kind") if isinstance(found, dict) else type(found).__name__
    if kind != KIND:
        raise ReportError(
            f"{path}: expected a report of kind {KIND!r}, got {kind!r}; pass one that "
            "`sidestream bench kernels --json` wrote"
        )
    if found.get("schema_version") != SCHEMA_VERSION:
        raise ReportError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, got {found.get('schema_version')}; "
            "measure it again with this version"
        )
    try:
        rows = tuple(_read_row(row) for row in found.pop("rows"))
        for name in ("wrong", "notes"):
            found[name] = tuple(found[name])
        _require_machine(found["machine"])
        _require_settings(found["settings"])
        return Report(rows=rows, **found)
    except (KeyError, TypeError) as error:
        raise ReportError(
            f"{path}: expected the fields of a report, got a file without them ({error}); write "
            "one with --json"
        ) from None


def _read_row(found: object) -> Row:
    """Raises TypeError where it does not have a row's fields, or no measured value in one."""
    row = Row(**_mapping("a row", found))
    for name in _WORDS:
        if not isinstance(getattr(row, name), str):
            raise TypeError(f"{name} of a row is {getattr(row, name)!r:.80}, no text")
    for name in _MEASURED:
        value = getattr(row, name)
        if not (type(value) in (int, float) and 0 < value < _MOST):
            raise TypeError(f"{name} of {row.case} is {value!r:.80}, no positive number")
    return row


def _require_machine(machine: object) -> None:
    """Raises TypeError where it is no mapping with all that is read of it."""
    machine = _mapping("machine", machine)
    missing = [name for name in _MACHINE_FIELDS if name not in machine]
    if missing:
        raise TypeError(f"machine has no {', '.join(missing)}")


def _require_settings(settings: object) -> None:
    """Raises TypeError where it is no mapping of names to numbers."""
    for name, value in _mapping("settings", settings).items():
        if not isinstance(value, int | float):
            raise TypeError(f"{name} of settings is {value!r:.80}, no number")


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {type(value).__name__}, no mapping")
    return value


def format_table(report: Report, peak_gb_per_s: float | None = None) -> str:
    """The printed table, what was wrong and what was left out; with a column more where the data
    sheet's rate of the memory is known.
    """
    machine = report.machine
    threads = f", threads: {machine['threads']}" if machine["threads"] else ""
    peak = "" if peak_gb_per_s is None else f"; % peak: of the data sheet's {peak_gb_per_s:g} GB/s"
    lines = [
        f"kernels on {machine['device']}{threads}, torch {machine['torch']}, "
        f"triton {machine['triton']}, commit {machine['commit']}",
        "us a call: median [10 %, 90 %] of the samples; % copy: of the rate of the fastest copy of "
        f"as many bytes, of a read for what writes next to nothing{peak}",
        f"{'case':<44} {'elements':>10} {'candidate':<23} {'us':>9} {'spread':>19} {'GB/s':>8} "
        f"{'copy':>8} {'% copy':>7} {'target':>7}" + (f" {'% peak':>7}" if peak else ""),
    ]
    for row in report.rows:
        target = "" if row.target is None else f"{row.target:.0f}"
        share = f" {100.0 * row.gb_per_s / peak_gb_per_s:7.1f}" if peak_gb_per_s else ""
        lines.append(
            f"{row.case:<44} {row.numel:>10} {row.candidate:<23} {row.median_us:9.1f} "
            f"{f'[{row.low_us:.1f}, {row.high_us:.1f}]':>19} {row.gb_per_s:8.2f} "
            f"{row.copy_gb_per_s:8.2f} {row.percent_of_copy:7.1f} {target:>7}{share}"
        )
    lines += [f"note: {note}" for note in [*report.notes, *remarks(report.rows)]]
    lines += [f"WRONG, so not timed: {fault}" for fault in report.wrong]
    return "\n".join(lines)


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the reader of a figure must know of how it came about."""
    warm = dict.fromkeys(f"{row.case}, {row.numel}" for row in rows if not row.cold)
    hosts = [f"{row.candidate} of {row.case}" for row in rows if row.method == EVENTS_METHOD]
    remarks = []
    if any(row.method == CPU_METHOD for row in rows):
        remarks.append(
            "on a CPU ours is the definition in plain PyTorch; targets are for GPUs only"
        )
    if warm:
        remarks.append(f"too small to leave the cache between calls: {'; '.join(warm)}")
    if hosts:
        remarks.append(
            "not in a CUDA graph, host's time included, and beside a copy that is launched alike: "
            + "; ".join(hosts)
        )
    return remarks


def document(
    kind: str, arguments: Sequence[str], device: torch.device, *, schema_version: int = 1
) -> dict[str, Any]:
    """What every result begins with, of now. arguments: of the command line."""
    return {
        "schema_version": schema_version,
        "kind": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["sidestream", *arguments]),
        "machine": describe(device),
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a document, as `write_text` does."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write all of the file or nothing; in place where it cannot be replaced by another file.

    Raises:
        UsageError: the disk is full, or the like.
    """
    try:
        _write_text(path, text)
    except OSError as error:
        raise UsageError(
            f"{path}: expected room for {len(text)} characters, got {error.strerror}; give "
            "another path"
        ) from error


def _write_text(path: Path, text: str) -> None:
    if not _is_replaceable(path):
        path.write_text(text)
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _is_replaceable(path: Path) -> bool:
    """Whether it is no device, pipe or link, as /dev/null and /dev/stdout are, and in a folder that
    takes new files.
    """
    is_file = not path.is_symlink() and (path.is_file() or not path.exists())
    return is_file and os.access(path.absolute().parent, os.W_OK)
