"""Which parameter belongs to which communication unit: decided from the module tree alone, nothing
changed.

Each parameter goes to the nearest enclosing module whose class is in `fsdp_unit_modules`, else to
the root. What several units would own, a tied parameter or a module that stands in two of them,
goes to the root. A module's parameters are then split by dtype, by whether they are trainable, by
the wires that they travel in and by whether they are an expert's, and into buckets where these are
asked for.

Of what the root owns, the trainable parameters of a large module, as an embedding and a head are,
have a unit of their own: a head's gradient is there first and an embedding's last, and one unit
would keep both until then. Such a unit is still gathered and released with the root, since code may
use its weights without calling its module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...buffers.layout import reverse_buckets, round_up
from ...kernels import ALIGN_NUMEL
from ..arguments import lacks_forward
from ..expert_ranks import is_expert
from ..messages import listed
from ..optim import replaced_params
from ..precision import MixedPrecisionPolicy, resolve_dtypes
from ..shard_config import UnitSizes
from ..tensor.sharded_tensor import ShardedTensor
from ..wire_choice import ParamWires
from .uncompiled import named_buffers, param_places, plain_name
from .unit_classes import class_names

Signature = list[tuple[str, tuple[int, ...], str, bool]]
_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False, slots=True)
class ParamEntry:
    """One parameter: its first name, and every (module, attribute) that holds it. `caches`: the
    lists and dictionaries of modules that do so too, and where. `param` is the plain one until its
    unit is attached, which frees it, then the sharded one. `first_index`: elements of the model
    before it. `is_expert`: whether only some ranks have it.
    """

    name: str
    param: Tensor
    first_index: int = 0
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    caches: list[tuple[Any, Any]] = field(default_factory=list)
    wires: ParamWires = field(default_factory=ParamWires)
    is_expert: bool = False


@dataclass(eq=False, slots=True)
class GroupPlan:
    """One module's units, each a list of parameters. The root comes first."""

    name: str
    module: nn.Module
    units: list[list[ParamEntry]]
    is_root: bool

    def unit_name(self, members: Sequence[ParamEntry]) -> str:
        """The name of the unit of `members`: its module's, or, of several units of the root, that
        of the module inside it that holds them all.
        """
        holders = {entry.name.rpartition(".")[0] for entry in members}
        is_apart = self.is_root and len(self.units) > 1 and len(holders) == 1
        return (holders.pop() if is_apart else self.name) or "(root)"


def collect_params(module: nn.Module, *, takes_meta: bool = False) -> list[ParamEntry]:
    """Every floating-point parameter once, in registration order, with all its places.

    Integer and bool parameters are not sharded. `takes_meta`: what is on the meta device gets its
    values later.

    Raises:
        ValueError: a parameter that is already sharded, on the meta device, lazy, of another dtype
            or layout, of a tensor class with rules of its own, or an integer one that requires
            grad; a buffer that cannot be shared. All are named.
    """
    entries: dict[int, ParamEntry] = {}
    problems: list[str] = []
    first_index = 0
    for name, submodule, attribute, param in param_places(module):
        if id(param) not in entries:
            problem = _problem(param, takes_meta)
            if problem:
                problems.append(f"'{name}' {problem}")
                continue
            if not param.is_floating_point():
                continue
            entry = ParamEntry(name, param, first_index, is_expert=is_expert(param))
            entries[id(param)] = entry
            # Noise is drawn for 16 elements at once, and fastest from such a place on.
            first_index += round_up(param.numel(), ALIGN_NUMEL)
        entries[id(param)].places.append((submodule, attribute))
    problems += [
        f"buffer '{name}' {problem}"
        for name, buffer in named_buffers(module)
        if (problem := _problem_of_any(buffer, takes_meta))
    ]
    if problems:
        raise ValueError("fully_shard cannot take these parameters: " + listed(problems, "; "))
    return list(entries.values())


def _problem(param: nn.Parameter, takes_meta: bool) -> str | None:
    if isinstance(param, ShardedTensor):
        return "is sharded already: call fully_shard once, on the outermost module"
    if (other := replaced_params.name_of(param)) is not None:
        return (
            f"was '{other}' of a model that is sharded already, which does not use this tensor any "
            "more: shard one module that holds both models, or give this one a copy"
        )
    problem = _problem_of_any(param, takes_meta)
    if problem:
        return problem
    if param.layout is not torch.strided:
        return f"has layout {param.layout}: expected a dense one; call to_dense() on it"
    return _problem_of_gradient(param) or _problem_of_dtype(param)


def _problem_of_gradient(param: nn.Parameter) -> str | None:
    if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        return (
            "has gradient hooks, which autograd would not call on its sharded form: remove them, "
            "and change p.grad between backward and optimizer.step instead"
        )
    if param.grad is not None:
        return (
            "has a gradient, which each rank computed for itself: clear it (zero_grad) before "
            "fully_shard"
        )
    return None


def _problem_of_dtype(param: nn.Parameter) -> str | None:
    if param.is_complex() and param.requires_grad:
        return (
            f"is complex, of dtype {param.dtype}: hold its real form, torch.view_as_real(p), as "
            "the parameter, and call torch.view_as_complex on it in forward"
        )
    if not param.is_floating_point():
        if param.requires_grad:
            return f"has dtype {param.dtype} and requires grad: expected requires_grad=False"
        return None
    if param.dtype not in _SUPPORTED:
        return f"has dtype {param.dtype}: expected float32, bfloat16 or float16"
    return None


def _problem_of_any(tensor: Tensor, takes_meta: bool) -> str | None:
    """What keeps a parameter or buffer from being taken, other than its dtype."""
    if is_lazy(tensor):
        return "has no shape yet: run one forward of its lazy module first"
    if is_dtensor(tensor):
        return "is a DTensor: pass a model with plain parameters"
    if tensor.is_meta and is_expert(tensor):
        return (
            "is an expert's (allreduce=False) and on the meta device: expected values, with which "
            "the ranks of each expert start; materialise it first"
        )
    if tensor.is_meta and not takes_meta:
        return (
            "is on the meta device: materialise it first (module.to_empty, reset_parameters), or "
            "have fully_shard do so with init_model_with_meta_device=True, or a function that sets "
            "what a module has"
        )
    # An integer tensor stays as it is, so it may be of any class.
    if tensor.is_floating_point() and (base := _base_with_rules(type(tensor))) is not None:
        return (
            f"is of class {type(tensor).__name__}, which computes by rules of its own (those of "
            f"{base.__module__}.{base.__qualname__}) that its sharded form would lose: expected a "
            "plain tensor; pass a model of plain ones, or keep this one outside of it"
        )
    return None


_RULES = ("__torch_dispatch__", "__torch_function__", "fsdp_pre_all_gather")


def _base_with_rules(kind: type) -> type | None:
    """The class that makes `kind` another thing than a plain tensor, None if none does."""
    for base in kind.__mro__:
        if base in (nn.Parameter, Tensor):
            return None
        if any(name in vars(base) for name in _RULES):
            return base
    return None


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is one of `torch.distributed.tensor`."""
    # Who has one has imported this, which takes longer than all of sidestream.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def partition(
    module: nn.Module,
    entries: Sequence[ParamEntry],
    classes: tuple[type[nn.Module], ...],
    policy: MixedPrecisionPolicy,
    sizes: UnitSizes,
) -> list[GroupPlan]:
    """The groups of `module`, root first, then unit modules in registration order. Empty ones are
    left out.

    With `classes`, modules with at least `sizes.split_root_bytes` of trainable parameters, of those
    that the root owns, have a unit of their own.

    Raises:
        ValueError: a unit class of which the model has no instance.
    """
    matches = {
        name: submodule
        for name, submodule in module.named_modules()
        if name and isinstance(submodule, classes)
    }
    for cls in classes:
        if not any(isinstance(submodule, cls) for submodule in matches.values()) and not isinstance(
            module, cls
        ):
            raise ValueError(
                "fsdp_unit_modules: expected classes that the model contains, got "
                f"{cls.__module__}.{cls.__qualname__}, which matches no module; name some of "
                f"{class_names(module)}"
            )
    owners_of = _owners(module, {id(submodule): name for name, submodule in matches.items()})
    owned: dict[str, list[ParamEntry]] = {"": [], **{name: [] for name in matches}}
    for entry in entries:
        owners = set().union(*(owners_of[id(place)] for place, _ in entry.places))
        owned[owners.pop() if len(owners) == 1 else ""].append(entry)
    for name, members in owned.items():
        if name and members and lacks_forward(matches[name]):
            raise ValueError(
                "fsdp_unit_modules: expected classes with a forward, got "
                f"'{plain_name(name)}' of class {type(matches[name]).__name__}, which is never "
                "called; name the class of its elements"
            )
    parts = {name: [members] for name, members in owned.items() if members or not name}
    if classes and sizes.split_root_bytes is not None:
        parts[""] = _large_modules_apart(owned[""], policy, sizes.split_root_bytes)
    return [
        GroupPlan(
            plain_name(name),
            matches.get(name, module),
            [unit for part in members for unit in _split(part, policy, sizes)],
            is_root=not name,
        )
        for name, members in parts.items()
    ]


def _owners(module: nn.Module, units: Mapping[int, str]) -> dict[int, set[str]]:
    """For every module's id the names of the nearest units around it, over all paths to it.

    `units` maps the id of a unit's module to its name; '' is the root.
    """
    owners: dict[int, set[str]] = {}
    pending = [(module, "")]
    while pending:
        current, owner = pending.pop()
        owner = units.get(id(current), owner)
        known = owners.setdefault(id(current), set())
        if owner not in known:
            known.add(owner)
            pending += [(child, owner) for child in current.children()]
    return owners


def _large_modules_apart(
    members: Sequence[ParamEntry], policy: MixedPrecisionPolicy, least_bytes: int
) -> list[list[ParamEntry]]:
    """`members` by the module that holds them first, where that has `least_bytes` of trainable
    ones; the others together.
    """
    trainable_bytes: dict[int, int] = {}
    for entry in members:
        if entry.param.requires_grad:
            holder = id(entry.places[0][0])
            trainable_bytes[holder] = trainable_bytes.get(holder, 0) + _nbytes(entry, policy)
    parts: dict[int | None, list[ParamEntry]] = {}
    for entry in members:
        holder = id(entry.places[0][0])
        is_large = trainable_bytes.get(holder, 0) >= least_bytes
        parts.setdefault(holder if is_large else None, []).append(entry)
    return list(parts.values())


def _nbytes(entry: ParamEntry, policy: MixedPrecisionPolicy) -> int:
    """Bytes in the compute dtype."""
    param = entry.param
    dtypes = resolve_dtypes(policy, param.dtype, trainable=param.requires_grad)
    return param.numel() * dtypes.compute.itemsize


def _split(
    members: Sequence[ParamEntry], policy: MixedPrecisionPolicy, sizes: UnitSizes
) -> list[list[ParamEntry]]:
    kinds: dict[tuple[object, ...], list[ParamEntry]] = {}
    for entry in members:
        param = entry.param
        kind = (param.dtype, param.requires_grad, entry.wires.names, entry.is_expert)
        kinds.setdefault(kind, []).append(entry)
    if sizes.reverse_buckets is None:
        return [
            unit
            for entries in kinds.values()
            for unit in _buckets_up_to(sizes.bucket_bytes, entries, policy)
        ]
    rule, units = sizes.reverse_buckets, []
    for entries in kinds.values():
        dtype = policy.param_dtype or entries[0].param.dtype
        apart = {index for index, entry in enumerate(entries) if _is_shared_embedding(entry)}
        numels = [entry.param.numel() for entry in entries]
        least = rule.least_numel(dtype.itemsize, sum(numels))
        for bucket in reverse_buckets(numels, least, apart=apart):
            units.append([entries[index] for index in sorted(bucket)])
    # The first backward exchanges the last unit first: that of which all gradients come first.
    return sorted(units, key=lambda unit: unit[0].first_index)


def _buckets_up_to(
    bucket_bytes: int | None, entries: Sequence[ParamEntry], policy: MixedPrecisionPolicy
) -> list[list[ParamEntry]]:
    buckets: list[list[ParamEntry]] = [[]]
    filled = 0
    for entry in entries:
        nbytes = _nbytes(entry, policy)
        if buckets[-1] and bucket_bytes is not None and filled + nbytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(entry)
        filled += nbytes
    return buckets


def _is_shared_embedding(entry: ParamEntry) -> bool:
    return bool(getattr(entry.param, "shared_embedding", False))


def _marks(entry: ParamEntry) -> str:
    """Those by which ranks choose their units."""
    shared = ", shared embedding" if _is_shared_embedding(entry) else ""
    return f"{', expert' if entry.is_expert else ''}{shared}"


def tree_signature(module: nn.Module, entries: Sequence[ParamEntry]) -> Signature:
    """(name, shape, dtype, requires_grad) of parameters and buffers, to compare ranks; with the
    dtype the wires that were chosen, and what its marks say.
    """
    params = [
        (
            entry.name,
            tuple(entry.param.shape),
            f"{entry.param.dtype}{entry.wires.described}{_marks(entry)}",
            entry.param.requires_grad,
        )
        for entry in entries
    ]
    whole = [(plain_name(n), p) for n, p in module.named_parameters() if not p.is_floating_point()]
    others = [
        (name, tuple(tensor.shape), str(tensor.dtype), False)
        for name, tensor in (*whole, *named_buffers(module))
    ]
    return params + others
