"""The faces of a unit's parameters, and which of them the modules show.

full       plain parameters over the gathered buffer    inside the module's forward and backward
sharded    `ShardedTensor` over `main`                   everywhere else, also between the two
whole      plain parameters over memory of their own    inside `gathered`, in place of both
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from .tensor.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from .gathered_unit import GradientPath

_VERSION = operator.attrgetter("_version")


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """One place in a module's `_parameters`, or in a list or dictionary of its own, that holds
    tensor `index` of a unit. Tied weights have several.
    """

    # The dictionary, not the module: a reference to the module would keep it alive for ever.
    parameters: Any
    attribute: Any
    index: int


class ParamFaces:
    """`full` and `sharded` parameters of one unit, tensor by tensor. At first `sharded` shows."""

    def __init__(
        self,
        full: Sequence[nn.Parameter],
        sharded: Sequence[ShardedTensor],
        slots: Sequence[ParamSlot],
        *,
        counts_writes: bool,
    ) -> None:
        """`counts_writes`: whether version counters are watched for writes to the full ones."""
        self.full = full
        self.sharded = sharded
        self.whole: Sequence[nn.Parameter] | None = None
        self._slots = slots
        self.paths: list[weakref.ref[GradientPath]] = []
        """By which gradients of parameters that were lent come, as long as a graph holds one."""
        self.awaits_more = False
        """Whether some rank may have such a path. All ranks think the same: only that may decide
        when they communicate.
        """
        self._places: list[tuple[Any, Any, ShardedTensor, nn.Parameter]] = [
            (slot.parameters, slot.attribute, sharded[slot.index], full[slot.index])
            for slot in slots
        ]
        self.shows_full = True
        self.writes_data = False
        """Whether code that sees the full parameters uses `.data`, past their version counters."""
        self._homes = [param.data for param in full]
        self._counts_writes = counts_writes
        self._versions = 0
        self.show_sharded()

    def show_full(self) -> None:
        """Put the full parameters into the modules, unless whole ones are there.

        Raises:
            RuntimeError: somebody replaced a parameter of a module.
        """
        if self.whole is not None:
            return
        self.shows_full = True
        for parameters, attribute, sharded, full in self._places:
            current = parameters.get(attribute)
            if current is not sharded and current is not full:
                self._hide_full()
                self.require_unreplaced()
            parameters[attribute] = full

    def _hide_full(self) -> None:
        """Take the full parameters out of the modules, and leave there what else was put."""
        self.shows_full = False
        for parameters, attribute, sharded, full in self._places:
            if parameters.get(attribute) is full:
                parameters[attribute] = sharded

    def slots(self) -> list[tuple[int, str]]:
        """The id of the dictionary and the attribute of every place."""
        return [(id(parameters), attribute) for parameters, attribute, _, _ in self._places]

    def require_unreplaced(self) -> None:
        """Check that every place holds what was put there; inside `gathered`, that does so.

        Raises:
            RuntimeError: somebody replaced a parameter of a module.
        """
        if self.whole is not None:
            return
        for parameters, attribute, sharded, full in self._places:
            current = parameters.get(attribute)
            if current is not sharded and current is not full:
                raise _replaced(sharded, current)

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules."""
        if not self.shows_full:
            return
        self.shows_full = False
        for parameters, attribute, sharded, _ in self._places:
            parameters[attribute] = sharded

    def lies_in(self, places: set[int]) -> bool:
        """Whether one of the parameter dictionaries with these ids holds one of ours."""
        return any(id(slot.parameters) in places for slot in self._slots)

    def lend(self, whole: Sequence[nn.Parameter], path: GradientPath) -> None:
        """Put `whole` parameters into the modules, until `take_back`. Their gradients come by
        `path`.

        Raises:
            RuntimeError: somebody replaced a parameter of a module.
        """
        assert not self.shows_full and self.whole is None
        self.require_unreplaced()
        self.whole = whole
        self.awaits_more = True
        self.paths.append(weakref.ref(path))
        for slot in self._slots:
            slot.parameters[slot.attribute] = whole[slot.index]

    def replaced(self) -> list[int]:
        """Indices of whole parameters in whose place a module has something else."""
        assert self.whole is not None
        return [
            slot.index
            for slot in self._slots
            if slot.parameters.get(slot.attribute) is not self.whole[slot.index]
        ]

    def take_back(self) -> None:
        """Put the sharded parameters into the modules again, frozen as the whole ones were."""
        assert self.whole is not None
        for sharded, whole in zip(self.sharded, self.whole, strict=True):
            if sharded.requires_grad != whole.requires_grad:
                sharded.requires_grad_(whole.requires_grad)
        self.whole = None
        for parameters, attribute, sharded, _ in self._places:
            parameters[attribute] = sharded

    def open_paths(self) -> list[GradientPath]:
        """The `paths` by which gradients may still come; the others are forgotten."""
        paths = [(reference, reference()) for reference in self.paths]
        self.paths = [reference for reference, path in paths if path is not None]
        return [path for _, path in paths if path is not None]

    def lent_leaves(self, index: int) -> list[nn.Parameter]:
        """What may stand for parameter `index` in graphs beside its full face."""
        leaves = [path.leaf(index) for path in self.open_paths()]
        return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]

    def may_be_written(self) -> bool:
        """Whether the full parameters were written since the last call, or could have been.

        Raises:
            RuntimeError: the data of one was replaced by some of another shape or dtype.
        """
        if self.writes_data:
            for index, given in bring_home(self.full, self._homes).items():
                raise _other_data(self.sharded[index], self._homes[index], given)
            return True
        if not self._counts_writes:
            return False
        # Counters only grow, so that their sum says whether one of them has.
        versions = sum(map(_VERSION, self.full))
        written = versions != self._versions
        self._versions = versions
        return written

    def forbid_old_graphs(self) -> None:
        """The values change: a backward through what autograd saved of them must fail, as it does
        for a plain parameter that was changed in place.
        """
        increment_version(self.full)
        self._versions += len(self.full)

    def follow_requires_grad(self) -> None:
        """Freeze and unfreeze the full faces as the sharded ones are."""
        for full, sharded in zip(self.full, self.sharded, strict=True):
            full.requires_grad_(sharded.requires_grad)


def bring_home(
    params: Sequence[nn.Parameter], homes: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Put data that was assigned to `params` into `homes`, the memory that they had before.

    Returns, by position, what has another shape or dtype. If there is any, all get their homes
    back as those are.
    """
    pairs = zip(params, homes, strict=True)
    moved = [i for i, (param, home) in enumerate(pairs) if not param.is_set_to(home)]
    given = {i: params[i].data for i in moved}
    misfits = {
        i: data
        for i, data in given.items()
        if data.shape != homes[i].shape or data.dtype != homes[i].dtype
    }
    # All copies first: what was given may lie in any of the homes, as where two were swapped.
    copies = {} if misfits else {i: data.clone() for i, data in given.items()}
    for i in moved:
        params[i].data = homes[i]
    for i, copy in copies.items():
        homes[i].copy_(copy)
    storages = {homes[i].untyped_storage()._cdata for i in copies}
    # Through views of these a backward would read other values now, and two plain parameters with
    # one memory would take each other's updates: it must fail.
    increment_version([params[i] for i in copies if given[i].untyped_storage()._cdata in storages])
    return misfits


def _other_data(sharded: ShardedTensor, home: torch.Tensor, given: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"parameter '{sharded.name}': expected data of shape {tuple(home.shape)} and {home.dtype} "
        f"to be assigned in forward, got {tuple(given.shape)} and {given.dtype}; a sharded "
        "parameter keeps both"
    )


def _replaced(sharded: ShardedTensor, current: object) -> RuntimeError:
    return RuntimeError(
        f"parameter '{sharded.name}': expected the object that fully_shard put there, got "
        f"{type(current).__name__}; load values with copy_ or load_state_dict(assign=False), and "
        "tie or replace parameters before fully_shard"
    )
