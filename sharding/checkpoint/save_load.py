"""Checkpoints: whole on disk or not there, checked before they change anything, readable anywhere.

They are what `torch.distributed.checkpoint` writes for the state of a model and an optimizer::

    model.<name>                              parameters and buffers; each rank writes its boxes
    optim.state.<name>.<entry>                likewise; optim.param_groups.<i>.<option>
    extra.<rank>                              (extra,) as that rank passed it

so any world size, plain PyTorch and FSDP2 read them, and theirs load here. Names are the same with
and without `torch.compile`. `checkpoint_folder` says where they lie, and how one replaces another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import kind_of, require_module
from ..entries import check_sharded
from ..fully_shard import runtime_of
from ..optimizer_state import load_scalars, named_state, prepare_state
from ..sharded_tensor import ShardedTensor
from ..tree_watch import watches_of
from ..uncompiled import plain_name, uncompiled
from . import folder as checkpoint_folder
from .agreement import Alike
from .match import match

# The reader is imported by the functions that need it: with it comes torch.distributed.checkpoint,
# which takes longer to import than all of sidestream.
if TYPE_CHECKING:
    from .reader import CheckpointReader


@uncompiled
def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
) -> None:
    """Write `module`, `optimizer` and `extra` to the folder `path` (a collective over all ranks).

    A checkpoint that is at `path` already is replaced, its folder as a whole, once the new one is
    complete. `extra` is this rank's own: numbers, strings, tensors and containers of them. Of what
    every rank holds whole, such as buffers, rank 0's values are saved. Ranks share one file system.

    Raises:
        FileExistsError: `path` is a file, or a folder that holds something else than a checkpoint.
        OSError: rank 0 cannot write there, which is raised before any rank writes, or a rank's disk
            is full; raised on every rank.
        TypeError: `extra`, or state of the module or the optimizer, holds other objects, which
            could not be read back safely; an argument of the wrong type.
        ValueError: `optimizer` holds other parameters than `module`'s; ranks pass
            different checkpoints' names, or not all an optimizer.
        RuntimeError: ranks wrote to different file systems or folders; parameters were added after
            `fully_shard`, or taken out or renamed where there is an optimizer; another rank was
            interrupted. Whatever is raised, what was at `path` stays.
    """
    from torch.distributed import checkpoint as dcp

    from .reader import require_plain, running_dcp
    from .writer import CheckpointWriter

    rank = _rank()
    with Alike() as ranks:
        target, state = checkpoint_folder.resolve(path), _state_of(module, optimizer)
        require_plain("extra", extra)
        for key, value in _values(state):
            require_plain(key, value)
        ranks.tell("path", target.name, str(target))
        ranks.tell("optimizer", "none" if optimizer is None else "one")
    try:
        with Alike():
            if rank == 0:
                checkpoint_folder.prepare(target)
        written = {**(state if rank == 0 else _sharded_only(state)), "extra": {str(rank): (extra,)}}
        with running_dcp(f"writing {target}"):
            partial = checkpoint_folder.partial_of(target)
            dcp.save(written, storage_writer=CheckpointWriter(partial))
        with Alike():
            if rank == 0:
                checkpoint_folder.require_whole(target)
                checkpoint_folder.publish(target)
    finally:
        # Every rank: where they do not share the folder, each has its own.
        checkpoint_folder.discard_partial(target)


@uncompiled
def load_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Load the checkpoint at `path` into `module` and `optimizer` (a collective over all ranks).

    The world size may differ from the one it was saved at. Returns the `extra` this rank saved,
    rank 0's if the world size differs, None if there is none; its tensors come back on the CPU.

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

    with Alike() as ranks:
        both = _state_of(module, optimizer)
        state, optim = both["model"], both.get("optim")
        runtime = None if optimizer is None else runtime_of(module)
        reader = CheckpointReader(checkpoint_folder.find(checkpoint_folder.resolve(path)))
        reader.require_whole()
        ranks.tell("path", reader.fingerprint, str(reader.folder))
        ranks.tell("optimizer", "none" if optimizer is None else "one")
        stored = match(reader, state, optim, None if optimizer is None else optimizer.defaults)
        extra_key = _extra_key(reader)
        values = reader.read([*stored.value_keys, *extra_key])
        stored.require_same_groups(values)
        tensors = {f"model.{name}": x for name, x in state.items() if isinstance(x, Tensor)}
        reader.require_sound(tensors | {key: state[name] for key, name in stored.moments()})
    if optimizer is not None and runtime is not None:
        prepare_state(runtime, optimizer, stored.entries)
        tensors |= _sharded_state(named_state(runtime, optimizer))
    reader.read_into(tensors)
    loaded = {**state, **values.get("model", {})}
    module.load_state_dict({key: loaded[plain_name(key)] for key in module.state_dict()})
    if optimizer is not None and runtime is not None:
        load_scalars(runtime, optimizer, _placed(values["optim"], state))
    return values["extra"][extra_key[0].removeprefix("extra.")][0] if extra_key else None


@torch.no_grad()
@uncompiled
def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with whole, plain, new tensors on every rank (a collective).

    Keys, dtypes and devices are the unsharded model's; names of one tied parameter share a tensor.
    A part of a sharded module and a plain module will do as well.

    Raises:
        RuntimeError: parameters were added after `fully_shard`.
    """
    require_module(module)
    for watch in watches_of(module):
        watch.check()
    whole: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[name] = value
            continue
        if id(value) not in whole:
            whole[id(value)] = (
                value.full_tensor() if isinstance(value, ShardedTensor) else value.detach().clone()
            )
        state[name] = whole[id(value)]
    return state


def _state_of(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The state to save or to load into, sharded tensors as they are."""
    require_module(module)
    check_sharded(module, "save_checkpoint and load_checkpoint")
    for watch in watches_of(module):
        watch.check()
        if optimizer is not None:
            watch.check_names()
    if optimizer is None:
        return {"model": _named_plainly(module.state_dict())}
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {kind_of(optimizer)}; pass the one "
            "that fully_shard bound (what else is to be saved goes to save_checkpoint's extra)"
        )
    model = _named_plainly(module.state_dict())
    return {"optim": named_state(runtime_of(module), optimizer), "model": model}


def _named_plainly(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` under the names that it has where nothing is compiled."""
    return {plain_name(key): value for key, value in state.items()}


def _values(state: Any, key: str = "") -> Iterator[tuple[str, object]]:
    """Key and value of all in the nested `state` that is stored as a pickle, as DCP takes it apart.

    Numbers and the like, which always can be, are left out.
    """
    if isinstance(state, (Mapping, list)):
        parts = state.items() if isinstance(state, Mapping) else enumerate(state)
        for part, value in parts:
            yield from _values(value, f"{key}.{part}" if key else f"{part}")
    elif not isinstance(state, Tensor) and type(state) not in (bool, int, float, str, NoneType):
        yield key, state


def _sharded_only(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `state` that other ranks do not hold: tensors that name the pieces they write."""
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            kept[key] = _sharded_only(value)
        elif hasattr(value, "__create_write_items__"):
            kept[key] = value
    return kept


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


def _extra_key(reader: CheckpointReader) -> list[str]:
    """The key of the extra that this rank gets, if any was saved."""
    keys = reader.keys_under("extra")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    own = f"extra.{_rank() if len(keys) == world_size else 0}"
    return [own] if own in keys else []


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
