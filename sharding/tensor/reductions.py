"""Operators that make one result of all elements of a sharded tensor: the same on every rank, so
each is a collective.

    what                                       how                         its bits
    max, min, any, all, count_nonzero, equal   each rank its part, then    those of the plain
                                               the operator over results   operator
    p-norms (p >= 1, inf), of lists too        `exact_norm.py`             equal for every sharding
    GradScaler's check for overflow            each rank its part, then    those of the plain
                                               the flag is agreed          operator
    any other, and those over some dims        over the gathered tensor    those of the plain
                                                                           operator
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload

from ..errors import communicating
from .exact_norm import exact_norms

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

_BY_RESULTS = frozenset({"all", "amax", "amin", "any", "count_nonzero", "max", "min"})
_DEFAULTS: tuple[tuple[Any, ...], ...] = ((), ([],), ([], False), (None,))
"""Arguments besides the tensor that mean all elements."""
_NORMS = frozenset({"linalg_vector_norm", "norm"})
_NORM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNTAGGED = frozenset(
    {"_local_scalar_dense", "allclose", "argmax", "argmin", "median", "nanmedian", "sort"}
)
_TAG = getattr(torch.Tag, "reduction", None)

Rule = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def reduction_rule(name: str, operator: OpOverload) -> Rule | None:
    """How to run `operator`, called `name`, if it reduces and writes to no argument."""
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _check_overflow
    rule = _rule_of(name, operator)
    return None if rule is None else functools.partial(_one_result, rule)


def _one_result(
    rule: Rule, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    for x in (*args, *kwargs.values()):
        for one in x if isinstance(x, (list, tuple)) else (x,):
            if _is_sharded(one):
                one.require_one_value(operator)
    return rule(operator, args, kwargs)


def _rule_of(name: str, operator: OpOverload) -> Rule | None:
    if name == "_foreach_norm":
        return _norms
    if name == "_foreach_max":
        return _foreach_max
    if name == "equal":
        return _equal
    if any(a.alias_info is not None and a.alias_info.is_write for a in operator._schema.arguments):
        return None
    if not (_TAG in operator.tags or name in _UNTAGGED | _BY_RESULTS | _NORMS):
        return None
    return {**dict.fromkeys(_BY_RESULTS, _by_results), **dict.fromkeys(_NORMS, _norm)}.get(
        name, _over_whole
    )


def _over_whole(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator(*map(_whole, args), **{key: _whole(x) for key, x in kwargs.items()})


def _whole(x: Any) -> Any:
    return x.gather_full() if _is_sharded(x) else x


def _is_sharded(x: Any) -> bool:
    return hasattr(x, "intervals")


def _by_results(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x: ShardedTensor = args[0]
    if args[1:] not in _DEFAULTS or kwargs or not x.numel():
        return _over_whole(operator, args, kwargs)
    if x.is_whole:
        return operator(x.local)
    own = operator(x.share) if x.share.numel() else None
    like = operator(torch.zeros(1, dtype=x.dtype, device=x.device)) if own is None else own
    results = _results_of_holders(x, like)
    is_count = operator._schema.name == "aten::count_nonzero"
    return results.sum() if is_count else operator(results)


def _results_of_holders(x: ShardedTensor, own: Tensor) -> Tensor:
    """`own` [] of every rank that answers for elements of `x`."""
    results = x.gather_parts(own.reshape(1))
    holders = (rank for rank, (start, stop) in enumerate(x.shares) if start < stop)
    return torch.stack([results[rank, 0] for rank in holders])


def _equal(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    mine, other = args if _is_sharded(args[0]) else args[::-1]
    if mine.shape != other.shape:
        return False
    if _is_sharded(other) and not mine.has_layout_of(other):
        return bool(operator(mine.gather_full(), other.gather_full()))
    part = other.local if _is_sharded(other) else mine.interval_of(other)
    own = torch.tensor(operator(mine.local, part), device=mine.device)
    return bool(own if mine.is_whole else mine.gather_parts(own.reshape(1)).all())


def _norm(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x: ShardedTensor = args[0]
    given = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | kwargs
    dims, dtype = given.get("dim"), given.get("dtype") or x.dtype
    norm_type = given.get("ord", given.get("p", 2))
    over_all = not dims or len(dims) == x.dim()
    order = 2.0 if norm_type is None else float(norm_type)
    if not over_all or given.get("keepdim") or not _is_exact(x, order, dtype):
        return _over_whole(operator, args, kwargs)
    return _exact_norms([x], order)[0].to(dtype)


def _norms(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors: Sequence[Tensor] = args[0]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > len(("self", "ord")) else kwargs.get("dtype")
    sharded: list[Any] = [x for x in tensors if _is_sharded(x)]
    if not all(_is_exact(x, order, dtype or x.dtype) for x in sharded):
        return list(operator([_whole(x) for x in tensors], order, dtype))
    exact = iter(_exact_norms(sharded, order))
    return [
        next(exact).to(dtype or x.dtype)
        if _is_sharded(x)
        else torch.linalg.vector_norm(x, order, dtype=dtype)
        for x in tensors
    ]


def _is_exact(x: ShardedTensor, order: float, dtype: torch.dtype) -> bool:
    return order >= 1 and x.dtype in _NORM_DTYPES and dtype in _NORM_DTYPES


def _exact_norms(tensors: Sequence[ShardedTensor], order: float) -> list[Tensor]:
    """Norms, each [], in the order of `tensors`, of all that share communicators at once."""
    positions: dict[int, list[int]] = {}
    for position, x in enumerate(tensors):
        positions.setdefault(0 if x.is_whole else id(x.group), []).append(position)
    norms: dict[int, Tensor] = {}
    for members in positions.values():
        like = tensors[members[0]]

        def reduce(tensor: Tensor, op: Any, like: ShardedTensor = like) -> None:
            if not like.is_whole:
                with communicating("norm of sharded tensors"):
                    dist.all_reduce(tensor, op, group=like.communicator)

        owned = [[x.local if x.is_whole else x.share] for x in map(tensors.__getitem__, members)]
        norms |= zip(members, exact_norms(owned, order, like.device, reduce), strict=True)
    return [norms[position] for position in range(len(tensors))]


def _foreach_max(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return [torch.max(x) for x in args[0]]


def _check_overflow(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Multiply gradients by the inverse scale, and let all ranks know where one found an inf."""
    grads, found_inf, inverse_scale = args
    sharded = [x for x in grads if _is_sharded(x)]
    parts = [x.local if _is_sharded(x) else x for x in grads]
    if parts := [part for part in parts if part.numel()]:
        operator(parts, found_inf, inverse_scale)
    for x in sharded:
        torch.autograd.graph.increment_version(x.local)
    groups = [
        x.group if x.model_group is None else x.model_group
        for x in sharded
        if x.model_group is not None or not x.is_whole
    ]
    for group in {id(group): group for group in groups}.values():
        with communicating("agreement on an overflow"):
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
