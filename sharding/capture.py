"""A sharded model's part in a CUDA graph of a whole step, and in its replays.

    begin    at rest; what is gathered counts as stale, so that the graph gathers whatever comes
             before a replay; reduced gradients stay where they are for good
    inside   streams of lanes fork from the recorded one and join it; hosts compare nothing, since
             a rank whose recording fails would leave the others waiting
    end      what a replay does to the host's state is known, or why it cannot be replayed
    fail     nothing has run: events that were recorded never come, and nobody may wait for them
    replay   gradients are shown, backwards counted, what is gathered is stale

What runs while a graph is recorded is enqueued on no stream: only the host's state moves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from .collectives import Channel
from .communicators import host_group
from .errors import communicating
from .fully_shard import runtime_of
from .gradient_checks import GradientChecks
from .in_flight import EnqueuedWork
from .lanes import recorded
from .message_wire import MessageWire
from .messages import listed
from .optimizer_view import OptimizerView
from .runtime import Runtime
from .unit import UnitState
from .uses import END_OF_BACKWARD, UsePoint
from .wire import Wire


@dataclass(frozen=True, slots=True)
class _Before:
    """What a recording that fails brings back."""

    backwards: int
    uses: tuple[UsePoint, ...]
    versions: tuple[int, ...]


@dataclass(eq=False, slots=True)
class RecordedPart:
    """What one graph does to a sharded model, beside what it does on the GPU."""

    runtime: Runtime
    gradients: list[OptimizerView]
    """Those that it leaves behind."""
    backwards: int
    trainable: list[bool]

    def before_replay(self) -> None:
        """Nothing else is under way: the graph writes to the same memory.

        Raises:
            RuntimeError: parameters were frozen or unfrozen since it was recorded.
        """
        if _trainable(self.runtime) != self.trainable:
            raise RuntimeError(
                "a step's CUDA graph: expected the parameters trainable that were so when it was "
                "recorded, got some frozen or unfrozen since; call reset() after such a change"
            )
        self.runtime.settle()

    def after_replay(self) -> None:
        """The graph is enqueued: what follows it sees what it leaves behind."""
        stream = torch.cuda.current_stream(self.runtime.pool.device)
        work = EnqueuedWork(
            "replay of a step's CUDA graph", time.monotonic(), stream.record_event()
        )
        self.runtime.lanes[1].log.add(work)  # for whoever asks why nothing goes on
        self.runtime.exchange_order.backwards += self.backwards
        self.runtime.mark_stale()
        for gradients in self.gradients:
            gradients.publish()

    def drop(self) -> None:
        """The graph is gone."""
        for gradients in self.gradients:
            gradients.graphs -= 1


class StepRecorder:
    """Records steps of one sharded model, `module`.

    Raises:
        ValueError: it is not the one passed to `fully_shard`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._runtime = runtime_of(module)

    def reasons(self) -> list[str]:
        """Why no step of this model can be recorded now, each with the way out."""
        return _reasons(self._runtime)

    def kept_gradients(self) -> list[str]:
        """The units that have gradients, to which a step would add."""
        return [unit.spec.name for unit in self._runtime.units if unit.gradients.has_grad]

    def least(self, value: int) -> int:
        """The least `value` of all ranks (a collective of their hosts).

        Raises:
            CommunicationError: a rank is gone.
        """
        group = self._runtime.collectives.groups.group
        if group is None or self._runtime.collectives.world_size == 1:
            return value
        known = torch.tensor([value], dtype=torch.int64)
        with communicating("agreement on a step's CUDA graph"):
            dist.all_reduce(known, dist.ReduceOp.MIN, group=host_group(group))
        return int(known[0])

    def begin(self) -> None:
        """A recording begins next, with gradients cleared."""
        runtime = self._runtime
        runtime.settle()
        for unit in runtime.units:
            unit.gradients.free_cleared()
        runtime.pool.trim()  # or the graph would be lent memory that others get before a replay
        runtime.mark_stale()
        uses = runtime.collectives.uses
        self._before = _Before(
            runtime.exchange_order.backwards,
            tuple(record.point() for record in (uses.gathers, uses.exchanges)),
            tuple(unit.main._version for unit in runtime.units),
        )

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Where the current stream records."""
        runtime = self._runtime
        watch, runtime._watch = runtime._watch, None
        try:
            with recorded(runtime.lanes, runtime.pool.device):
                yield
        finally:
            runtime._watch = watch

    def end(self) -> RecordedPart:
        """The step has been recorded.

        Raises:
            RuntimeError: it leaves something behind that a replay could not.
        """
        runtime, before = self._runtime, self._before
        waiting = [unit.spec.name for unit in runtime.units if unit.gradients.waiting is not None]
        if waiting:
            raise RuntimeError(
                "a step's CUDA graph: expected a step that exchanges its gradients, got some of "
                f"{_units(waiting)} that were only accumulated under no_sync; run the backward of "
                "the last microbatch outside no_sync"
            )
        versions = zip(runtime.units, before.versions, strict=True)
        changed = [unit.spec.name for unit, version in versions if unit.main._version != version]
        if changed:
            raise RuntimeError(
                "a step's CUDA graph: expected a step that leaves parameters as they are, those of "
                f"{_units(changed)} were changed in it; call optimizer.step() after the step"
            )
        if any(unit.state is not UnitState.SHARDED for unit in runtime.units):
            raise RuntimeError(
                "a step's CUDA graph: expected a step that runs backward after each forward, got a "
                "forward that waits for one; run it under torch.no_grad()"
            )
        runtime.pool.trim()  # nor is the graph's memory lent to others
        backwards = runtime.exchange_order.backwards - before.backwards
        runtime.exchange_order.backwards = before.backwards  # it has not run yet
        gradients = [unit.gradients for unit in runtime.units if unit.gradients.has_grad]
        for left_behind in gradients:
            left_behind.graphs += 1
        return RecordedPart(runtime, gradients, backwards, _trainable(runtime))

    def compare(self) -> None:
        """Compare what the ranks have recorded, where they could differ (a collective of all whose
        recordings have ended).

        Raises:
            DivergentUseError: not the same; on all ranks.
        """
        if self._runtime._watch is not None:
            self._runtime._watch.ends(END_OF_BACKWARD, compares=True)

    def fail(self) -> None:
        """What was recorded since `begin` will not run, and no stream records any more."""
        runtime, before = self._runtime, self._before
        for unit in runtime.units:
            unit.forget_gather()
        if runtime._backward is not None:
            runtime._backward.forget_exchanges()
        runtime.recover()
        for unit in runtime.units:
            for run in unit.gradients.runs:
                run.param.grad = None
            unit.gradients.free_cleared()
        runtime.mark_stale()
        runtime.exchange_order.backwards = before.backwards
        uses = runtime.collectives.uses
        for record, point in zip((uses.gathers, uses.exchanges), before.uses, strict=True):
            record.go_back(point)


def _trainable(runtime: Runtime) -> list[bool]:
    return [param.requires_grad for unit in runtime.units for param in unit.faces.sharded]


def _reasons(runtime: Runtime) -> list[str]:
    return [
        text
        for is_so, text in (
            (runtime.options.ranks_may_differ, "ranks_may_differ has hosts agree on each gather"),
            (
                isinstance(runtime.after_exchanges, GradientChecks),
                "check_for_nan_in_grad and check_for_large_grads have the host read each exchange",
            ),
            (
                not runtime.exchange_order.is_agreed,
                "the ranks agree on the order of exchanges at the end of the first backward; make "
                "a step without a graph first",
            ),
            (
                runtime.runs_backward,
                "a backward runs; record outside of it",
            ),
        )
        if is_so
    ] + [reason for find in (_of_groups, _of_wires, _of_units) if (reason := find(runtime))]


def _of_groups(runtime: Runtime) -> str:
    groups = [
        group
        for channel in runtime.ranks.channels
        for group in (channel.axis.gather, channel.axis.reduce)
        if group is not None
    ]
    backends = sorted({str(dist.get_backend(group)) for group in groups} - {"nccl"})
    if not backends:
        return ""
    return f"collectives go by {listed(backends)}, where the host waits; use NCCL"


def _of_wires(runtime: Runtime) -> str:
    sums = [one for unit in runtime.units for one in unit.reduction.sums]
    routes = {one.channel.route for one in sums} - {Channel.route}
    if routes:
        return (
            f"sums go by {listed(sorted(routes))}, whose slots take turns from step to step; pass "
            "symmetric_memory='off'"
        )
    wires = [wire for unit in runtime.units for wire in unit.spec.wires]
    if any(_repeats_noise(wire) for wire in [*wires, *(one.wire for one in sums)]):
        return (
            "noise of stochastic rounding counts on the host, so that replays would repeat it; "
            "pass MessageWire(seed_offset=...), and advance that tensor between steps"
        )
    return ""


def _repeats_noise(wire: Wire) -> bool:
    if not isinstance(wire, MessageWire):
        return False
    return wire.rounding == "stochastic" and wire.seed_offset is None


def _of_units(runtime: Runtime) -> str:
    lent = [unit.spec.name for unit in runtime.units if unit.faces.awaits_more]
    if not lent:
        return ""
    return (
        f"parameters of {_units(lent)} are whole inside gathered(), or somebody keeps one of them "
        "or a graph of it, whose gradients all ranks agree on; leave the block, and let go of them"
    )


def _units(names: Sequence[str]) -> str:
    return "unit " + listed([f"'{name}'" for name in names])
