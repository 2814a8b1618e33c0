"""Tensors inside what a forward takes and returns: nested containers and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in `value`, depth first. What is no container is a leaf."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name, None))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to every tensor; containers keep their types, the rest its
    identity.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(map_tensors(function, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for entry in dataclasses.fields(value):
            if hasattr(value, entry.name):
                # Frozen dataclasses forbid plain assignment.
                object.__setattr__(
                    changed, entry.name, map_tensors(function, getattr(value, entry.name))
                )
        return changed
    return value
