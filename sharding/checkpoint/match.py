"""Whether a stored checkpoint fits a model and an optimizer, found from names and shapes alone.

Entries of optimizer state are of two kinds. Those of the parameter's shape (moments) are sharded
tensors, read in place; all others (step counters) are values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor

from ..messages import listed
from ..optim.state import SCALAR_STATE
from ..untrusted import shown
from .stored import BadCheckpoint, Key, KeyPath, Stored

Entries = dict[str, dict[str, Tensor | None]]


@dataclass(frozen=True, slots=True)
class FittingState:
    """What to read of a checkpoint that fits.

    `model_tensors` are names of parameters and buffers. `value_keys` are read whole. `entries` says
    for each parameter which entries of state it has: a meta tensor for one with the parameter's
    shape, None for any other. `groups` are the names in each parameter group of the optimizer to
    load into. `kept` are parameters whose state stays as it is, and `left_alone` says what was only
    found on one side.
    """

    folder: str
    model_tensors: tuple[str, ...]
    value_keys: tuple[Key, ...]
    entries: Entries
    groups: tuple[tuple[str, ...], ...]
    kept: frozenset[str]
    left_alone: tuple[str, ...]

    def moments(self) -> Iterator[tuple[Key, str]]:
        """Every entry of state with its parameter's shape: its key, and the parameter's name."""
        for name, entries in self.entries.items():
            for entry, like in entries.items():
                if like is not None:
                    yield f"optim.state.{name}.{entry}", name

    def require_groups(
        self, optim: dict[str, Any], defaults: Mapping[str, Any], *, strict: bool
    ) -> None:
        """Compare the parameter groups in `optim`, read from the checkpoint, with the optimizer's,
        whose class has the options `defaults`; where it holds none, it gets an empty list.

        Raises:
            BadCheckpoint: a group or an option is not of the kind that it should be.
            ValueError: a group holds other parameters; if not `strict`, only those count that both
                sides have.
        """
        saved_groups = [set(_names_in(group, defaults)) for group in optim.get("param_groups", [])]
        optim.setdefault("param_groups", [])
        lines: list[str] = []
        # Without any the optimizer is left alone.
        for number, names in enumerate(map(set, self.groups if saved_groups else ())):
            saved = saved_groups[number]
            extra, lacking = saved - names, names - saved
            if not strict:
                extra &= {name for group in self.groups for name in group}
                lacking &= {name for group in saved_groups for name in group}
            if extra or lacking:
                lines.append(
                    f"parameter group {number}: missing {sorted(lacking)}, unexpected "
                    f"{sorted(extra)}"
                )
        if lines:
            raise _misfit(self.folder, lines)


def _names_in(group: object, defaults: Mapping[str, Any]) -> list[str]:
    """The names of the parameters in a stored group, whose options are checked."""
    if not isinstance(group, dict):
        raise BadCheckpoint(f"expected a parameter group, got {brief(group)}")
    names = group.setdefault("params", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadCheckpoint(
            f"expected the names of a group's parameters, got {brief(names)}: save what "
            "get_optimizer_state_dict gives, since optimizer.state_dict() has numbers for names"
        )
    for option, default in defaults.items():
        value = group.get(option, default)
        if _is_number(default) and not (_is_number(value) or isinstance(value, Tensor)):
            raise BadCheckpoint(f"expected a number as the option {option}, got {brief(value)}")
        if isinstance(default, tuple) and not (
            isinstance(value, (tuple, list)) and len(value) == len(default)
        ):
            raise BadCheckpoint(
                f"expected {brief(default)} or the like as {option}, got {brief(value)}"
            )
    return names


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(slots=True)
class _Problems:
    missing: list[str] = field(default_factory=list)
    of_groups: list[str] = field(default_factory=list)
    """Those of `missing` and `unexpected` that tell optimizers apart."""
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)

    def one_sided(self) -> list[str]:
        names = (("missing", self.missing), ("unexpected", self.unexpected))
        return [f"{what}: {', '.join(map(shown, keys))}" for what, keys in names if keys]

    def compare(self, key: Key, expected: torch.Size, got: torch.Size | None) -> None:
        if got != expected:
            found = "no tensor" if got is None else f"{tuple(got)}"
            self.shapes.append(f"shape of {shown(key)}: expected {tuple(expected)}, got {found}")


def match(
    stored: Stored,
    model: Mapping[str, Any],
    optim: Mapping[str, Any] | None,
    defaults: Mapping[str, Any] | None,
    *,
    strict: bool,
) -> FittingState:
    """Compare the checkpoint with the state dict `model` and the named optimizer state `optim`.

    `defaults` are the options of the optimizer's class.

    Raises:
        ValueError: they differ; it lists every missing and unexpected name and wrong shape. Without
            `strict`, only wrong shapes are refused.
    """
    problems = _Problems()
    model_tensors, value_keys = _match_model(stored, model, problems)
    entries: Entries = {}
    groups: tuple[tuple[str, ...], ...] = ()
    is_known = False
    if optim is not None and defaults is not None:
        groups = tuple(tuple(group["params"]) for group in optim["param_groups"])
        group_keys = _match_groups(stored, len(groups), defaults, problems)
        is_known = not problems.of_groups
        value_keys += group_keys if is_known else []
        shapes = {name: model[name].shape for names in groups for name in names}
        found = _find_state(stored, shapes, problems)
        if stored.digests is None:
            _require_alike(found, groups)
        # Without strict, that of another optimizer or other groups is left alone as a whole.
        entries = _match_state(stored, found, shapes, problems) if is_known or strict else {}
        value_keys += [
            found[name][entry]
            for name, known in entries.items()
            for entry, like in known.items()
            if like is None
        ]
    problems.unexpected += [
        key
        for key in _others(stored)
        if stored.digests is not None or (stored.paths[key][0] == "optim" and optim is not None)
    ]
    one_sided = problems.one_sided()
    if lines := (one_sided if strict else []) + problems.shapes:
        raise _misfit(shown(stored.folder), lines + _hint(stored))
    known_params = set(model_tensors) if is_known else set()
    if groups and not is_known:
        one_sided.append("therefore the optimizer stays as it is, its state too")
    return FittingState(
        folder=shown(stored.folder),
        model_tensors=tuple(model_tensors),
        value_keys=tuple(value_keys),
        entries=entries,
        groups=groups,
        kept=frozenset(name for names in groups for name in names) - known_params,
        left_alone=tuple(one_sided),
    )


def _misfit(folder: str, lines: list[str]) -> ValueError:
    return ValueError(
        f"checkpoint {folder} does not fit the model or the optimizer, and nothing was loaded:\n  "
        + "\n  ".join(lines)
    )


def _others(stored: Stored) -> list[Key]:
    """Keys of what no checkpoint of ours holds."""
    places: set[KeyPath] = {("model",), ("extra",), ("sidestream",), ("wires",)}
    places |= {("optim", "state"), ("optim", "param_groups")}
    return [key for key, path in stored.paths.items() if not {path[:1], path[:2]} & places]


def _hint(stored: Stored) -> list[str]:
    """What else the checkpoint holds, where that may be what is missed."""
    numbered = [path for path in stored.paths.values() if path[:2] == ("optim", "state")]
    if any(str(part).isdecimal() for path in numbered for part in path[2:3]):
        return [
            "its optimizer's state has numbers for names: save what get_optimizer_state_dict "
            "gives, not optimizer.state_dict()"
        ]
    if not (others := _others(stored)):
        return []
    return [
        f"beside what load_checkpoint reads ('model' and 'optim', each as get_state_dict gives it, "
        f"not flattened) there are: {listed([shown(key) for key in others])}; load those with "
        "torch.distributed.checkpoint"
    ]


def _match_model(
    stored: Stored, model: Mapping[str, Any], problems: _Problems
) -> tuple[list[str], list[Key]]:
    """Returns the names of tensors that are stored, and the keys of what is no tensor (extra state
    of modules, which may be nested).
    """
    keys: dict[str, list[Key]] = {}
    for key in stored.keys_under("model"):
        keys.setdefault(".".join(map(str, stored.paths[key][1:2])), []).append(key)
    problems.unexpected += [key for name in keys.keys() - model.keys() for key in keys[name]]
    tensors: list[str] = []
    value_keys: list[Key] = []
    for name, value in model.items():
        if name not in keys:
            if not (isinstance(value, Mapping) and not value):  # an empty one leaves no key
                problems.missing.append(f"model.{name}")
        elif isinstance(value, Tensor):
            tensors.append(name)
            problems.compare(f"model.{name}", value.shape, stored.shape_of(f"model.{name}"))
        else:
            value_keys += keys[name]
    return tensors, value_keys


def _match_groups(
    stored: Stored, num_groups: int, defaults: Mapping[str, Any], problems: _Problems
) -> list[Key]:
    # Options that are numbers tell optimizers apart; flags come and go with versions of PyTorch.
    needed = ["params"]
    needed += [
        option
        for option, value in defaults.items()
        if isinstance(value, (int, float, tuple)) and not isinstance(value, bool)
    ]
    keys = stored.keys_under("optim", "param_groups")
    known = {stored.paths[key][2:4] for key in keys}
    for number in range(num_groups):
        for option in needed:
            if (number, option) not in known:
                problems.missing.append(f"optim.param_groups.{number}.{option}")
                problems.of_groups.append(option)
    numbers = {(number,) for number in range(num_groups)}
    others = [key for key in keys if stored.paths[key][2:3] not in numbers]
    problems.unexpected += others
    problems.of_groups += others
    return [key for key in keys if stored.paths[key][2:3] in numbers]


def _find_state(
    stored: Stored, shapes: Mapping[str, torch.Size], problems: _Problems
) -> dict[str, dict[str, Key]]:
    """The key of every entry of state, by parameter and entry."""
    found: dict[str, dict[str, Key]] = {name: {} for name in shapes}
    for key in stored.keys_under("optim", "state"):
        path = [str(part) for part in stored.paths[key][2:]]
        if len(path) == len(("name", "entry")) and path[0] in shapes:
            found[path[0]][path[1]] = key
        else:
            problems.unexpected.append(key)
    return found


def _require_alike(
    found: Mapping[str, Mapping[str, Key]], groups: tuple[tuple[str, ...], ...]
) -> None:
    """Nothing but the other parameters tells a name of an entry that is damaged or gone.

    Raises:
        BadCheckpoint: parameters of one group that have state have other entries each.
    """
    for names in groups:
        stepped = {name: frozenset(found[name]) for name in names if found[name]}
        usual = Counter(stepped.values()).most_common(1)
        for name, entries in stepped.items():
            if entries != usual[0][0]:
                raise BadCheckpoint(
                    f"optim.state.{name}: expected the entries {sorted(usual[0][0])} of the other "
                    f"parameters in its group, got {sorted(entries)}"
                )


def _match_state(
    stored: Stored,
    found: Mapping[str, Mapping[str, Key]],
    shapes: Mapping[str, torch.Size],
    problems: _Problems,
) -> Entries:
    """Returns `FittingState.entries`."""
    # A 0-d parameter's moments look like counters: what an entry is, the other parameters tell.
    counters = SCALAR_STATE | {
        entry
        for name, keys in found.items()
        for entry, key in keys.items()
        if stored.shape_of(key) in (None, ()) and shapes[name] != ()
    }
    entries: Entries = {}
    for name, keys in found.items():
        for entry, key in keys.items():
            shape, like = stored.shape_of(key), None
            if entry in counters:
                if shape is not None and shape.numel() != 1:
                    problems.shapes.append(
                        f"shape of {key}: expected one value, got {tuple(shape)}"
                    )
            else:
                problems.compare(key, shapes[name], shape)
                if shape == shapes[name]:
                    like = torch.empty(shape, dtype=stored.tensors[key].dtype, device="meta")
            entries.setdefault(name, {})[entry] = like
    return entries
