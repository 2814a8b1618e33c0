"""Whether a stored checkpoint fits a model and an optimizer, found from names and shapes alone.

Entries of optimizer state are of two kinds. Those of the parameter's shape (moments) are sharded
tensors, read in place; all others (step counters) are values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .reader import CheckpointReader

_COUNTER = "step"  # how torch's optimizers name the entry that is never shaped like the parameter


@dataclass(frozen=True, slots=True)
class StoredState:
    """What to read of a checkpoint that fits.

    `value_keys` are read whole; `entries` says for each parameter which entries of state it has: a
    meta tensor for one with the parameter's shape, None for any other. `groups` are the names in
    each parameter group of the optimizer to load into.
    """

    folder: str
    value_keys: tuple[str, ...]
    entries: dict[str, dict[str, Tensor | None]]
    groups: tuple[tuple[str, ...], ...]

    def moments(self) -> Iterator[tuple[str, str]]:
        """Every entry of state with its parameter's shape: its key, and the parameter's name."""
        for name, entries in self.entries.items():
            for entry, like in entries.items():
                if like is not None:
                    yield f"optim.state.{name}.{entry}", name

    def require_same_groups(self, values: Mapping[str, Any]) -> None:
        """Compare the parameter groups in `values`, read from the checkpoint, with the optimizer's.

        Raises:
            ValueError: a group holds other parameters.
        """
        lines: list[str] = []
        for number, names in enumerate(self.groups):
            saved = values["optim"]["param_groups"][number]["params"]
            if set(saved) != set(names):
                extra, lacking = sorted(set(saved) - set(names)), sorted(set(names) - set(saved))
                lines.append(f"parameter group {number}: missing {lacking}, unexpected {extra}")
        if lines:
            raise _misfit(self.folder, lines)


@dataclass(slots=True)
class _Problems:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        lines = [f"missing: {', '.join(self.missing)}"] if self.missing else []
        lines += [f"unexpected: {', '.join(self.unexpected)}"] if self.unexpected else []
        return lines + self.shapes

    def compare(self, key: str, expected: torch.Size, got: torch.Size | None) -> None:
        if got != expected:
            found = "no tensor" if got is None else f"{tuple(got)}"
            self.shapes.append(f"shape of {key}: expected {tuple(expected)}, got {found}")


def match(
    reader: CheckpointReader,
    model: Mapping[str, Any],
    optim: Mapping[str, Any] | None,
    defaults: Mapping[str, Any] | None,
) -> StoredState:
    """Compare the checkpoint with the state dict `model` and the named optimizer state `optim`.

    `defaults` are the options of the optimizer's class.

    Raises:
        ValueError: they differ; it lists every missing and unexpected name and wrong shape.
    """
    problems = _Problems()
    value_keys = _match_model(reader, model, problems)
    entries: dict[str, dict[str, Tensor | None]] = {}
    groups: tuple[tuple[str, ...], ...] = ()
    if optim is not None and defaults is not None:
        groups = tuple(tuple(group["params"]) for group in optim["param_groups"])
        value_keys += _match_groups(reader, len(groups), defaults, problems)
        shapes = {name: value.shape for name, value in model.items() if isinstance(value, Tensor)}
        entries = _match_state(reader, {name: shapes[name] for g in groups for name in g}, problems)
        value_keys += [
            f"optim.state.{name}.{entry}"
            for name, stored in entries.items()
            for entry, like in stored.items()
            if like is None
        ]
    if lines := problems.lines():
        raise _misfit(str(reader.folder), lines)
    return StoredState(str(reader.folder), tuple(value_keys), entries, groups)


def _misfit(folder: str, lines: list[str]) -> ValueError:
    return ValueError(
        f"checkpoint {folder} does not fit the model or the optimizer, and nothing was loaded:\n  "
        + "\n  ".join(lines)
    )


def _match_model(
    reader: CheckpointReader, model: Mapping[str, Any], problems: _Problems
) -> list[str]:
    """Returns the keys of what is no tensor (extra state of modules, which may be nested)."""
    stored: dict[str, list[str]] = {}
    for key in reader.keys_under("model"):
        stored.setdefault(str(reader.path_of(key)[1]), []).append(key)
    problems.unexpected += [key for name in stored.keys() - model.keys() for key in stored[name]]
    value_keys: list[str] = []
    for name, value in model.items():
        if name not in stored:
            if not (isinstance(value, Mapping) and not value):  # an empty one leaves no key
                problems.missing.append(f"model.{name}")
        elif isinstance(value, Tensor):
            problems.compare(f"model.{name}", value.shape, reader.shape_of(stored[name][0]))
        else:
            value_keys += stored[name]
    return value_keys


def _match_groups(
    reader: CheckpointReader, num_groups: int, defaults: Mapping[str, Any], problems: _Problems
) -> list[str]:
    # Options that are numbers tell optimizers apart; flags come and go with versions of PyTorch.
    needed = ["params"]
    needed += [
        option
        for option, value in defaults.items()
        if isinstance(value, (int, float, tuple)) and not isinstance(value, bool)
    ]
    keys = reader.keys_under("optim", "param_groups")
    stored = {reader.path_of(key)[2:4] for key in keys}
    for number in range(num_groups):
        for option in needed:
            if (number, option) not in stored:
                problems.missing.append(f"optim.param_groups.{number}.{option}")
    for key in keys:
        number_in_key = reader.path_of(key)[2]
        if not isinstance(number_in_key, int) or number_in_key >= num_groups:
            problems.unexpected.append(key)
    return keys


def _match_state(
    reader: CheckpointReader, shapes: Mapping[str, torch.Size], problems: _Problems
) -> dict[str, dict[str, Tensor | None]]:
    """Returns `StoredState.entries`."""
    stored: dict[str, dict[str, str]] = {name: {} for name in shapes}
    for key in reader.keys_under("optim", "state"):
        path = [str(part) for part in reader.path_of(key)[2:]]
        if len(path) == len(("name", "entry")) and path[0] in shapes:
            stored[path[0]][path[1]] = key
        else:
            problems.unexpected.append(key)
    # A 0-d parameter's moments look like counters: what an entry is, the other parameters tell.
    counters = {_COUNTER} | {
        entry
        for name, keys in stored.items()
        for entry, key in keys.items()
        if reader.shape_of(key) in (None, ()) and shapes[name] != ()
    }
    entries: dict[str, dict[str, Tensor | None]] = {}
    for name, shape in shapes.items():
        for entry, key in stored[name].items():
            like = None
            if entry not in counters:
                problems.compare(key, shape, reader.shape_of(key))
                like = torch.empty(shape, dtype=reader.dtype_of(key), device="meta")
            entries.setdefault(name, {})[entry] = like
    return entries
