"""Whose parameters are gathered next: each rank's own affair, or agreed between all of them.

    FreeTurns     every rank gathers what it comes to; all must come to the same in one order
    AgreedTurns   before a gather the ranks say what they need, and all take part in one gather:
                  that of the module which comes first; a rank that has no use for it drops it

With agreed turns a rank may use other modules than the others, in another order or more often. One
that has all it needs, at the end of a forward or backward, takes part until nobody needs any more.
An exchange of gradients starts when all ranks have said that theirs are complete: whoever waits for
one waits for ranks that have begun it too. A turn costs a message of four integers between the
hosts, whatever the world size, and no gather is started ahead of its use.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist

from .backward_pass import BackwardPass
from .collectives import Collectives
from .communicators import host_group
from .gathered_unit import take_part_in_gather
from .unit import Unit
from .use_order import UnitGroup


class Gathers(Protocol):
    """Who gathers units on this rank."""

    def needs_gather(self, unit: Unit) -> bool:
        """Whether the full parameters of `unit`, which is about to be used, are not there."""

    def start_gather(self, unit: Unit) -> None:
        """Start it, if `unit` needs one."""

    def finish_gather(self, unit: Unit) -> None:
        """Order the following compute after it."""


class Turns(Protocol):
    """When gathers, and exchanges beside them, may start."""

    allowed_exchanges: int
    """How many exchanges of a backward may start before anything is agreed in it."""

    def forward_begins(self) -> None:
        """A module of the model is called."""

    def forward_ends(self) -> None:
        """Such a call has ended."""

    def forward_failed(self) -> None:
        """An exception ended all calls."""

    def backward_begins(self, backward: BackwardPass) -> None:
        """The first hook of a backward runs."""

    def backward_ends(self) -> None:
        """The engine is done; what remains of the gradients is about to be exchanged."""

    def backward_is_over(self) -> None:
        """A backward has ended, perhaps by an exception."""

    def take(self, group: UnitGroup, gathers: Gathers) -> None:
        """Have `gathers` start those that the units of `group` need, once it is their turn."""

    def agree_on_late(self, late: Sequence[Unit]) -> Sequence[Unit]:
        """The units of which a rank got gradients after their exchange, from those of this rank."""


class FreeTurns:
    """No rank asks another."""

    allowed_exchanges = sys.maxsize

    def forward_begins(self) -> None:
        """Nothing to agree on."""

    forward_ends = forward_failed = backward_ends = backward_is_over = forward_begins

    def backward_begins(self, backward: BackwardPass) -> None:
        """Nothing to agree on."""

    def take(self, group: UnitGroup, gathers: Gathers) -> None:
        """Now."""
        for unit in group.units:
            gathers.start_gather(unit)

    def agree_on_late(self, late: Sequence[Unit]) -> Sequence[Unit]:
        """Those of this rank."""
        return late


class _HostAgreement:
    """Small messages between the hosts of all ranks."""

    def __init__(self, collectives: Collectives) -> None:
        """A collective."""
        assert collectives.groups.group is not None
        self._group = host_group(collectives.groups.group)
        self._collectives = collectives

    def greatest(self, values: list[int], what: str) -> list[int]:
        """For each of `values` the greatest of all ranks'."""
        found = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._collectives.agree(work, what, self._group)
        result: list[int] = found.tolist()
        return result

    def any_of(self, units: Sequence[Unit], chosen: Sequence[Unit], what: str) -> list[Unit]:
        """Those of all `units` that any rank has `chosen`."""
        found = self.greatest([int(unit in chosen) for unit in units], what)
        return [unit for unit, is_chosen in zip(units, found, strict=True) if is_chosen]


_LATE = "agreement on gradients that came late"


class AgreedLateTurns(FreeTurns):
    """Parameters that stay need no turns, but some gradients may come late on some ranks alone."""

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        """A collective."""
        self._units = units
        self._agreement = _HostAgreement(collectives)
        self._syncs = True

    def backward_begins(self, backward: BackwardPass) -> None:
        """Note whether it exchanges."""
        self._syncs = backward.sync

    def agree_on_late(self, late: Sequence[Unit]) -> Sequence[Unit]:
        """Those of any rank (a collective, outside `no_sync`)."""
        return self._agreement.any_of(self._units, late, _LATE) if self._syncs else late


class _Phase(IntEnum):
    """What a rank is in the middle of."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_UNDER_NO_SYNC = 2


class AgreedTurns:
    """All ranks take part in every gather."""

    allowed_exchanges = 0

    def __init__(self, groups: Sequence[UnitGroup], collectives: Collectives) -> None:
        """A collective."""
        self._groups = groups
        self._units = [unit for group in groups for unit in group.units]
        self._collectives = collectives
        self._agreement = _HostAgreement(collectives)
        # Their number and kind. A backward may run inside a forward, for a gradient in a loss.
        self._phases: list[tuple[int, _Phase]] = []
        self._num_phases = 0
        self._backward: BackwardPass | None = None

    # ---- phases

    def forward_begins(self) -> None:
        """A phase begins, unless the call lies in another one."""
        if not self._phases or sum(group.open_calls for group in self._groups) == 1:
            self._phases.clear()  # an exception left them open
            self._begin(_Phase.FORWARD)

    def forward_ends(self) -> None:
        """Take part in what others need in theirs, if no call is open."""
        if self._phases and not any(group.open_calls for group in self._groups):
            self._take_part()
            del self._phases[-1:]

    def forward_failed(self) -> None:
        """No phase is open."""
        self._phases.clear()

    def backward_begins(self, backward: BackwardPass) -> None:
        """A phase begins."""
        self._backward = backward
        self._begin(_Phase.BACKWARD if backward.sync else _Phase.BACKWARD_UNDER_NO_SYNC)

    def backward_ends(self) -> None:
        """Take part in what others need in theirs."""
        assert self._backward is not None
        self._backward.is_over = True
        self._take_part()

    def backward_is_over(self) -> None:
        """The phase ends."""
        if self._backward is not None:
            self._backward = None
            del self._phases[-1:]

    def _begin(self, phase: _Phase) -> None:
        self._num_phases += 1
        self._phases.append((self._num_phases, phase))

    # ---- turns

    def take(self, group: UnitGroup, gathers: Gathers) -> None:
        """Take part in the gathers of others until `group` has had its turn.

        Raises:
            RuntimeError: ranks are in different phases; on all of them.
        """
        with self._all_or_none():
            while needed := [unit for unit in group.units if gathers.needs_gather(unit)]:
                turn = self._next_turn(group)
                assert turn is not None, "what this rank needs counts"
                self._gather(turn, needed if turn is group else (), gathers)

    def _take_part(self) -> None:
        with self._all_or_none():
            while (turn := self._next_turn(None)) is not None:
                self._gather(turn, (), None)

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """After an exception there is no phase: nobody would answer in its end."""
        try:
            yield
        except BaseException:
            self._phases.clear()
            raise

    def _gather(self, turn: UnitGroup, needed: Sequence[Unit], gathers: Gathers | None) -> None:
        # One after the other on every rank, all along the mesh, and exchanges after them: nobody
        # waits for a step that another rank takes later.
        for unit in turn.units:
            if gathers is None or unit not in needed:
                take_part_in_gather(unit)
                continue
            unit.mark_stale()  # others may have none of it, so it comes all the way
            gathers.start_gather(unit)
            gathers.finish_gather(unit)
        self._exchange()

    def _exchange(self) -> None:
        if self._backward is not None:
            self._backward.launch_allowed()

    def _next_turn(self, needed: UnitGroup | None) -> UnitGroup | None:
        """Whose units all ranks gather next, the first in forward, the last in backward; None if
        no rank needs any. Every rank then also knows which exchanges all are ready for.
        """
        number, phase = self._phases[-1]
        count = len(self._groups)
        rank_of_need = 0
        if needed is not None:
            rank_of_need = count - needed.index if phase is _Phase.FORWARD else needed.index + 1
        label = len(_Phase) * number + phase
        ready = 0 if self._backward is None else self._backward.count_ready()
        said = [rank_of_need, label, -label, -ready]
        agreed = self._agreement.greatest(said, "agreement on the next gather")
        first, greatest, least, least_ready = agreed
        if greatest != -least:
            self._refuse_phases(number, phase)
        if self._backward is not None:
            self._backward.allowed_exchanges = -least_ready
        if not first:
            self._exchange()
            return None
        return self._groups[count - first if phase is _Phase.FORWARD else first - 1]

    def _refuse_phases(self, number: int, phase: _Phase) -> None:
        name = phase.name.lower().replace("_", " ")
        found = self._collectives.gather_objects(f"{name}, its pass number {number}")
        ranks = "; ".join(f"rank {rank} in a {text}" for rank, text in enumerate(found))
        raise RuntimeError(
            "ranks_may_differ: expected all ranks to run forward and backward equally often, each "
            f"with whichever parts of the model, got {ranks}; call the model on every rank, or "
            "on none (a validation by one rank alone needs a model that is not sharded)"
        )

    def agree_on_late(self, late: Sequence[Unit]) -> Sequence[Unit]:
        """Those of any rank (a collective, outside `no_sync`)."""
        if self._phases[-1][1] is not _Phase.BACKWARD:
            return late
        return self._agreement.any_of(self._units, late, _LATE)


def make_turns(
    groups: Sequence[UnitGroup], collectives: Collectives, ranks_may_differ: bool
) -> Turns:
    """How gathers are ordered; a collective if `ranks_may_differ`."""
    if not ranks_may_differ or collectives.world_size == 1:
        return FreeTurns()
    units = [unit for group in groups for unit in group.units]
    if not any(unit.frees_parameters for unit in units):
        return AgreedLateTurns(units, collectives)
    return AgreedTurns(groups, collectives)
