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
from typing import Any

import torch
from torch import Tensor, nn

from ..uncompiled import uncompiled
from . import folder as checkpoint_folder
from .agreement import Alike
from .state import rank_here, state_of


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

    rank = rank_here()
    with Alike() as ranks:
        target, state = checkpoint_folder.resolve(path), state_of(module, optimizer)
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
        if rank == 0:
            written["sidestream"] = {"format_version": 2}
        with running_dcp(f"writing {target}"):
            partial = checkpoint_folder.partial_of(target)
            dcp.save(written, storage_writer=CheckpointWriter(partial))
        with Alike():
            if rank == 0:
                from .files import digest_of
                from .manifest import write_manifest

                write_manifest(partial, {p.name: digest_of(p) for p in partial.iterdir()})
                checkpoint_folder.publish(target)
    finally:
        # Every rank: where they do not share the folder, each has its own.
        checkpoint_folder.discard_partial(target)


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
