"""Teaches torch's own tools for state dicts that a `ShardedTensor` is one rank's part of a tensor.

They know torch's `DTensor` and `ShardedTensor`, and take any other tensor for a whole one. What
they do to those two is done here to ours, with the functions of torch for the rest::

    get_model_state_dict and the like, full_state_dict=True    each one gathered over its own group
    set_model_state_dict and the like, of whole tensors        each one cut to this rank's part;
                                                               those of rank 0 come in pieces
    async_save, and what else stages a state dict              this rank's part copied

The functions that are replaced are private ones of torch 2.11 to 2.14. Where another torch lacks
them, it gets no state dict to gather, since shards would pass for whole tensors; staging raises.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..modules.uncompiled import uncompiled
from .group_parts import Intervals
from .sharded_tensor import ShardedTensor

_Function = Callable[..., Any]
_PIECE_NUMEL = 2**19
"""How much of rank 0's whole tensors is on its way at a time."""


def part_like(like: Any, value: Any) -> Any:
    """`value` for loading into `like`: where that is sharded, and of the same shape, this rank's
    part of it. That is a copy, and a collective if `value` is sharded otherwise, by us or as a
    DTensor; `value` itself if it has the layout already.
    """
    if not isinstance(like, ShardedTensor) or not isinstance(value, Tensor):
        return value
    is_ready = isinstance(value, ShardedTensor) and value.has_layout_of(like)
    if is_ready or value.shape != like.shape:  # which whoever loads refuses
        return value
    gather = getattr(value, "full_tensor", None)
    whole: Tensor = value if gather is None else gather()
    return like.with_local(like.interval_of(whole).clone())


class StagedTensor(ShardedTensor):
    """A copy of one rank's part that is about to be written. Unlike any other it can be pickled:
    `async_save` may write it in another process.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _staged, (self.local, self.shape, self.start, self.name, self.intervals)


def _staged(
    local: Tensor,
    shape: torch.Size,
    start: int,
    name: str,
    intervals: Intervals,
    group: dist.ProcessGroup | None = None,
) -> ShardedTensor:
    staged = StagedTensor._make(local, shape, False)
    staged.start, staged.name, staged.group, staged.intervals = start, name, group, intervals
    return staged


def _gathering(gather: _Function) -> _Function:
    @functools.wraps(gather)
    def gather_state_dict(state_dict: Any, **options: Any) -> Any:
        ranks = options.get("ranks_only")
        is_kept = not ranks or dist.get_rank(options.get("pg")) in ranks
        whole: dict[int, Tensor | None] = {}  # tied weights have several names and one `local`

        def gathered(x: ShardedTensor) -> Tensor | None:
            if id(x.local) not in whole:
                x.require_one_value("full_state_dict=True")
                x.require_exchanged()
                full = x.gather_full()
                # One at a time: all of them need not fit on the device at once.
                kept = full.cpu() if is_kept and options.get("cpu_offload") else full
                whole[id(x.local)] = kept if is_kept else None
            return whole[id(x.local)]

        return gather(_replaced(state_dict, gathered), **options)

    return gather_state_dict


def _distributing(distribute: _Function) -> _Function:
    @functools.wraps(distribute)
    def distribute_state_dict(full: Any, local: Any, *args: Any, **options: Any) -> Any:
        parts = {key: part_like(local.get(key), value) for key, value in full.items()}
        return distribute(parts, local, *args, **options)

    return distribute_state_dict


def _broadcasting(broadcast: _Function) -> _Function:
    @functools.wraps(broadcast)
    def broadcast_tensors(full: Any, local: Any, keys: Any, device: Any, pg: Any = None) -> Any:
        streamed: list[str] = []
        whole: list[str] = []
        for key in keys:
            like, given = local.get(key), full[key]
            shape = given.shape if isinstance(given, Tensor) else given.size
            # What does not fit is for whoever loads to refuse.
            fits = isinstance(like, ShardedTensor) and like.shape == shape
            (streamed if fits else whole).append(key)
        for key in streamed:
            _stream(full[key], local[key], pg or dist.group.WORLD)
        if whole:
            broadcast(full, local, whole, device, pg)

    return broadcast_tensors


@torch.no_grad()
def _stream(full: Any, like: ShardedTensor, group: Any) -> None:
    """Bring `full` of rank 0 straight into `like`. Whoever loads copies that to itself then, so
    its version grows on all ranks; parts beside it would take as much memory as the model again.
    Elsewhere `full` has the dtype alone.
    """
    like.require_one_value("broadcast_from_rank0=True")
    types = group._device_types  # what torch asks, too
    device = like.device if like.device.type in {kind.type for kind in types} else types[0]
    local = like.local
    source = full.detach().reshape(-1) if isinstance(full, Tensor) else None
    piece = torch.empty(min(_PIECE_NUMEL, like.numel()), dtype=full.dtype, device=device)
    for start in range(0, like.numel(), _PIECE_NUMEL):
        part = piece[: like.numel() - start]
        if source is not None:
            part.copy_(source[start : start + len(part)])
        dist.broadcast(part.view(torch.uint8), src=0, group=group)
        first = max(like.start - start, 0)
        stop = min(like.start + len(local) - start, len(part))
        if first < stop:
            offset = start + first - like.start
            local[offset : offset + stop - first] = part[first:stop].to(local.device)


def _allocating(create: _Function) -> _Function:
    @functools.wraps(create)
    def create_cpu_state_dict(state_dict: Any, *args: Any, **options: Any) -> Any:
        made = create(_replaced(state_dict, lambda x: x.local), *args, **options)
        return _wrapped_like(made, state_dict)

    return create_cpu_state_dict


def _staging(offload: _Function) -> _Function:
    @functools.wraps(offload)
    def offload_tensor(stager: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(x, ShardedTensor):
            return offload(stager, x, *args, **options)
        x.require_one_value("staging of a state dict")
        x.require_exchanged()
        local = offload(stager, x.local, *args, **options)
        return _staged(local, x.shape, x.start, x.name, x.intervals, x.group)

    return offload_tensor


def _replaced(state: Any, change: Callable[[ShardedTensor], Any]) -> Any:
    """The nested `state` with `change` of every sharded tensor in its place."""
    if isinstance(state, ShardedTensor):
        return change(state)
    if isinstance(state, dict):
        return {key: _replaced(value, change) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_replaced(value, change) for value in state)
    return state


def _wrapped_like(made: Any, state: Any) -> Any:
    """`made` with sharded tensors around its tensors where `state` has sharded ones."""
    if isinstance(state, ShardedTensor):
        return state.with_local(made)
    if isinstance(state, dict):
        return {key: _wrapped_like(made[key], value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_wrapped_like, made, state))
    return made


class _Seam(NamedTuple):
    module: str
    path: str
    teach: Callable[[_Function], _Function]


_UTILS = "torch.distributed._state_dict_utils"
_CHECKPOINT = "torch.distributed.checkpoint"
_SEAMS = (
    _Seam(_UTILS, "_gather_state_dict", _gathering),
    _Seam(_UTILS, "_create_cpu_state_dict", _allocating),
    _Seam(_UTILS, "_broadcast_tensors", _broadcasting),
    _Seam(f"{_CHECKPOINT}.state_dict", "_gather_state_dict", _gathering),
    _Seam(f"{_CHECKPOINT}.state_dict", "_distribute_state_dict", _distributing),
    _Seam(f"{_CHECKPOINT}.staging", "_create_cpu_state_dict", _allocating),
    _Seam(f"{_CHECKPOINT}._state_dict_stager", "StateDictStager._offload_tensor", _staging),
)
_TAUGHT = "_sidestream_knows_sharded_tensors"


@uncompiled
def teach_torch(*_: object) -> None:
    """Teach those of torch's modules that are imported by now. It is called by `fully_shard` and is
    a hook of every state dict of a sharded model and its optimizer, so that others pay nothing and
    the order of imports does not matter.

    Raises:
        RuntimeError: one of them asks for a state dict, and this torch lacks the function that
            would have to be taught.
    """
    for seam in _SEAMS:
        module = sys.modules.get(seam.module)
        if module is not None:
            _teach(module, seam)


def _teach(module: Any, seam: _Seam) -> None:
    *owners, name = seam.path.split(".")
    owner = functools.reduce(lambda place, part: getattr(place, part, None), owners, module)
    function = getattr(owner, name, None)
    if function is None:
        _refuse_to_answer(seam)
    elif not hasattr(function, _TAUGHT):
        taught = seam.teach(function)
        setattr(taught, _TAUGHT, True)
        setattr(owner, name, taught)


def _refuse_to_answer(seam: _Seam) -> None:
    """Raise if the module of `seam` is among the callers; all others get their state dict."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != seam.module:
        frame = frame.f_back
    if frame is not None:
        raise RuntimeError(
            f"state_dict: expected {seam.module}.{seam.path} as in torch 2.11 to 2.14, which torch "
            f"{torch.__version__} lacks, so that one rank's shards would pass for whole tensors "
            "there; use sidestream's full_state_dict, save_checkpoint and load_checkpoint instead"
        )
