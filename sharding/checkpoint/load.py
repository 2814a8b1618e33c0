"""Loads a checkpoint: everything is checked before the first tensor changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..fully_shard import runtime_of
from ..optimizer_state import load_scalars, named_state, prepare_state
from ..sharded_tensor import ShardedTensor
from ..uncompiled import plain_name, uncompiled
from . import folder as checkpoint_folder
from .agreement import Alike
from .match import match
from .ranks import Ranks, ranks_of
from .state import state_of

# The reader is imported by the functions that need it: with it comes torch.distributed.checkpoint,
# which takes longer to import than all of sidestream.
if TYPE_CHECKING:
    from .reader import CheckpointReader


@uncompiled
def load_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Load the checkpoint at `path` into `module` and `optimizer`.

    A collective over the ranks that `module` is sharded over, or all of the job for a plain one.
    Their number may differ from that when it was saved. Returns the `extra` that this rank saved,
    the first one's if their number differs, None if there is none; its tensors come back on the
    CPU.

    Raises:
        FileNotFoundError: there is no checkpoint at `path`.
        ValueError: its names, shapes or parameter groups are not those of `module` and `optimizer`:
            every missing or unexpected name and wrong shape is listed, on all ranks, and nothing
            is loaded. Or it holds objects that only unsafe unpickling could read. Or ranks pass
            different checkpoints.
        TypeError: an argument of the wrong type.
        RuntimeError: its files are missing, cut short or damaged, and nothing is loaded. (A disk
            that fails later, while they are read again, leaves module and optimizer half loaded.)
    """
    from .reader import CheckpointReader

    ranks = ranks_of(module)
    with Alike(ranks) as together:
        both = state_of(module, optimizer)
        state, optim = both["model"], both.get("optim")
        runtime = None if optimizer is None else runtime_of(module)
        reader = CheckpointReader(checkpoint_folder.find(checkpoint_folder.resolve(path)))
        reader.require_whole()
        together.tell("path", reader.fingerprint, str(reader.folder))
        together.tell("optimizer", "none" if optimizer is None else "one")
        stored = match(reader, state, optim, None if optimizer is None else optimizer.defaults)
        extra_key = _extra_key(reader, ranks)
        values = reader.read([*stored.value_keys, *extra_key])
        stored.require_same_groups(values)
        tensors = {f"model.{name}": x for name, x in state.items() if isinstance(x, Tensor)}
        reader.require_sound(tensors | {key: state[name] for key, name in stored.moments()})
    if optimizer is not None and runtime is not None:
        prepare_state(runtime, optimizer, stored.entries)
        tensors |= _sharded_state(named_state(runtime, optimizer))
    reader.read_into(tensors, ranks)
    loaded = {**state, **values.get("model", {})}
    module.load_state_dict({key: loaded[plain_name(key)] for key in module.state_dict()})
    if optimizer is not None and runtime is not None:
        load_scalars(runtime, optimizer, _placed(values["optim"], state))
    return values["extra"][extra_key[0].removeprefix("extra.")][0] if extra_key else None


def _sharded_state(optim: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        f"optim.state.{name}.{entry}": value
        for name, entries in optim["state"].items()
        for entry, value in entries.items()
        if isinstance(value, ShardedTensor)
    }


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


def _extra_key(reader: CheckpointReader, ranks: Ranks) -> list[str]:
    """The key of the extra that this rank gets, if any was saved."""
    keys = reader.keys_under("extra")
    own = f"extra.{ranks.place if len(keys) == len(ranks.numbers) else 0}"
    return [own] if own in keys else []
