"""Checkpoints: whole on disk or not there, checked before they change anything, readable anywhere.

They are what `torch.distributed.checkpoint` writes for the state of a model and an optimizer::

    model.<name>                              parameters and buffers; each rank writes its boxes
    optim.state.<name>.<entry>                likewise; optim.param_groups.<i>.<option>
    extra.<rank>                              (extra,) as that rank passed it
    wires.<...>                               what wires keep between steps: `wires.py`
    sidestream.format_version                 says to readers without our manifest who wrote it

so any world size, plain PyTorch and FSDP2 read them, and theirs load here. Names are the same with
and without `torch.compile`. `checkpoint_folder` says where they lie, and how one replaces another.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from types import NoneType
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from ..arguments import require_flag
from ..modules.uncompiled import uncompiled
from ..untrusted import shown
from . import plain_values
from .agreement import Alike
from .background import copied, end_save_before, start
from .manifest import FORMAT_VERSION, MARK, write_manifest
from .ranks import Ranks, claim, ranks_of
from .state import state_of
from .stored import BadCheckpoint, Digest
from .target import Target, target_of
from .wires import wires_of

_DEPTH_OF_NAMES = 2  # model.<name> and optim.state may be empty


@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = ...,
    extra: Any = ...,
    *,
    asynchronous: Literal[False] = ...,
) -> None: ...
@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = ...,
    extra: Any = ...,
    *,
    asynchronous: Literal[True],
) -> Future[None]: ...


@uncompiled
def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    asynchronous: bool = False,
) -> Future[None] | None:
    """Write `module`, `optimizer` and `extra` to the folder `path`, which may be a URL.

    A collective over the ranks that `module` is sharded over, or all of the job for a plain one
    and for one of PyTorch's own `fully_shard`, whose optimizer is over its sharded parameters.

    A checkpoint that is at `path` already is replaced, its folder as a whole, once the new one is
    complete. `extra` is this rank's own: numbers, strings, tensors and containers of them. Of what
    every rank holds whole, such as buffers, the first one's values are saved. Where gradients'
    wires feed errors back, each rank writes its own, as many elements as the model has. Ranks share
    one file system, or what is at the URL, such as s3://bucket/step-10 (docs/storage.md). Models on
    different ranks, such as pipeline stages, have paths of their own, which may be sub-folders of
    one folder. `~` in `path` is the user's home.

    With `asynchronous` it returns a future when all that can be refused was refused and a copy of
    what this rank writes was made in the CPU's memory: a step meanwhile changes nothing. A thread
    writes, checks and publishes, over a gloo group of its own, and `future.result()` raises on
    every rank what went wrong. The next save or load waits for it, and so does the interpreter's
    exit; wait for it yourself before `destroy_process_group`. A failure that nobody asked for is
    raised by the next save, or logged at exit.

    Raises:
        FileExistsError: `path` is a file, a folder that holds something else than a checkpoint, a
            link to such, or inside another checkpoint.
        OSError: the first rank cannot write there, which is raised before any rank writes, or a
            rank's disk is full; raised on every rank.
        TypeError: `extra`, or state of the module or the optimizer, holds other objects, which
            could not be read back safely; an argument of the wrong type.
        ValueError: `optimizer` holds other parameters than `module`'s; ranks pass
            different checkpoints' names, or not all an optimizer; a model on other ranks of this
            job is saved to `path`; parts of `module` are sharded over different ranks; a URL for
            which no driver is installed.
        RuntimeError: ranks wrote to different file systems or folders; parameters were added after
            `fully_shard`, or taken out or renamed where there is an optimizer; another rank was
            interrupted; the asynchronous save before failed and nobody asked. Whatever is raised,
            what was at `path` stays.
    """
    ranks = ranks_of(module)
    with Alike(ranks) as together:
        require_flag("asynchronous", asynchronous)
        end_save_before()
        target = target_of(path)
        state = state_of(module, optimizer)
        plain_values.require_plain("extra", extra)
        for key, value in _values(state):
            if isinstance(value, Tensor):
                plain_values.require_storable(key, value)
            else:
                plain_values.require_plain(key, value)
        together.tell("path", target.location.name, shown(target.location))
        together.tell("optimizer", "none" if optimizer is None else "one")
        together.tell("asynchronous", str(asynchronous))
        together.tell("module", *_described(state["model"]))
        written = {
            **(state if ranks.leads else _sharded_only(state)),
            "extra": {str(ranks.place): (extra,)},
            **wires_of(module).state(ranks),
        }
        if ranks.leads:
            written[MARK] = {"format_version": FORMAT_VERSION}
        if asynchronous:
            written = copied(written)
    writers = ranks.apart() if asynchronous else ranks
    _prepare(target, ranks)
    if asynchronous:
        return start(functools.partial(_write, target, written, writers), shown(target.location))
    _write(target, written, writers)
    return None


def _described(model: Mapping[str, Any]) -> tuple[str, str]:
    """What must agree of the ranks' modules, and in words."""
    tensors = [(name, x) for name, x in model.items() if isinstance(x, Tensor)]
    parts = [(name, tuple(x.shape), hasattr(x, "__create_write_items__")) for name, x in tensors]
    num_sharded = sum(is_sharded for _, _, is_sharded in parts)
    text = f"one of {len(parts)} tensors, {num_sharded} of them sharded"
    return hashlib.sha256(repr(parts).encode()).hexdigest(), text


def _prepare(target: Target, ranks: Ranks) -> None:
    is_ours = False  # another model's, which may be written there, stays
    try:
        with Alike(ranks):
            if ranks.leads:
                take = functools.partial(claim, target.location, ranks)
                target.prepare(ranks.number, take)
                is_ours = True
    except BaseException:
        if is_ours:
            target.discard()
        raise


def _write(target: Target, state: dict[str, Any], ranks: Ranks) -> None:
    """Write `state` to the place that was prepared, check and publish it (a collective)."""
    from torch.distributed import checkpoint as dcp

    from .running_dcp import running_dcp
    from .writer import RowMajorPlanner, writer_to

    writer = writer_to(target.draft)
    try:
        with running_dcp(f"writing {shown(target.location)}", ranks):
            dcp.save(
                state,
                storage_writer=writer,
                planner=RowMajorPlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        with Alike(ranks) as together:
            together.give(writer.digests)
        with Alike(ranks):
            if ranks.leads:
                _seal(target, dict(ChainMap(*together.given)), ranks)
                target.publish()
    finally:
        # Every rank: where they do not share the folder, each has its own.
        target.discard()


def _seal(target: Target, digests: Mapping[str, Digest], ranks: Ranks) -> None:
    """Write the manifest of what all ranks have written for `target`.

    Raises:
        RuntimeError: something is missing.
    """
    try:
        write_manifest(target.draft, digests)
    except BadCheckpoint as error:
        raise RuntimeError(
            f"path: expected a folder that all ranks write to, got {shown(target.location)}, where "
            f"rank {ranks.number} does not find what another one wrote ({error}); give every rank "
            "the same path, on a file system that they share. Nothing was saved"
        ) from error


def _values(state: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Key and value of all tensors in the nested `state`, and of what is stored as a pickle, as DCP
    takes it apart. Numbers and the like, which always can be, are left out.

    Raises:
        TypeError: it would not come back as it is.
    """
    if isinstance(state, (Mapping, list)):
        if isinstance(state, Mapping):
            _require_kept(state, key, depth)
        parts = state.items() if isinstance(state, Mapping) else enumerate(state)
        for part, value in parts:
            yield from _values(value, f"{key}.{part}" if key else f"{part}", depth + 1)
    elif type(state) not in (bool, int, float, str, NoneType):
        yield key, state


def _require_kept(state: Mapping[Any, Any], key: str, depth: int) -> None:
    # Checkpoints name values by their path: an empty dict leaves none, and keys become text.
    odd = [part for part in state if not isinstance(part, str)]
    if odd or (not state and depth > _DEPTH_OF_NAMES):
        found = f"the key {odd[0]!r}" if odd else "an empty one"
        raise TypeError(
            f"{key}: expected dicts with text as keys, none of them empty, since others would not "
            f"come back as they are, got {found}; return a tuple around it, such as (state,)"
        )


def _sharded_only(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `state` that other ranks do not hold: tensors that name the pieces they write."""
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            kept[key] = _sharded_only(value)
        elif hasattr(value, "__create_write_items__"):
            kept[key] = value
    return kept
