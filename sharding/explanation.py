"""What a sharded model is doing on this rank: what is in flight since when, what it waits for,
whose gradients have not come. For somebody who asks why nothing happens.

Only looks: no collective, no lock, nothing of a GPU is waited for. So it may be called from another
thread while this rank hangs, and what changes meanwhile may be seen half changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from .accounts import ago
from .in_flight import REPORTS, Waiting, host_waits
from .messages import listed
from .runtime import Runtime
from .trace import Kind
from .unit import Unit, UnitState


@dataclass(frozen=True, slots=True)
class Lasting:
    """A collective or a work of a lane, and for how many seconds it has been under way.

    `ranks`: those that take part in it, where they are known.
    """

    what: str
    lasting_s: float
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        others = f", of ranks {listed([str(rank) for rank in self.ranks])}" if self.ranks else ""
        return f"{self.what} for {self.lasting_s:.1f} s{others}"


@dataclass(frozen=True, slots=True)
class UnitExplanation:
    """One unit. `state`: "sharded", "gathering" or "gathered". `lacks_grads_of`: the parameters
    without a gradient of the backward that runs. `holds_sum`: of backwards under `no_sync`.
    `is_whole`: inside a block of `gathered`.
    """

    name: str
    state: str
    lacks_grads_of: tuple[str, ...] = ()
    holds_sum: bool = False
    is_whole: bool = False

    def __str__(self) -> str:
        notes = [self.state]
        if self.lacks_grads_of:
            notes.append(f"waits for the gradients of {listed(self.lacks_grads_of)}")
        if self.holds_sum:
            notes.append("holds a sum of no_sync that was not exchanged")
        if self.is_whole:
            notes.append("whole, in an open block of gathered()")
        return f"unit '{self.name}': {'; '.join(notes)}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """`print` it, on every rank: ranks that hang in different places say so.

    `rank`, `world_size`: of the job, while it has a process group; then of those that share the
    model. `doing`: where this rank's step is. `waits`: threads that stand in a collective.
    `in_flight`: what lanes were given and have not ended. `exchange_order`: the units' names in the
    order in which they are exchanged; the first `num_exchanged` were begun in the backward that
    runs. `events`: what happened last, oldest first. `others`: what the ranks were last found to do
    and to wait for, when one of them asked; empty if none did.
    """

    rank: int
    world_size: int
    doing: str
    waits: tuple[Lasting, ...]
    in_flight: tuple[Lasting, ...]
    units: tuple[UnitExplanation, ...]
    exchange_order: tuple[str, ...]
    num_exchanged: int
    events: tuple[str, ...] = ()
    others: str = ""

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.world_size}: {self.doing}"]
        lines += [f"waits in {wait}" for wait in self.waits] or ["waits in no collective"]
        lines += [f"in flight: {work}" for work in self.in_flight] or ["in flight: nothing"]
        at_rest = [unit for unit in self.units if unit == UnitExplanation(unit.name, _AT_REST)]
        lines += [str(unit) for unit in self.units if unit not in at_rest]
        if at_rest:
            lines.append(f"sharded, with nothing to wait for: {len(at_rest)} units")
        done = self.exchange_order[: self.num_exchanged]
        left = self.exchange_order[self.num_exchanged :]
        begun = f"begun: {listed(done)}; to come: " if done else "in order: "
        lines.append(f"exchanges, {begun}{listed(left) or 'none'}")
        if self.events:
            lines.append(f"last: {', '.join(self.events)}")
        lines += self.others.splitlines()
        return "\n  ".join(lines)


_EVENTS = {
    Kind.GATHER: "gather of unit '{}' begun",
    Kind.FINISH_GATHER: "gather of unit '{}' awaited",
    Kind.FORWARD: "forward of unit '{}' begun",
    Kind.BACKWARD: "gradients of unit '{}' complete",
    Kind.RELEASE: "unit '{}' released",
    Kind.EXCHANGE: "gradient exchange of unit '{}' begun",
    Kind.ACCUMULATE: "gradients of unit '{}' accumulated",
    Kind.FINISH_EXCHANGE: "gradients of unit '{}' sent",
    Kind.STEP: "optimizer step begun",
}
_MOST_EVENTS = 6
_AT_REST = UnitState.SHARDED.value


def explain_runtime(runtime: Runtime) -> Explanation:
    """What the model of `runtime` is doing."""
    now_s = time.monotonic()
    backward = runtime._backward
    order = runtime.exchange_order.indices if backward is None else backward.order
    works = [work for lane in runtime.lanes for work in lane.log.in_flight()]
    collectives = runtime.collectives
    ranks = ranks_of(collectives.groups.group)
    return Explanation(
        rank=dist.get_rank() if dist.is_initialized() else collectives.rank,
        world_size=dist.get_world_size() if dist.is_initialized() else collectives.world_size,
        doing=doing(runtime),
        waits=tuple(lasting(wait, now_s) for wait in host_waits()),
        in_flight=tuple(Lasting(work.what, now_s - work.since_s, ranks) for work in works),
        units=tuple(_unit(unit, runtime) for unit in runtime.units),
        exchange_order=tuple(runtime.units[index].spec.name for index in order),
        num_exchanged=0 if backward is None else backward.next_in_order,
        events=tuple(ago(*event) for event in events_of(runtime)),
        others=_last_report(),
    )


def events_of(runtime: Runtime) -> list[tuple[str, float]]:
    """What happened last, oldest first: in words, and when (`time.monotonic`)."""
    names = [unit.spec.name for unit in runtime.units]
    return [
        (_EVENTS[kind].format(names[unit]), at_s)
        for at_s, kind, unit in runtime.trace.latest(_MOST_EVENTS)
    ]


def _last_report() -> str:
    at_s, text = REPORTS.latest()
    return f"{ago('the ranks were asked', at_s)}: {text}" if text else ""


def lasting(wait: Waiting, now_s: float) -> Lasting:
    """A host's wait, at `now_s`."""
    return Lasting(wait.what + wait.peer, now_s - wait.since_s, ranks_of(wait.group))


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks of a group; none where it is not known, or was destroyed."""
    if group is None:
        return ()
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return ()


def doing(runtime: Runtime) -> str:
    """Where its step is."""
    backward = runtime._backward
    how = "" if runtime.sync else ", under no_sync"
    if backward is not None:
        total = sum(unit.reduction.is_needed for unit in runtime.units)
        return f"in a backward, {len(backward.ready)} of {total} units have their gradients{how}"
    inside = [group for group in runtime.groups if group.open_calls]
    if inside:
        innermost = max(inside, key=lambda group: len(group.ancestors))
        return f"in the forward of '{innermost.name or '(root)'}'{how}"
    return f"outside forward and backward{how}"


def _unit(unit: Unit, runtime: Runtime) -> UnitExplanation:
    return UnitExplanation(
        name=unit.spec.name,
        state=unit.state.value,
        lacks_grads_of=_lacking(unit, runtime),
        holds_sum=unit.gradients.has_unreduced_sum,
        is_whole=unit.faces.whole is not None,
    )


def _lacking(unit: Unit, runtime: Runtime) -> tuple[str, ...]:
    backward = runtime._backward
    # A backward that makes a graph replaces gradients, which must not be looked at meanwhile.
    if backward is None or backward.creates_graph or unit.spec.index in backward.ready:
        return ()
    pairs: Sequence[tuple[str, nn.Parameter]] = list(
        zip(unit.spec.names, unit.faces.full, strict=True)
    )
    return tuple(name for name, param in pairs if param.requires_grad and param.grad is None)
