"""Weights from safetensors files into a model: every rank reads its own elements, straight to their
place.

What is read for what follows from names, shapes and dtypes alone (`plan_load`), and is decided for
the whole model before the first element changes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..arguments import require_flag
from ..checkpoint.agreement import Alike
from ..checkpoint.ranks import ranks_of
from ..modules.uncompiled import uncompiled
from ..tensor.sharded_tensor import ShardedTensor
from ..untrusted import shown
from .files import Source, Staging, StoredModel, open_model
from .format import FileTensor
from .state import Entry, ModuleState, tensors_of


class LoadedKeys(NamedTuple):
    """What `load_safetensors` with strict=False left out, as `module.load_state_dict` says it.

    `missing_keys` of the module kept their values, `unexpected_keys` of the file were not used. A
    name whose shape or dtype does not fit is in both.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(slots=True)
class LoadPlan:
    """What fits, as places in the module's entries and the stored names for each, and what does
    not.
    """

    reads: dict[int, tuple[str, ...]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    """Names in the module of what is missing or misfits."""

    def lines(self) -> list[str]:
        """Everything that does not fit, for a message."""
        lines = [f"missing: {', '.join(map(shown, self.missing))}"] if self.missing else []
        if self.unexpected:
            lines.append(f"unexpected: {', '.join(map(shown, self.unexpected))}")
        return lines + list(self.misfits.values())

    def left_out(self) -> LoadedKeys:
        """What is not loaded."""
        return LoadedKeys(self.kept, [*self.unexpected, *self.misfits])


@torch.no_grad()
@uncompiled
def load_safetensors(
    path: str | os.PathLike[str], module: nn.Module, *, strict: bool = True
) -> LoadedKeys:
    """Load safetensors into the parameters and persistent buffers of `module`, sharded or plain.

    `path`: a file, an index (`...safetensors.index.json`), or a folder with `model.safetensors` or
    with `model.safetensors.index.json` and the files that it names, as `save_pretrained` of
    transformers and `save_safetensors` write them.
    A collective over the ranks that `module` is sharded over (all ranks if it is not); each reads
    its own elements alone, through a few MiB of memory. A floating dtype is converted to the
    module's, to nearest even where that is narrower; integers go where all their values fit. Of a
    tied tensor one name is enough.

    With strict=False what fits is loaded, and the rest returned.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names, shapes or dtypes are not those of `module` (strict): all are listed. A
            header or the index is damaged; two names of a tied tensor have different values; ranks
            see different files. Nothing is loaded, on any rank.
        TypeError: an argument of the wrong type.
        RuntimeError: parameters are whole, inside `gathered`, or were added after `fully_shard`.
        OSError: a file cannot be read. Where that comes after all checks, the message says that
            `module` is half loaded.
    """
    ranks = ranks_of(module)
    with contextlib.ExitStack() as files:
        with Alike(ranks) as alike:
            require_flag("strict", strict)
            state = tensors_of(module, "load_safetensors")
            model = open_model(path, files)
            alike.tell("path", model.fingerprint, str(model.place))
            alike.tell("strict", str(strict))
            stored = {name: source.stored for name, source in model.sources.items()}
            plan = plan_load(state.entries, list(state.unstorable), stored)
            _require_fit(state, plan, model, strict)
            staging = Staging()
            for place, names in plan.reads.items():
                sources = {name: model.sources[name] for name in names}
                _require_same_values(state.entries[place].tensor, sources, staging)
        with Alike(ranks):
            for place, names in _in_file_order(plan, model):
                try:
                    _read_into(state.entries[place].tensor, model.sources[names[0]], staging)
                except OSError as error:
                    raise OSError(
                        f"{error}; the module is half loaded: load it again from a sound file"
                    ) from error
    return plan.left_out()


def plan_load(
    entries: Sequence[Entry], unstorable: Sequence[str], stored: Mapping[str, FileTensor]
) -> LoadPlan:
    """Compare the module's tensors, and names of what else it saves, with the `stored` ones."""
    plan = LoadPlan(missing=[*unstorable], kept=[*unstorable])
    known: set[str] = set()
    for place, entry in enumerate(entries):
        names = tuple(name for name in entry.names if name in stored)
        known.update(names)
        misfits = {name: text for name in names if (text := _misfit(entry, name, stored[name]))}
        if names and not misfits:
            plan.reads[place] = names
            continue
        plan.kept += entry.names
        plan.missing += () if names else entry.names
        for name in names:
            reason = f"{shown(name)}: another name of the same tensor does not fit"
            plan.misfits[name] = misfits.get(name, reason)
    plan.unexpected = [name for name in stored if name not in known]
    return plan


def _misfit(entry: Entry, name: str, stored: FileTensor) -> str:
    """Why `stored` cannot be loaded into the module's tensor; empty if it can."""
    target = entry.tensor
    if entry.shape != stored.shape:
        return f"shape of {shown(name)}: expected {entry.shape}, got {stored.shape}"
    floats = target.dtype.is_floating_point and stored.dtype.is_floating_point
    integers = not any(
        dtype.is_floating_point or dtype.is_complex for dtype in (target.dtype, stored.dtype)
    )
    widens = integers and torch.promote_types(target.dtype, stored.dtype) == target.dtype
    if not (floats or widens):
        return f"dtype of {shown(name)}: expected {target.dtype}, got {stored.dtype}"
    return ""


def _require_fit(state: ModuleState, plan: LoadPlan, model: StoredModel, strict: bool) -> None:
    for entry in state.entries:
        tensor = entry.tensor
        repeats = zip(tensor.shape, tensor.stride(), strict=True)
        if not isinstance(tensor, ShardedTensor) and any(n > 1 and s == 0 for n, s in repeats):
            raise ValueError(
                f"module: expected tensors with an element for each value, got "
                f"'{shown(entry.names[0])}', which is expanded; clone it"
            )
    if strict and (lines := plan.lines()):
        lines += [
            f"{shown(name)} of the module is {reason}, which no safetensors file has"
            for name, reason in state.unstorable.items()
        ]
        raise ValueError(
            f"{shown(model.place)} does not fit the module, and nothing was loaded (strict=False "
            "loads what fits):\n  " + "\n  ".join(lines)
        )


def _require_same_values(target: Tensor, sources: Mapping[str, Source], staging: Staging) -> None:
    """Check that a tied tensor that is stored under several names is one, in this rank's part."""
    (name, first), *others = sources.items()
    other_staging = Staging() if others else staging
    for other_name, other in others:
        same = first.stored.dtype == other.stored.dtype and all(
            torch.equal(
                first.read(staging, start, numel).view(torch.uint8),
                other.read(other_staging, start, numel).view(torch.uint8),
            )
            for start, numel in staging.pieces(*_own_part(target), first.stored.dtype)
        )
        if not same:
            raise ValueError(
                f"expected equal values of '{shown(name)}' and '{shown(other_name)}', which are "
                "one tensor in the module, got different ones; nothing was loaded. Untie them in "
                "the module, or leave one out of the file"
            )


def _in_file_order(plan: LoadPlan, model: StoredModel) -> list[tuple[int, tuple[str, ...]]]:
    def position(read: tuple[int, tuple[str, ...]]) -> tuple[str, int]:
        source = model.sources[read[1][0]]
        return str(source.file.path), source.stored.start

    return sorted(plan.reads.items(), key=position)


def _read_into(target: Tensor, source: Source, staging: Staging) -> None:
    """Fill this rank's part of `target`."""
    is_direct = isinstance(target, ShardedTensor) or target.is_contiguous()
    part = target.local if isinstance(target, ShardedTensor) else target.detach()
    flat = part.view(-1) if is_direct else part.new_empty(part.numel())
    first, stop = _own_part(target)
    # Replicated parameters are gathered anew after a write, so a rank without elements writes too.
    increment_version(flat)
    for start, count in staging.pieces(first, stop, source.stored.dtype):
        # Through a copy, not straight from the file: it converts, and works for any device.
        flat[start - first :][:count].copy_(source.read(staging, start, count))
    if not is_direct:
        part.copy_(flat.view(part.shape))


def _own_part(target: Tensor) -> tuple[int, int]:
    """Start and stop of this rank's elements."""
    if isinstance(target, ShardedTensor):
        return target.start, target.start + target.local.numel()
    return 0, target.numel()
