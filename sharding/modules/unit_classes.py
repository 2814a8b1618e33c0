"""The classes whose instances are units: given as classes, import paths or bare names."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from torch import nn

from ..arguments import kind_of

UnitClass = type[nn.Module] | str


def resolve_unit_classes(
    unit_modules: Iterable[UnitClass] | None, module: nn.Module
) -> tuple[type[nn.Module], ...]:
    """The classes meant by classes, import paths such as 'package.module.Block', and bare names
    such as 'Block', which stand for every class of that name in `module`.

    Of several bare names, as in a model's `_no_split_modules`, one has to be found. The classes
    come sorted: sets have another order on each rank.

    Raises:
        TypeError: no collection, not a class or string in it; a class that is no nn.Module.
        ValueError: an import path that leads nowhere; bare names of which none is found.
    """
    if unit_modules is None:
        return ()
    if isinstance(unit_modules, (str, bytes, type)):
        unit_modules = [unit_modules]
    if not isinstance(unit_modules, Iterable):
        raise TypeError(_no_class(unit_modules))
    given = list(unit_modules)
    names = [entry for entry in given if isinstance(entry, str) and "." not in entry]
    classes = _classes_named(names, module)
    for entry in given:
        if entry in names:
            continue
        resolved = _import_class(entry) if isinstance(entry, str) else entry
        if not (isinstance(resolved, type) and issubclass(resolved, nn.Module)):
            raise TypeError(_no_class(entry))
        classes.add(resolved)
    return tuple(sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)))


def class_names(module: nn.Module) -> str:
    """The names of the classes in `module`, to choose from."""
    return ", ".join(sorted({type(submodule).__name__ for submodule in module.modules()}))


def _no_class(entry: object) -> str:
    is_module = isinstance(entry, nn.Module)  # its text has a line for each part
    return (
        "fsdp_unit_modules: expected nn.Module classes, their names or import paths like "
        "'package.module.Block', got "
        + (
            f"an instance of {kind_of(entry)}; pass its class"
            if is_module
            else f"{entry!r}; pass such classes"
        )
    )


def _classes_named(names: list[str], module: nn.Module) -> set[type[nn.Module]]:
    found = {type(submodule) for submodule in module.modules() if type(submodule).__name__ in names}
    if names and not found:
        raise ValueError(
            "fsdp_unit_modules: expected names of classes that the model contains, got "
            f"{', '.join(map(repr, names))}, which match no module; name some of "
            f"{class_names(module)}"
        )
    return found


def _import_class(path: str) -> object:
    module_name, _, class_name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"fsdp_unit_modules: expected an import path like 'package.module.Block', got '{path}' "
            f"({error}); correct it, or pass the class itself"
        ) from error
