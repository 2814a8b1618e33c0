"""The parts of a model that FSDP2 shards by themselves, and what it cannot shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from .arguments import require_forward
from .expert_ranks import is_expert
from .modules.unit_classes import UnitClass, resolve_unit_classes


def units_in(module: nn.Module, given: Iterable[UnitClass] | None) -> list[nn.Module]:
    """The units below `module`, those inside others first, as FSDP2 wants them.

    Raises:
        ValueError: one has no forward.
    """
    declared = [kind for part in module.modules() for kind in getattr(part, "_fsdp_modules", ())]
    classes = (*resolve_unit_classes(given, module), *resolve_unit_classes(declared, module))
    found = [part for part in module.modules() if isinstance(part, classes)]
    units = [part for part in reversed(found) if part is not module]
    for unit in units:
        require_forward(unit)
    return units


def require_apart(module: nn.Module, units: list[nn.Module]) -> None:
    """Refuse a parameter of two units, which may share the module that has it: FSDP2 gathers it for
    one of them alone, or each would get a copy, trained apart.

    Raises:
        ValueError: there is one.
    """
    owners: dict[nn.Parameter, nn.Module] = {}
    for unit in (module, *units):
        for part in _own_parts(unit, {*units}):
            for param in part._parameters.values():
                if param is not None and owners.setdefault(param, unit) is not unit:
                    named = module.named_parameters(remove_duplicate=False)
                    raise ValueError(
                        "fsdp_unit_modules: expected every parameter in one unit, got one of two "
                        f"under the names {[name for name, other in named if other is param]}; "
                        "leave out the class that parts them"
                    )


def _own_parts(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """`unit` and what is in it, but for other units."""
    yield unit
    for child in unit.children():
        if child not in units:
            yield from _own_parts(child, units)


def require_shardable(module: nn.Module, world_size: int) -> None:
    """Refuse parameters that FSDP2 cannot shard over so many ranks, or of which it cannot exchange
    the gradients: it would say so when others are sharded, or, of experts, never.

    Raises:
        ValueError: there are some.
    """
    wrong = []
    for name, param in module.named_parameters():
        if not param.dim():
            wrong.append(f"'{name}' has no dimension: give it one, of one element")
        elif not param.numel() and param.requires_grad:
            wrong.append(f"'{name}' is empty: freeze it")
        elif not param.is_contiguous():
            wrong.append(f"'{name}' is not contiguous: make it of .contiguous()")
        elif is_expert(param) and world_size > 1:
            wrong.append(
                f"'{name}' is an expert's (allreduce=False): remove the mark where all ranks hold "
                "the same"
            )
    if wrong:
        raise ValueError(
            f"module: expected parameters that FSDP2 can shard, got others: {'; '.join(wrong)}; "
            "or use DistributedDataParallel, which takes them"
        )
