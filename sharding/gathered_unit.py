"""A unit's parameters outside forward and backward: whole, plain, over memory of their own.

The memory is nobody's but theirs, so what a graph or a view holds of it stays valid, and is freed
with the last who does. Gradients go to the unit's full parameters, which the exchange takes.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..buffers import FlatBuffer, Placement, Placements, cut
from .bits import differing
from .collectives import Collectives
from .messages import listed
from .param_faces import bring_home
from .unit import Unit, UnitState

if TYPE_CHECKING:
    from .runtime import Runtime

_FAULTS = (
    "",
    "was written to, though write=False: pass write=True to keep what is written",
    "was given other values on some ranks than on others: write the same on all, for example what "
    "one rank broadcasts",
    "was given data of another shape or dtype: it keeps both",
    "was replaced by another object: write to it with copy_ or `.data =`",
    "was given a gradient by hand: set p.grad outside",
    "changed meanwhile, by an optimizer or by a load: do that outside",
)
_WRITTEN, _UNEQUAL, _RESHAPED, _REPLACED, _GRADIENT, _MOVED = range(1, len(_FAULTS))


class GradientPath:
    """Where gradients of whole parameters go. Alive as long as a graph or anybody holds one."""

    def __init__(self, runtime: Runtime, unit: Unit) -> None:
        self._runtime = runtime
        self._unit = unit
        self._leaves: list[weakref.ref[nn.Parameter]] = []

    def add(self, leaf: nn.Parameter) -> None:
        """Take the gradients of `leaf`, which stands for the unit's next parameter."""
        index = len(self._leaves)
        self._leaves.append(weakref.ref(leaf))

        def gradient_came(leaf: Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            assert grad is not None
            self._runtime.whole_gradient_came(self._unit, index, grad)

        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(gradient_came)

    def leaf(self, index: int) -> nn.Parameter | None:
        """The whole parameter, if anybody holds it."""
        return self._leaves[index]()


def _collect(
    own: Tensor, numel: int, held: Placements, collectives: Collectives, what: str
) -> Tensor:
    """All of a buffer of `numel` elements, of which `own` is what this rank has as `held` says (a
    collective).
    """
    if own.numel() == numel:
        return own
    start, stop = collectives.grid.span(numel, held)
    flat = torch.empty(numel, dtype=own.dtype, device=own.device)
    flat[start:stop] = own
    for hop in collectives.hops(numel, held, (Placement.REPLICATE,) * len(held)):
        whole = flat[hop.start : hop.stop]
        slices = cut(whole, hop.parts)
        channel = collectives.channels[hop.axis]
        for pending in channel.gather(whole, slices, slices[hop.own], what):
            pending.wait()
    return flat


@torch.no_grad()
def take_part_in_gather(unit: Unit) -> None:
    """Take part in a gather of `unit` that other ranks need, from the main parameters on: into
    memory of its own, since this rank may be using what it has gathered.
    """
    own = unit.buffers.way.sent_of_main()
    numel = unit.buffers.way.numel
    _collect(own, numel, unit.spec.placements.main, unit.collectives, unit.gather_name)


class GatheredUnit:
    """`unit` while its parameters are whole."""

    @torch.no_grad()
    def __init__(self, runtime: Runtime, unit: Unit) -> None:
        """Gather (a collective), and put the whole parameters into the modules."""
        self.unit = unit
        self._collectives = unit.collectives
        self._version = unit.main._version
        self.flat = self._gather()
        # Each has a version counter of its own: a write to one must not spoil graphs of the others.
        self.homes = [view.data for view in FlatBuffer(self.flat, unit.spec.layout).views()]
        self.params = [
            nn.Parameter(home, requires_grad=sharded.requires_grad)
            for home, sharded in zip(self.homes, unit.faces.sharded, strict=True)
        ]
        path = GradientPath(runtime, unit)
        for param, full in zip(self.params, unit.faces.full, strict=True):
            path.add(param)
            vars(param).update(vars(full))  # marks that people leave on parameters
        unit.faces.lend(self.params, path)

    def _gather(self) -> Tensor:
        own = self.unit.main.to(self.unit.spec.dtypes.compute, copy=True)
        return self._collect(own, self.unit.spec.placements.main)

    def _collect(self, own: Tensor, held: Placements) -> Tensor:
        what = f"gather of the whole parameters of unit '{self.unit.spec.name}'"
        return _collect(own, self.unit.spec.layout.numel, held, self._collectives, what)

    @torch.no_grad()
    def faults(self, write: bool) -> list[int]:
        """What is wrong with each parameter, whose data is at home, as positions in `_FAULTS`; 0:
        nothing. A collective, whose result still may differ between ranks.
        """
        found = [0 if param.grad is None else _GRADIENT for param in self.params]
        for index in self.unit.faces.replaced():
            found[index] = _REPLACED
        if self.unit.main._version != self._version:
            found = [_MOVED] * len(found)
        layout, (start, stop) = self.unit.spec.layout, self.unit.owned_span
        # With writes: what would be kept of all ranks' values, beside those of this one.
        owned = (Placement.SHARD,) * len(self._collectives.channels)
        reference = self._collect(self.flat[start:stop].clone(), owned) if write else self._gather()
        views = FlatBuffer(reference, layout).views()
        differs = [differing(*pair).any() for pair in zip(self.homes, views, strict=True)]
        changed = torch.stack(differs).tolist()  # the host waits once, not for each of them
        fault = _UNEQUAL if write else _WRITTEN
        return [max(code, fault * flag) for code, flag in zip(found, changed, strict=True)]

    def write_back(self) -> None:
        """Bring what was written to the main parameters. All ranks must do so."""
        if self.unit.state is UnitState.GATHERING:
            self.unit.finish_gather()  # it still reads them
        self.unit.adopt_writes(self.flat)


def check_same_units(units: Sequence[Unit], collectives: Collectives) -> None:
    """Compare what the ranks are about to gather (a collective).

    Raises:
        RuntimeError: not the same; on all ranks.
    """
    indices = [unit.spec.index for unit in units]
    values = torch.tensor([zlib.crc32(repr(indices).encode()), len(units)], dtype=torch.int64)
    if not collectives.all_equal(values, "comparison of the modules given to gathered()"):
        raise RuntimeError(
            "gathered: expected the same part of the model on all ranks, got units "
            f"{listed([unit.spec.name for unit in units])} here and others elsewhere; pass the "
            "same module everywhere"
        )


def check_whole(units: Sequence[GatheredUnit], collectives: Collectives, write: bool) -> None:
    """Compare what the ranks hold (a collective).

    Raises:
        RuntimeError: on all ranks, with the names of the parameters that cannot go back as they
            are.
    """
    names = [name for gathered in units for name in gathered.unit.spec.names]
    # Of all units at once: data may have been swapped between them.
    params = [param for gathered in units for param in gathered.params]
    misfits = bring_home(params, [home for gathered in units for home in gathered.homes])
    codes = [code for gathered in units for code in gathered.faults(write)]
    for index in misfits:
        codes[index] = max(codes[index], _RESHAPED)
    agreed = torch.tensor(codes, dtype=torch.int64, device=collectives.groups.device)
    what = "comparison of the parameters inside gathered()"
    collectives.all_reduce(agreed, dist.ReduceOp.MAX, what)
    problems = [
        f"'{name}' {_FAULTS[code]}"
        for name, code in zip(names, agreed.tolist(), strict=True)
        if code
    ]
    if problems:
        raise RuntimeError(
            "gathered: nothing was written back: parameter " + listed(problems, "; ")
        )


def agree_on_paths(units: Sequence[Unit], collectives: Collectives) -> None:
    """Find out for which of `units` no rank can send gradients through whole parameters any more
    (a collective, if any were lent). Those are exchanged early again.
    """
    lent = [unit for unit in units if unit.faces.awaits_more]
    if not lent:
        return
    found = [bool(unit.faces.open_paths()) for unit in lent]
    agreed = torch.tensor(found, dtype=torch.int64, device=collectives.groups.device)
    what = "agreement on gradients of whole parameters"
    collectives.all_reduce(agreed, dist.ReduceOp.MAX, what)
    for unit, may_come in zip(lent, agreed.tolist(), strict=True):
        unit.faces.awaits_more = bool(may_come)


def check_not_gathered(units: Sequence[Unit], caller: str) -> None:
    """Refuse to go on inside `gathered`.

    Raises:
        RuntimeError: parameters are whole, beside which the sharded ones would change.
    """
    for unit in units:
        if unit.faces.whole is not None:
            raise RuntimeError(
                f"{caller}: expected sharded parameters, those of unit '{unit.spec.name}' are "
                "whole inside gathered(); leave the block first"
            )
