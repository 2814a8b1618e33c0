"""Parameters that modules hold beside `_parameters`: in lists and dictionaries of their own.

What is found there changes its face with the registered one. What cannot be changed in place, a
tuple say, is refused: it would go on holding the plain parameter, which nothing trains. So are
parameters and buffers that share memory with a parameter, which would no longer follow it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .partition import ParamEntry
from .uncompiled import named_buffers, named_modules

_MODULE_STATE = frozenset(vars(nn.Module()))


class HeldContainer:
    """A list or dictionary that a module holds, found by the path to it each time.

    A reference to it would keep alive for ever what else is in it, such as a module.
    """

    __slots__ = ("_last", "_module", "_path")

    def __init__(self, module: nn.Module, path: tuple[Any, ...]) -> None:
        """`path`: the attribute of `module`, then keys and positions."""
        self._module = weakref.ref(module)
        self._path = path
        self._last: dict[Any, Any] = {}

    def _find(self) -> Any:
        """The container; what was put into it if it is gone."""
        module = self._module()
        try:
            container: Any = vars(module)
            for key in self._path:
                container = container[key]
        except (TypeError, LookupError):
            return self._last
        return container if isinstance(container, (list, MutableMapping)) else self._last

    def get(self, key: Any) -> Any:
        """What is at `key`, or None."""
        try:
            return self._find()[key]
        except LookupError:
            return None

    def __setitem__(self, key: Any, value: Any) -> None:
        self._last[key] = value
        with contextlib.suppress(IndexError):  # a list that lost it: `get` tells
            self._find()[key] = value


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor was found: the attribute of a module, then keys and positions."""

    path: tuple[Any, ...]
    tensor: Tensor
    is_writable: bool

    def __str__(self) -> str:
        return self.path[0] + "".join(f"[{key!r}]" for key in self.path[1:])


def find_cached_params(module: nn.Module, entries: Sequence[ParamEntry]) -> None:
    """Note at each of `entries` the lists and dictionaries of modules that hold it.

    Raises:
        ValueError: a module holds one in a tuple, a set or an attribute that is not registered; one
            shares memory with another, or with a buffer.
    """
    known = {id(entry.param): entry for entry in entries}
    for name, submodule in named_modules(module):
        if isinstance(submodule, nn.RNNBase):
            continue  # it looks its weights up again
        for attribute, value in vars(submodule).items():
            if attribute in _MODULE_STATE:
                continue
            for place in _places(value, (attribute,), set()):
                entry = known.get(id(place.tensor))
                if entry is None:
                    continue
                if not place.is_writable:
                    prefix = f"{name}." if name else ""
                    raise ValueError(
                        f"parameter '{entry.name}': expected to find it in registered attributes, "
                        f"lists and dictionaries of modules, got it in {prefix}{place}, where its "
                        "sharded form cannot be put; look it up in forward, or keep a list"
                    )
                *path, key = place.path
                entry.caches.append((HeldContainer(submodule, tuple(path)), key))
    _refuse_shared_memory(entries, dict(named_buffers(module)))


def _refuse_shared_memory(entries: Sequence[ParamEntry], buffers: Mapping[str, Tensor]) -> None:
    params = {entry.name: entry.param for entry in entries}
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*params.items(), *buffers.items()):
        # Other layouts and subclasses may have no storage.
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
            key = tensor.untyped_storage()._cdata
            by_storage.setdefault(key, []).append((name, tensor.detach()))
    for sharing in by_storage.values():
        for (first, one), (second, other) in itertools.combinations(sharing, 2):
            if (first in params or second in params) and _overlap(one, other):
                name, alias = (first, second) if first in params else (second, first)
                raise ValueError(
                    f"parameter '{name}': expected memory of its own, got some that '{alias}' "
                    "shares, which would not follow it any more; tie weights by assigning the one "
                    "Parameter to both attributes, and derive other tensors from it in forward"
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    spans = [_span(tensor) for tensor in (one, other)]
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    bytes_of = [_first_bytes(tensor) for tensor in (one, other)]
    return bool(torch.isin(*bytes_of).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte in the storage, and the one after the last."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    return int(start), int(start + (reach + 1) * tensor.itemsize) if tensor.numel() else int(start)


def _first_bytes(tensor: Tensor) -> Tensor:
    """Where in the storage each element of `tensor` begins, in bytes."""
    places = torch.arange(_span(tensor)[1] // tensor.itemsize)
    return places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten() * (
        tensor.itemsize
    )


def _places(
    value: object, path: tuple[Any, ...], seen: set[int], *, is_writable: bool = False
) -> Iterator[_Place]:
    """Every tensor in `value`, which stands at `path`, in what `is_writable`."""
    if isinstance(value, Tensor):
        yield _Place(path, value, is_writable)
        return
    if isinstance(value, (str, bytes)) or id(value) in seen:
        return
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = iter(enumerate(value))
    else:
        return
    seen.add(id(value))
    writable = isinstance(value, (list, MutableMapping))
    for key, item in items:
        yield from _places(item, (*path, key), seen, is_writable=writable)


def let_rnns_be(module: nn.Module) -> None:
    """Keep recurrent modules from moving their weights into memory of their own, as they do on a
    GPU, away from the unit's; and have them let go of the plain ones.
    """
    for submodule in module.modules():
        if isinstance(submodule, nn.RNNBase):
            submodule.flatten_parameters = _keep_memory  # type: ignore[method-assign]
            submodule._init_flat_weights()


def _keep_memory() -> None:
    """In the place of `flatten_parameters`."""
