"""Gradients of parameters that model-parallel ranks hold alike while each has a part of their
gradient: found by marks that people leave on them, as Megatron-Core does, and summed.

    kind                      found by                                        over     sum
    conditional embedders     `pipeline_parallel`                             pp       SUM
    elastic routers           `flextron_router_pp_sync`                       pp       SUM
    sequence-parallel ones    `sequence_parallel`, a q_layernorm, k_layernorm tp       SUM
    averaged ones             `average_gradients_across_tp_domain`            tp       AVG
    word embeddings           `shared_embedding`                              embd     SUM
    position embeddings       those of a module called position_embeddings    pos_embd SUM

A mark is an attribute of the parameter that counts as true. Of one kind all are one message in
FP32, summed in the order of the group's ranks and rounded once: a reduce-scatter of ours and a
gather. Of a sharded parameter that is this rank's part, since the sum is elementwise.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.checks import SOURCE_DTYPES, check_dtype
from .collectives import start_all_gather
from .communicators import gather_objects, host_group, require_alike
from .data_parallel_base import DataParallelBase, own_part
from .errors import communicating
from .process_groups import ProcessGroupCollection
from .reduce_scatter import reduce_scatter_with_fp32_accumulation
from .tensor.sharded_tensor import ShardedTensor

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
Copies = tuple[tuple[str, nn.Parameter], ...]
"""One parameter of this rank, with its name, or what its chunks hold of one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`group`: its name in the collection. `is_in_all_chunks`: chunks hold copies of one, told by
    name. `is_named_alike`: it has one name on all ranks. `is_optional`: without the group no other
    rank holds one.
    """

    what: str
    group: str
    mark: str = ""
    modules: tuple[str, ...] = ()
    unless: str = ""
    op: dist.ReduceOp.RedOpType = SUM
    is_in_all_chunks: bool = False
    is_named_alike: bool = True
    is_optional: bool = False

    def includes(self, name: str, param: nn.Parameter) -> bool:
        """Whether a parameter of that name is one: it has the `mark`, or is in a module called as
        one of `modules`, and does not have the mark `unless`.
        """
        is_in_one = not {*self.modules}.isdisjoint(name.split("."))
        is_one = is_in_one or getattr(param, self.mark, False)
        return bool(is_one) and not getattr(param, self.unless, False)


_AVERAGED = "average_gradients_across_tp_domain"
# Heads are divided among the ranks: each has its own heads' part of the norms' gradients.
_NORMS, _POSITIONS = ("q_layernorm", "k_layernorm"), ("position_embeddings",)
KINDS = (
    Kind("conditional embedders", "pp", "pipeline_parallel", is_in_all_chunks=True),
    Kind("elastic routers", "pp", "flextron_router_pp_sync", is_in_all_chunks=True),
    Kind("sequence-parallel parameters", "tp", "sequence_parallel", _NORMS, _AVERAGED),
    Kind("parameters averaged over tensor parallelism", "tp", _AVERAGED, op=AVG),
    Kind("tied word embeddings", "embd", "shared_embedding", is_named_alike=False),
    Kind("position embeddings", "pos_embd", "", _POSITIONS, is_named_alike=False, is_optional=True),
)
"""In the order in which they are summed."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The parameters of one kind on this rank, which others of `group` hold too."""

    kind: Kind
    group: dist.ProcessGroup
    params: tuple[Copies, ...]


def find_replicas(
    chunks: Sequence[DataParallelBase], process_groups: ProcessGroupCollection | None
) -> list[Replicas]:
    """The trainable ones of `chunks`, kind by kind, where a group has other ranks.

    Raises:
        AttributeError: a group that is needed is unset.
    """
    # The chunks' own, which are those that have the gradients.
    trained = [
        (number, *named)
        for number, chunk in enumerate(chunks)
        for named in chunk.named_parameters()
        if named[1].requires_grad
    ]
    replicas = []
    for kind in KINDS:
        found: dict[object, list[tuple[str, nn.Parameter]]] = {}
        for number, name, param in trained:
            if kind.includes(name, param):
                key = name if kind.is_in_all_chunks else (number, name)
                found.setdefault(key, []).append((name, param))
        if found and (group := group_with_others(process_groups, kind.group, kind.is_optional)):
            replicas.append(Replicas(kind, group, tuple(map(tuple, found.values()))))
    return replicas


def group_with_others(
    process_groups: ProcessGroupCollection | None, name: str, is_optional: bool = False
) -> dist.ProcessGroup | None:
    """That group, None if this rank is alone in it, or it is unset and optional. Without a
    collection all ranks are data-parallel, and nothing else.

    Raises:
        AttributeError: it is unset.
    """
    if process_groups is None:
        group = dist.group.WORLD if "dp" in name and dist.is_initialized() else None
    else:
        group = process_groups.get(name) if is_optional else getattr(process_groups, name)
    return group if group is not None and dist.get_world_size(group) > 1 else None


_FIX = (
    "mark the same parameters on these ranks, and shard them alike: as a unit of their own, over "
    "as many ranks, or not at all (ZeRO level 0)"
)


def agree_on(replicas: Replicas) -> None:
    """Refuse what cannot be summed (a collective of the hosts).

    Raises:
        ValueError: ranks hold other parameters, or other parts of them, on all ranks; a gradient
            that is not FP32, BF16 or FP16, or sparse.
        RuntimeError: a gradient waits for its exchange.
        CommunicationError: a rank is gone.
    """
    for name, param in itertools.chain(*replicas.params):
        if param.grad is not None:
            check_dtype(f"gradient of '{name}'", own_part(param.grad), SOURCE_DTYPES)
    kind = replicas.kind
    layouts = [_layout_of(*copies[0], named=kind.is_named_alike) for copies in replicas.params]
    require_same(layouts, kind.what, replicas.group, fix=_FIX)


def require_same(told: Sequence[str], what: str, group: dist.ProcessGroup, *, fix: str) -> None:
    """Have all ranks of `group` tell the same (a collective of the hosts).

    Raises:
        ValueError: they do not; on all ranks.
        CommunicationError: a rank is gone.
    """
    hosts, where = host_group(group), f"comparison of {what}"
    number = int.from_bytes(hashlib.sha256("\n".join(told).encode()).digest()[:7], "big")
    extremes = torch.tensor([number, -number])
    with communicating(where):
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=hosts)
    if extremes[0] != -extremes[1]:
        everyone = gather_objects(list(told), hosts, torch.device("cpu"), where)
        ranks = dist.get_process_group_ranks(group)
        expected = f"{what}: expected the same ones, and of each the same elements,"
        require_alike(dict(zip(ranks, everyone, strict=True)), expected, fix)


def _layout_of(name: str, param: nn.Parameter, *, named: bool) -> str:
    """What must be alike on all ranks of a group, in words. For a sharded one also what the other
    data-parallel ranks hold: then either all of them find a difference or none does.
    """
    text = f"'{name}' of shape {tuple(param.shape)}" if named else f"shape {tuple(param.shape)}"
    if isinstance(param, ShardedTensor):
        stop = param.start + param.local.numel()
        cut = hash(param.intervals) & 0xFFFF_FFFF  # of integers alone: the same in all processes
        return f"{text}, elements {param.start}..{stop} (cut {cut:08x})"
    placements = getattr(param, "placements", None)  # of a DTensor
    return text if placements is None else f"{text}, placed {placements} by a mesh"


def sum_gradients(replicas: Replicas) -> None:
    """Give all ranks of the group, and all copies on them, the sum or the average of all, of which
    an absent one counts as zeros, as in the exchange of a unit (a collective).

    Raises:
        CommunicationError: a rank is gone.
    """
    grads = [[_gradient(param) for _, param in copies] for copies in replicas.params]
    totals = [
        functools.reduce(torch.add, (grad.float().reshape(-1) for grad in copies))
        for copies in grads
    ]
    group, world_size = replicas.group, dist.get_world_size(replicas.group)
    numels = [*map(len, totals)]
    if not (numel := sum(numels)):
        return
    flat = torch.cat([*totals, totals[0].new_zeros(-numel % world_size)])
    own = flat.chunk(world_size)[dist.get_rank(group)]
    what = f"sum of the gradients of {replicas.kind.what}"
    reduce_scatter_with_fp32_accumulation(own, flat, replicas.kind.op, group, name=what)
    start_all_gather(group, flat, own, what).wait()
    summed = zip(grads, flat[:numel].split(numels), strict=True)
    pairs = [(grad, total.view_as(grad)) for copies, total in summed for grad in copies]
    torch._foreach_copy_([grad for grad, _ in pairs], [total for _, total in pairs])


def _gradient(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param, requires_grad=False)
    return own_part(param.grad)
