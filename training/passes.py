"""Forward and backward of all microbatches of a step, as they are or as one CUDA graph."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

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
    gradients exchanged with the last; gradients have to be cleared before.
    """

    def run(microbatches: Sequence[Microbatch]) -> Tensor:
        losses = []
        for left, microbatch in zip(reversed(range(len(microbatches))), microbatches, strict=True):
            with engine.no_sync() if left else nullcontext():
                with timers.region("forward", REGION_LEVEL):
                    loss = microbatch.loss(engine.module)
                with timers.region("backward", REGION_LEVEL):
                    loss.backward()
            losses.append(loss.detach().float())
        return torch.stack(losses)

    if not options.graph:
        return run
    # Of no use to who asks for none: what it needs of torch takes a while to import.
    from .graphs import FullStepGraph

    return FullStepGraph(run, [engine.module])
