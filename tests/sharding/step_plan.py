"""One training step as a plan: ordered steps, the lane each runs on, what each must wait for. No
CUDA, no ranks.

    lane      steps
    compute   FINISH_GATHER, FORWARD, BACKWARD, RELEASE, FINISH_EXCHANGE, STEP
    gather    GATHER
    reduce    EXCHANGE (pack, all-to-all, sum in FP32), ACCUMULATE (pack only)

Steps of one lane run in order; between lanes only `waits` orders them. Every step names what it
reads and writes, and `plan_step` derives the fewest waits that keep those in order: `find_hazards`
proves that they suffice, and finds a hazard when any one of them is taken away. The runtime follows
the same order; its `Trace` of a step is compared with the plan by the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sidestream.sharding.trace import Kind

_LANES = {Kind.GATHER: "gather", Kind.EXCHANGE: "reduce", Kind.ACCUMULATE: "reduce"}


@dataclass(frozen=True, slots=True)
class Step:
    """`waits`: positions in the plan of steps on other lanes that must have ended first."""

    kind: Kind
    unit: int
    lane: str
    reads: frozenset[str]
    writes: frozenset[str]
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """The units of one module, in the order of use. The root comes first and ends last."""

    units: tuple[int, ...]
    reshard_after_forward: bool
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How the runtime is set up. `sync`: whether this backward exchanges gradients, or only
    accumulates them.
    """

    frees_params: bool
    prefetch: int
    exchange_order: tuple[int, ...]
    sync: bool = True


@dataclass(slots=True)
class _Planner:
    """Simulates one step of the runtime."""

    groups: Sequence[PlanGroup]
    options: PlanOptions
    steps: list[Step] = field(default_factory=list)
    gathered: dict[int, bool] = field(default_factory=dict)
    packing: list[int] = field(default_factory=list)

    @property
    def frees(self) -> bool:
        return self.options.frees_params

    def add(
        self, kind: Kind, unit: int, reads: Sequence[str] = (), writes: Sequence[str] = ()
    ) -> None:
        lane = _LANES.get(kind, "compute")
        self.steps.append(Step(kind, unit, lane, frozenset(reads), frozenset(writes)))

    def start_gather(self, unit: int) -> None:
        if unit not in self.gathered:
            self.gathered[unit] = False
            self.add(Kind.GATHER, unit, [f"main {unit}"], [f"params {unit}"])

    def finish_gather(self, unit: int) -> None:
        if not self.gathered[unit]:
            self.gathered[unit] = True
            self.add(Kind.FINISH_GATHER, unit)

    def release(self, unit: int) -> None:
        if unit in self.gathered:
            self.finish_gather(unit)
            del self.gathered[unit]
            self.add(Kind.RELEASE, unit, writes=[f"params {unit}"])

    def prefetch(self, place: int, direction: int, done: set[int]) -> None:
        for distance in range(1, self.options.prefetch + 1):
            ahead = place + direction * distance
            if self.frees and 0 <= ahead < len(self.groups):
                for unit in self.groups[ahead].units:
                    if unit not in done:
                        self.start_gather(unit)

    def exchange(self, unit: int) -> None:
        self.finish_packing()
        kind = Kind.EXCHANGE if self.options.sync else Kind.ACCUMULATE
        target = f"main_grad {unit}" if self.options.sync else f"accumulated {unit}"
        # Exchange buffers belong to the lane, which uses and frees them in order.
        self.add(kind, unit, [f"grads {unit}"], [target, "buffers"])
        self.packing.append(unit)

    def finish_packing(self) -> None:
        while self.packing:
            unit = self.packing.pop()
            # The gradients are freed, which counts as a write: others may get their memory.
            self.add(Kind.FINISH_EXCHANGE, unit, writes=[f"grads {unit}"])

    def forward(self) -> None:
        units = [unit for group in self.groups for unit in group.units]
        if not self.frees:
            for unit in units:
                self.start_gather(unit)
        for place, group in enumerate(self.groups):
            self.use(place, group)
        for group in self.groups:
            if group.is_root and group.reshard_after_forward:
                self.release_all(group.units)

    def use(self, place: int, group: PlanGroup) -> None:
        for unit in group.units:
            self.start_gather(unit)
        self.prefetch(place, 1, set())
        for unit in group.units:
            self.finish_gather(unit)
            self.add(Kind.FORWARD, unit, [f"params {unit}"])
        if group.reshard_after_forward and not group.is_root:
            self.release_all(group.units)

    def release_all(self, units: Sequence[int]) -> None:
        for unit in units:
            self.release(unit)

    def backward(self) -> None:
        roots = [place for place, group in enumerate(self.groups) if group.is_root]
        rest = [place for place in reversed(range(len(self.groups))) if place not in roots]
        done: set[int] = set()
        waiting = list(self.options.exchange_order)
        for place in roots:
            self.enter(self.groups[place], len(self.groups), done)
        spent: Sequence[int] = ()
        for place in rest:
            self.release_all(spent)
            self.enter(self.groups[place], place, done)
            self.leave(self.groups[place], done, waiting)
            # The root contains every other module, so its own units stay to the end.
            spent = self.groups[place].units if self.frees else ()
        for place in roots:
            self.leave(self.groups[place], done, waiting)
        self.finish_packing()
        self.release_all(sorted(self.gathered))

    def enter(self, group: PlanGroup, place: int, done: set[int]) -> None:
        for unit in group.units:
            self.start_gather(unit)
        self.prefetch(place, -1, done)
        for unit in group.units:
            self.finish_gather(unit)

    def leave(self, group: PlanGroup, done: set[int], waiting: list[int]) -> None:
        for unit in sorted(group.units, key=waiting.index):
            done.add(unit)
            self.add(Kind.BACKWARD, unit, [f"params {unit}"], [f"grads {unit}"])
            while waiting and waiting[0] in done:
                self.exchange(waiting.pop(0))


def plan_step(groups: Sequence[PlanGroup], options: PlanOptions) -> tuple[Step, ...]:
    """The plan of forward, backward and optimizer step, from one optimizer step to the next.

    `groups` come in order of use, the root first. The first and the last step are the optimizer's.
    """
    planner = _Planner(groups, options)
    units = [unit for group in groups for unit in group.units]
    mains = [f"main {unit}" for unit in units]
    # The memory of gradients that an optimizer step has read is freed, and written by later
    # exchanges.
    main_grads = [f"main_grad {unit}" for unit in units]
    planner.add(Kind.STEP, -1, main_grads, mains)
    planner.forward()
    planner.backward()
    planner.add(Kind.STEP, -1, main_grads, mains)
    return _with_waits(planner.steps)


def _conflict(first: Step, second: Step) -> bool:
    return bool(first.writes & (second.reads | second.writes) or first.reads & second.writes)


def _predecessors(steps: Sequence[Step]) -> list[set[int]]:
    """For each step, all steps that have certainly ended when it starts."""
    before: list[set[int]] = []
    last_on_lane: dict[str, int] = {}
    for position, step in enumerate(steps):
        direct = set(step.waits)
        if step.lane in last_on_lane:
            direct.add(last_on_lane[step.lane])
        before.append(direct.union(*(before[p] for p in direct)))
        last_on_lane[step.lane] = position
    return before


def _with_waits(steps: Sequence[Step]) -> tuple[Step, ...]:
    """`steps` with the fewest waits that order every conflict between lanes."""
    ordered: list[Step] = []
    before: list[set[int]] = []
    last_on_lane: dict[str, int] = {}
    for position, step in enumerate(steps):
        known: set[int] = set()
        if step.lane in last_on_lane:
            known = before[last_on_lane[step.lane]] | {last_on_lane[step.lane]}
        waits = []
        for earlier in reversed(range(position)):
            # A host step that ends another lane's step waits for it, whether data conflict or not.
            ordering = _conflict(ordered[earlier], step) or _ends(step, ordered[earlier])
            if earlier not in known and ordering:
                waits.append(earlier)
                known |= before[earlier] | {earlier}
        ordered.append(
            Step(step.kind, step.unit, step.lane, step.reads, step.writes, tuple(sorted(waits)))
        )
        before.append(known)
        last_on_lane[step.lane] = position
    return tuple(ordered)


def _ends(step: Step, earlier: Step) -> bool:
    pairs = {(Kind.FINISH_GATHER, Kind.GATHER), (Kind.FINISH_EXCHANGE, Kind.ACCUMULATE)}
    return (step.kind, earlier.kind) in pairs and step.unit == earlier.unit


def find_hazards(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Positions of every two steps that touch the same data, one of them writing, in no certain
    order.
    """
    before = _predecessors(steps)
    return [
        (first, second)
        for second in range(len(steps))
        for first in range(second)
        if first not in before[second] and _conflict(steps[first], steps[second])
    ]
