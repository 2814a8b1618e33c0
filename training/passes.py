"""Forward and backward of all microbatches of a step, as they are or as one CUDA graph."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from .batches import Microbatch
from .engines import Engine
from .measured import REGION_LEVEL
from .measures import Timers
from .options import TrainOptions


def forward_backward_of(
    options: TrainOptions, engine: Engine, timers: Timers
) -> Callable[[Sequence[Microbatch]], Tensor]:
    """Return what gives the losses of a rank's microbatches, FP32 [microbatches], and has their
    gradients exchanged with the last; gradients have to be cleared before. A graph is replayed as a
    whole, so it is timed as one.
    """
    if not options.graph:
        return partial(_run, engine, timers)
    # Of no use to who asks for none: what it needs of torch takes a while to import.
    from .graphs import FullStepGraph

    untimed = Timers(device="cpu")
    graph = FullStepGraph(partial(_run, engine, untimed), [engine.module])

    def run(microbatches: Sequence[Microbatch]) -> Tensor:
        with timers.region("forward_backward", REGION_LEVEL):
            return graph(microbatches)

    return run


def _run(engine: Engine, timers: Timers, microbatches: Sequence[Microbatch]) -> Tensor:
    losses = []
    for left, microbatch in zip(reversed(range(len(microbatches))), microbatches, strict=True):
        with engine.no_sync() if left else nullcontext():
            with timers.region("forward", REGION_LEVEL):
                loss = microbatch.loss(engine.module)
            with timers.region("backward", REGION_LEVEL):
                loss.backward()
        losses.append(loss.detach().float())
    return torch.stack(losses)
