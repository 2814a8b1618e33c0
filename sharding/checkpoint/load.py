"""Loads a checkpoint: everything is checked before the first tensor changes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import require_flag
from ..modules.uncompiled import plain_name, uncompiled
from ..optim.state import load_scalars, named_state, prepare_state
from ..storage import Location
from ..untrusted import one_line, shown
from . import folder as checkpoint_folder
from .agreement import Alike
from .background import wait_for_save
from .digests import require_sums
from .match import FittingState, match
from .opening import identity_of, open_checkpoint
from .ranks import Ranks, ranks_of
from .read import Contents
from .state import names_of_params, state_of
from .stored import BadCheckpoint, Key, Stored
from .wires import match_wires, wires_of


@uncompiled
def load_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    reset_error_feedback: bool = False,
) -> Any:
    """Load the checkpoint at `path`, or at a URL, into `module` and `optimizer`.

    A collective over the ranks that `module` is sharded over, or all of the job for a plain one
    and for one of PyTorch's own `fully_shard`, whose optimizer is over its sharded parameters.
    Their number may differ from that when it was saved. Returns the `extra` that this rank saved,
    the first one's if their number differs, None if there is none; its tensors come back on the
    CPU. With `strict=False`, what only one side has is left alone, and a warning lists it. Ranks
    that read copies of the checkpoint, each from a disk of its own, compare all sums themselves.

    Where gradients' wires feed errors back, each rank gets what it owed when its own checkpoint was
    saved; as many other ranks get equal parts of the sum, so that the model is owed the same. Noise
    goes on from where it was, so the bits are those of a training without a break.
    `reset_error_feedback` lets the wires begin with nothing owed, whatever the checkpoint holds.

    Raises:
        FileNotFoundError: there is no checkpoint at `path`.
        ValueError: its names, shapes or parameter groups are not those of `module` and `optimizer`:
            every missing or unexpected name and wrong shape is listed, on all ranks. Or one side
            alone has error feedback, without `reset_error_feedback`; what only the checkpoint has
            is left alone with `strict=False`, and by a module that is not sharded. Or a file is
            missing, damaged or another checkpoint's, or holds objects that only unsafe unpickling
            could read. Or ranks pass different checkpoints. Nothing is loaded.
        TypeError: an argument of the wrong type.
        OSError, RuntimeError: a disk failed, or, once all was checked, memory ran out or a hook of
            the module raised; then the message says that module and optimizer are half loaded.
    """
    ranks = ranks_of(module)
    with Alike(ranks) as together:
        wait_for_save()
        require_flag("strict", strict)
        require_flag("reset_error_feedback", reset_error_feedback)
        both = state_of(module, optimizer)
        found = checkpoint_folder.find(checkpoint_folder.resolve(path))
        defaults = None if optimizer is None else optimizer.defaults
        with _refusing(found):
            stored = open_checkpoint(found)
            fitting = match(stored, both["model"], both.get("optim"), defaults, strict=strict)
            wires = match_wires(
                stored, wires_of(module), ranks, strict=strict, resets=reset_error_feedback
            )
            together.give(identity_of(stored))
        together.tell("path", stored.fingerprint, shown(found))
        together.tell("optimizer", "none" if optimizer is None else "one")
        together.tell("strict", str(strict))
        together.tell("reset_error_feedback", str(reset_error_feedback))
    # Copies of the same files, as on disks of several machines, are compared as a whole by each.
    is_shared = all(identity == together.given[0] for identity in together.given)
    share = (ranks.place, len(ranks.numbers)) if is_shared else (0, 1)
    with Contents(stored) as contents:
        with Alike(ranks), _refusing(found):
            if stored.digests is not None:
                require_sums(found, stored.digests, *share)
            extra_key = _extra_key(stored, ranks)
            values = contents.values([*fitting.value_keys, *extra_key, *wires.number_keys])
            backwards = wires.backwards(values)
            extra = _extra_in(values) if extra_key else None
            fitting.require_groups(values.setdefault("optim", {}), defaults or {}, strict=strict)
            tensors = _tensors(fitting, both["model"])
            contents.require_sound(tensors | wires.stand_ins())
        with Alike(ranks), _half_loaded(found):
            if optimizer is not None:
                tensors |= _with_moments(module, optimizer, fitting)
            contents.fill(tensors)
            wires.fill(contents, backwards)
            _take_values(module, optimizer, both["model"], values)
    if left_alone := [*fitting.left_alone, *wires.left_alone]:
        warnings.warn(
            f"checkpoint {shown(found)}: left alone, as only one side has it: "
            f"{'; '.join(left_alone)}",
            stacklevel=2,
        )
    return extra


@contextmanager
def _refusing(folder: Location) -> Iterator[None]:
    """Say which checkpoint it is that is bad."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"checkpoint {shown(folder)}: {one_line(error)}; nothing was loaded"
        ) from error
    except BadCheckpoint as error:
        raise ValueError(
            f"checkpoint {shown(folder)}: {one_line(error)}; load another checkpoint. "
            "Nothing was loaded"
        ) from error


@contextmanager
def _half_loaded(folder: Location) -> Iterator[None]:
    """Say what state an error leaves: that of a disk, of memory, or of the module's own hooks."""
    try:
        yield
    except Exception as error:
        kind = OSError if isinstance(error, (OSError, BadCheckpoint)) else RuntimeError
        raise kind(
            f"checkpoint {shown(folder)}: {one_line(error)}; module and optimizer are "
            "half loaded: load a checkpoint again before they are used"
        ) from error


def _tensors(fitting: FittingState, model: Mapping[str, Any]) -> dict[Key, Tensor]:
    """What `fill` will fill, by key; a parameter stands for its moments, of the same layout."""
    tensors = {f"model.{name}": model[name] for name in fitting.model_tensors}
    return tensors | {key: model[name] for key, name in fitting.moments()}


def _with_moments(
    module: nn.Module, optimizer: torch.optim.Optimizer, fitting: FittingState
) -> dict[Key, Tensor]:
    """Make `optimizer` have the entries that are stored; returns those to fill."""
    names = names_of_params(module)
    prepare_state(names, optimizer, fitting.entries, kept=fitting.kept)
    state = named_state(names, optimizer)["state"]
    return {
        f"optim.state.{name}.{entry}": state[name][entry]
        for name, entries in fitting.entries.items()
        for entry, like in entries.items()
        if like is not None
    }


def _take_values(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    model: Mapping[str, Any],
    values: dict[str, Any],
) -> None:
    loaded = {**model, **values.get("model", {})}
    module.load_state_dict({key: loaded[plain_name(key)] for key in module.state_dict()})
    if optimizer is not None:
        load_scalars(names_of_params(module), optimizer, _placed(values["optim"], model))


def _placed(optim: dict[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """`optim`, with tensors on their parameter's device where the optimizer's kernels want that."""
    states = optim.setdefault("state", {})
    for group in optim["param_groups"]:
        if not (group.get("capturable") or group.get("fused")):
            continue
        for name in group["params"]:
            for entry, value in states.get(name, {}).items():
                if isinstance(value, Tensor):
                    states[name][entry] = value.to(model[name].device)
    return optim


def _extra_in(values: dict[str, Any]) -> Any:
    """The extra in `values`, which holds one."""
    held = values.pop("extra")
    found = [*held.values()] if isinstance(held, dict) else []
    if len(found) != 1 or not isinstance(found[0], tuple) or len(found[0]) != 1:
        raise BadCheckpoint("expected a tuple of one value as extra, got something else")
    return found[0][0]


def _extra_key(stored: Stored, ranks: Ranks) -> list[Key]:
    """The key of the extra that this rank gets, if any was saved."""
    keys = stored.keys_under("extra")
    own = f"extra.{ranks.place if len(keys) == len(ranks.numbers) else 0}"
    return [own] if own in keys else []
