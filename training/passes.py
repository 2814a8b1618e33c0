"""Forward and backward of all microbatches of a step, as they are or as one CUDA graph."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .batches import Microbatch
from .engines import Engine
from .measured import REGION_LEVEL
from .measures import Timers
from .options import TrainOptions

if TYPE_CHECKING:
    from .graphs import FullStepGraph


class ForwardBackward(Protocol):
    """What gives the losses of a rank's microbatches, FP32 [microbatches], and has their gradients
    exchanged with the last; gradients have to be cleared before.
    """

    @property
    def remark(self) -> str:
        """What the user is to know of it; empty where that is nothing."""

    def __call__(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """The losses."""

    def reset(self) -> None:
        """Let go of graphs; the process group ends next, and NCCL waits for those that have its
        collectives.
        """


def forward_backward_of(options: TrainOptions, engine: Engine, timers: Timers) -> ForwardBackward:
    """Return that of a run with `options`."""
    if not options.graph:
        return _AsTheyAre(engine, timers)
    # Of no use to who asks for none: what it needs of torch takes a while to import.
    from .graphs import FullStepGraph

    untimed = _AsTheyAre(engine, Timers(device="cpu"))
    return _AsGraph(FullStepGraph(untimed, [engine.module]), timers)


@dataclass(frozen=True, slots=True)
class _AsTheyAre:
    engine: Engine
    timers: Timers
    remark: str = ""

    def __call__(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses = []
        for left, microbatch in zip(reversed(range(len(microbatches))), microbatches, strict=True):
            with self.engine.no_sync() if left else nullcontext():
                with self.timers.region("forward", REGION_LEVEL):
                    loss = microbatch.loss(self.engine.module)
                with self.timers.region("backward", REGION_LEVEL):
                    loss.backward()
            losses.append(loss.detach().float())
        return torch.stack(losses)

    def reset(self) -> None:
        """There are none."""


@dataclass(frozen=True, slots=True)
class _AsGraph:
    """A graph is replayed as a whole, so it is timed as one."""

    graph: "FullStepGraph"
    timers: Timers

    @property
    def remark(self) -> str:
        """That a CPU has no graphs."""
        captures = self.graph.captures
        return "" if captures else "--graph: no CUDA graph on a CPU, steps run as they are"

    def __call__(self, microbatches: Sequence[Microbatch]) -> Tensor:
        with self.timers.region("forward_backward", REGION_LEVEL):
            losses: Tensor = self.graph(microbatches)
            return losses

    def reset(self) -> None:
        """All of them."""
        self.graph.reset()
