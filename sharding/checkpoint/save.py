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
from .ranks import claim, ranks_of
from .state import state_of


@uncompiled
def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
) -> None:
    """Write `module`, `optimizer` and `extra` to the folder `path`.

    A collective over the ranks that `module` is sharded over, or all of the job for a plain one.

    A checkpoint that is at `path` already is replaced, its folder as a whole, once the new one is
    complete. `extra` is this rank's own: numbers, strings, tensors and containers of them. Of what
    every rank holds whole, such as buffers, the first one's values are saved. Ranks share one file
    system. Models on different ranks, such as pipeline stages, have paths of their own, which may
    be sub-folders of one folder.

    Raises:
        FileExistsError: `path` is a file, or a folder that holds something else than a checkpoint.
        OSError: the first rank cannot write there, which is raised before any rank writes, or a
            rank's disk is full; raised on every rank.
        TypeError: `extra`, or state of the module or the optimizer, holds other objects, which
            could not be read back safely; an argument of the wrong type.
        ValueError: `optimizer` holds other parameters than `module`'s; ranks pass
            different checkpoints' names, or not all an optimizer; a model on other ranks of this
            job is saved to `path`; parts of `module` are sharded over different ranks.
        RuntimeError: ranks wrote to different file systems or folders; parameters were added after
            `fully_shard`, or taken out or renamed where there is an optimizer; another rank was
            interrupted. Whatever is raised, what was at `path` stays.
    """
    from torch.distributed import checkpoint as dcp

    from .reader import require_plain
    from .running_dcp import running_dcp
    from .writer import CheckpointWriter

    ranks = ranks_of(module)
    with Alike(ranks) as together:
        target, state = checkpoint_folder.resolve(path), state_of(module, optimizer)
        require_plain("extra", extra)
        for key, value in _values(state):
            require_plain(key, value)
        together.tell("path", target.name, str(target))
        together.tell("optimizer", "none" if optimizer is None else "one")
        if ranks.leads:
            claim(target, ranks)
    try:
        with Alike(ranks):
            if ranks.leads:
                checkpoint_folder.prepare(target, ranks.number)
        written = {
            **(state if ranks.leads else _sharded_only(state)),
            "extra": {str(ranks.place): (extra,)},
        }
        with running_dcp(f"writing {target}", ranks):
            dcp.save(
                written,
                storage_writer=CheckpointWriter(checkpoint_folder.partial_of(target)),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        with Alike(ranks):
            if ranks.leads:
                checkpoint_folder.require_whole(target, ranks.number)
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
