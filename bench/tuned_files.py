"""The writing of tuned tables: into which file, beside what stands there, and all at once.

    {"schema_version": 1, "kind": "tuned", "date": ..., "command": ..., "machine": {...},
     "device": ..., "triton": ...,
     "entries": [{"op", "case", "block_bytes", "num_warps", "date", "measured", "numel",
                  "default": {...}, "candidates": [{..., "fate", "median_us", "ratio", ...}]}]}

`kernels.tuned` reads version, kind, device, triton and an entry's first four; all else is for
people. Entries of cases that were not tuned this time stay, unless their file is for another
version or device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..kernels import LaunchConfig, tuned
from ..training.errors import UsageError
from ..training.paths import require_writable_file, require_writable_folder
from . import reports
from .kernel_table import spread
from .sweep import Sweep, Trial
from .tuning import Look, Resources, Tunable, reason

USER, PACKAGE = "user", "package"
OPTION = "--to"

Entry = dict[str, Any]


def destination(to: str, name: str) -> Path:
    """The file of the device called `name` in the folder `to`: "user", "package", or a path.

    Makes the folder. Raises `UsageError` where nothing can be written.
    """
    folders = {USER: tuned.user_folder(), PACKAGE: tuned.PACKAGE_FOLDER}
    folder = folders.get(to, Path(to))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"expected a folder for {OPTION}, got the file {folder}; name a folder")
    require_writable_folder(str(folder), OPTION)
    path = folder / tuned.file_name(name)
    require_writable_file(str(path), OPTION)
    return path


def kept_entries(path: Path, name: str, triton: str) -> tuple[list[Entry], str | None]:
    """The entries of a file that stay as they are, and why none do, where that has a reason."""
    if not path.exists():
        return [], None
    try:
        tuned.read_entries(path, name, triton)
        return list(tuned.read_document(path)["entries"]), None
    except tuned.TableError as error:
        return [], f"{path} is made anew: {error}"


def overruling(path: Path, name: str) -> list[str]:
    """What other files say that launches would follow instead, for the device called `name`."""
    read = [str(found) for found in tuned.paths_of(name)]
    if str(path) not in read:
        return [f"launches do not read it; set {tuned.VARIABLE}={path.parent}"]
    later = read[read.index(str(path)) + 1 :]
    return [f"what {found} says comes before it" for found in later]


def head(device: torch.device, arguments: Sequence[str]) -> dict[str, Any]:
    """What a table says of where it comes from. arguments: of the command line."""
    return {
        **reports.document(tuned.KIND, arguments, device, schema_version=tuned.SCHEMA_VERSION),
        "device": tuned.device_name(device),
        "triton": tuned.triton_version(),
    }


def entry_of(
    tunable: Tunable, found: Sweep, looks: Mapping[LaunchConfig, Look], *, numel: int
) -> Entry:
    """What a table says of one tunable, of which a configuration was chosen."""
    assert found.chosen is not None
    return {
        "op": tunable.op,
        "case": tunable.key,
        **_numbers(found.chosen),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "measured": tunable.case.full_name,
        "numel": tunable.case.numel(numel),
        "default": _numbers(tunable.default),
        "candidates": [_candidate(trial, looks.get(trial.config)) for trial in found.trials],
    }


def _numbers(config: LaunchConfig) -> dict[str, int]:
    return {"block_bytes": config.block_bytes, "num_warps": config.num_warps}


def _candidate(trial: Trial, look: Look | None) -> dict[str, Any]:
    times: dict[str, Any] = {}
    if trial.samples:
        median, low, high = (1e6 * seconds for seconds in spread(trial.samples))
        times = {
            "median_us": median,
            "low_us": low,
            "high_us": high,
            "num_samples": len(trial.samples),
            "ratio": trial.score,
        }
    resources = asdict(look) if isinstance(look, Resources) else {}
    return {**_numbers(trial.config), "fate": trial.fate, **times, **resources}


def document(
    kept: Sequence[Entry], new: Sequence[Entry], head: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole table: new entries in the place of old ones of the same cases."""
    entries = {(entry["op"], entry["case"]): entry for entry in (*kept, *new)}
    return {**head, "entries": [entries[key] for key in sorted(entries)]}


def as_listing(
    tunables: Sequence[Tunable],
    looks: Mapping[tuple[str, str], Mapping[LaunchConfig, Look]],
    target: str,
) -> dict[str, Any]:
    """What --dry-run found, for a file."""
    return {
        "schema_version": tuned.SCHEMA_VERSION,
        "kind": "candidates",
        "target": target,
        "rows": [
            {
                "op": one.op,
                "case": one.key,
                **_numbers(config),
                **(asdict(look) if isinstance(look, Resources) else {}),
                "reason": reason(look),
            }
            for one in tunables
            for config, look in looks[one.op, one.key].items()
        ],
    }
