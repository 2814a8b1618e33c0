"""Which parameter belongs to which communication unit: decided from the module tree alone, nothing
changed.

Each parameter goes to the nearest enclosing module whose class is in `fsdp_unit_modules`, else to
the root. A tied parameter that several units would own goes to the root. A module's parameters are
then split by dtype and by whether they are trainable, and into buckets when `bucket_bytes` is
given.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .arguments import kind_of
from .precision import MixedPrecisionPolicy, resolve_dtypes
from .sharded_tensor import ShardedTensor
from .uncompiled import plain_name

UnitClass = type[nn.Module] | str
Signature = list[tuple[str, tuple[int, ...], str, bool]]
_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
_NAMED = 10
"""Offenders that an error names."""


@dataclass(eq=False, slots=True)
class ParamEntry:
    """One parameter: its first name, and every (module, attribute) that holds it."""

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class GroupPlan:
    """One module's units, each a list of parameters. The root comes first."""

    name: str
    module: nn.Module
    units: list[list[ParamEntry]]
    is_root: bool


def resolve_unit_classes(unit_modules: Iterable[UnitClass] | None) -> tuple[type[nn.Module], ...]:
    """Classes given as classes or as import paths such as 'package.module.Block'.

    Raises:
        TypeError: no collection, not a class or string in it; a class that is no nn.Module.
        ValueError: an import path that leads nowhere; a container without a forward of its own.
    """
    if unit_modules is None:
        return ()
    if isinstance(unit_modules, (str, bytes, type)):
        unit_modules = [unit_modules]
    if not isinstance(unit_modules, Iterable):
        raise TypeError(_no_class(unit_modules))
    classes = []
    for entry in unit_modules:
        resolved = _import_class(entry) if isinstance(entry, str) else entry
        if not (isinstance(resolved, type) and issubclass(resolved, nn.Module)):
            raise TypeError(_no_class(entry))
        if resolved in (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict):
            raise ValueError(
                f"fsdp_unit_modules: expected classes with a forward, got {resolved.__name__}, "
                "which is never "
                "called; name the class of its elements"
            )
        classes.append(resolved)
    return tuple(classes)


def _no_class(entry: object) -> str:
    is_module = isinstance(entry, nn.Module)  # its text has a line for each part
    return (
        "fsdp_unit_modules: expected nn.Module classes or import paths like "
        "'package.module.Block', got "
        + (
            f"an instance of {kind_of(entry)}; pass its class"
            if is_module
            else f"{entry!r}; pass such classes"
        )
    )


def _import_class(path: str) -> object:
    module_name, _, class_name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"fsdp_unit_modules: expected an import path like 'package.module.Block', got '{path}' "
            f"({error}); correct it, or pass the class itself"
        ) from error


def collect_params(module: nn.Module) -> list[ParamEntry]:
    """Every floating-point parameter once, in registration order, with all its places.

    Integer and bool parameters are left alone.

    Raises:
        ValueError: a parameter that is already sharded, on the meta device, of another dtype, or an
            integer one that requires grad; all such parameters are named.
    """
    entries: dict[int, ParamEntry] = {}
    problems: list[str] = []
    for module_name, submodule in module.named_modules():
        for attribute, param in submodule._parameters.items():
            if param is None:
                continue
            name = plain_name(f"{module_name}.{attribute}" if module_name else attribute)
            if id(param) not in entries:
                problem = _problem(param)
                if problem:
                    problems.append(f"'{name}' {problem}")
                    continue
                if not param.is_floating_point():
                    continue
                entries[id(param)] = ParamEntry(name, param)
            entries[id(param)].places.append((submodule, attribute))
    problems += [
        f"buffer '{name}' is on the meta device: materialise it first"
        for name, buffer in module.named_buffers()
        if buffer.is_meta
    ]
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise ValueError(
            "fully_shard cannot take these parameters: " + "; ".join(problems[:_NAMED]) + more
        )
    return list(entries.values())


def _problem(param: nn.Parameter) -> str | None:
    if isinstance(param, ShardedTensor):
        return "is sharded already: call fully_shard once, on the outermost module"
    if _is_dtensor(param):
        return "is a DTensor: pass a model with plain parameters"
    if param.is_meta:
        return "is on the meta device: materialise it first (module.to_empty, reset_parameters)"
    if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        return (
            "has gradient hooks, which autograd would not call on its sharded form: remove them, "
            "and change p.grad between backward and optimizer.step instead"
        )
    if not param.is_floating_point():
        if param.requires_grad:
            return f"has dtype {param.dtype} and requires grad: expected requires_grad=False"
        return None
    if param.dtype not in _SUPPORTED:
        return f"has dtype {param.dtype}: expected float32, bfloat16 or float16"
    return None


def _is_dtensor(param: nn.Parameter) -> bool:
    # Who has one has imported this, which takes longer than all of sidestream.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(param, module.DTensor)


def partition(
    module: nn.Module,
    entries: Sequence[ParamEntry],
    classes: tuple[type[nn.Module], ...],
    policy: MixedPrecisionPolicy,
    bucket_bytes: int | None,
) -> list[GroupPlan]:
    """The groups of `module`, root first, then unit modules in registration order. Empty ones are
    left out.

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
            present = sorted({type(submodule).__name__ for submodule in module.modules()})
            raise ValueError(
                "fsdp_unit_modules: expected classes that the model contains, got "
                f"{cls.__module__}."
                f"{cls.__qualname__}, which matches no module; name some of {', '.join(present)}"
            )
    module_names = {id(submodule): name for name, submodule in module.named_modules()}
    owned: dict[str, list[ParamEntry]] = {"": [], **{name: [] for name in matches}}
    for entry in entries:
        owners = {_nearest(module_names[id(place)], matches) for place, _ in entry.places}
        owned[owners.pop() if len(owners) == 1 else ""].append(entry)
    return [
        GroupPlan(
            name, matches.get(name, module), _split(members, policy, bucket_bytes), is_root=not name
        )
        for name, members in owned.items()
        if members or not name
    ]


def _nearest(module_name: str, matches: dict[str, nn.Module]) -> str:
    while module_name and module_name not in matches:
        module_name = module_name.rpartition(".")[0]
    return module_name


def _split(
    members: Sequence[ParamEntry], policy: MixedPrecisionPolicy, bucket_bytes: int | None
) -> list[list[ParamEntry]]:
    kinds: dict[tuple[torch.dtype, bool], list[ParamEntry]] = {}
    for entry in members:
        kinds.setdefault((entry.param.dtype, entry.param.requires_grad), []).append(entry)
    units: list[list[ParamEntry]] = []
    for (dtype, _), entries in kinds.items():
        itemsize = resolve_dtypes(policy, dtype).compute.itemsize
        bucket: list[ParamEntry] = []
        filled = 0
        for entry in entries:
            nbytes = entry.param.numel() * itemsize
            if bucket and bucket_bytes is not None and filled + nbytes > bucket_bytes:
                units.append(bucket)
                bucket, filled = [], 0
            bucket.append(entry)
            filled += nbytes
        units.append(bucket)
    return units


def tree_signature(module: nn.Module, entries: Sequence[ParamEntry]) -> Signature:
    """(name, shape, dtype, requires_grad) of parameters and buffers, to compare ranks."""
    params = [
        (entry.name, tuple(entry.param.shape), str(entry.param.dtype), entry.param.requires_grad)
        for entry in entries
    ]
    buffers = [
        (name, tuple(buffer.shape), str(buffer.dtype), False)
        for name, buffer in module.named_buffers()
    ]
    return params + buffers
