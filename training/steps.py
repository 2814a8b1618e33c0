"""One step of a run, and the loss on what is held out.

    step k:  rates, batch size -> microbatches x (forward, backward) -> clip -> AdamW -> figures

Step k draws its batch and its random numbers from (seed, k), so a resumed run needs the step, not
a generator's state.
"""

import math
from collections.abc import Mapping

import torch

from .attribution import run_validated
from .batches import window_loss
from .data import Share, held_out_batch, mix_seed
from .launch.ranks import mean_over_ranks
from .measured import REGION_LEVEL
from .options import TrainOptions
from .recorder import Figures, Recorder
from .rerun import ExitDecision
from .run import Run

GO_ON = ExitDecision()


def train_step(run: Run, step: int, recorder: Recorder) -> ExitDecision:
    """Train step `step`, counted from 1, and record it; every rank calls this. Where it decides to
    exit, a result was rejected, and parameters are as they were.

    Raises:
        NonFiniteGradientError: a gradient is NaN or infinite, and that ends the run.
    """
    options, engine, region = run.plan.options, run.engine, run.measures.timers.region
    sizes = run.batches.at(run.batches.consumed_before(step))
    share = Share(
        sizes.running_global_batch_size,
        sizes.num_microbatches,
        run.place.rank,
        run.place.world_size,
    )
    torch.manual_seed(mix_seed(options.seed, step, run.place.rank))
    run.scheduler.step(step - run.scheduler.num_steps)
    with region("step", REGION_LEVEL):
        with region("batch", REGION_LEVEL):
            microbatches = [
                run.draws.draw(share, step, number, run.device)
                for number in range(share.accumulate)
            ]
        engine.optimizer.zero_grad()  # before the machine keeps what it runs the step again from
        losses = run_validated(
            run.machine, lambda: run.forward_backward(microbatches), engine.own_gradient
        )
        decision = GO_ON if run.machine is None else run.machine.should_checkpoint_and_exit()
        if decision.exit:
            return decision
        with region("clip", REGION_LEVEL):
            max_norm = _max_norm(options)
            norms = {} if max_norm is None else {"grad_norm": engine.clip(max_norm)}
        with region("optimizer", REGION_LEVEL):
            engine.optimizer.step()
        with region("loss", REGION_LEVEL):
            figures = Figures.of(loss=run.stopping.mean_over_ranks(losses.sum(), "loss"), **norms)
    recorder.finish_step(step, share.batch * options.seq_len, figures, _known(run, share))
    return decision


def held_out_loss(run: Run) -> float:
    """The mean loss over what is held out; every rank calls this and gets the same."""
    options, place = run.plan.options, run.place
    share = Share(options.batch, options.accumulate, place.rank, place.world_size)
    tokens = held_out_batch(run.plan.corpus, share, seq_len=options.seq_len).to(run.device)
    run.engine.module.eval()
    with torch.no_grad():
        loss = window_loss(run.engine.module, tokens)
    run.engine.module.train()
    return float(mean_over_ranks(loss, "held-out loss").item())


def _max_norm(options: TrainOptions) -> float | None:
    """What gradients are clipped to; None where nobody reads their norm. Of FSDP2, which looks at
    no gradient, it is what tells that one is NaN or infinite.
    """
    if options.clip > 0:
        return options.clip
    is_looked_at = options.use_torch_fsdp2 and options.nonfinite_grads == "raise"
    return math.inf if is_looked_at else None


def _known(run: Run, share: Share) -> Mapping[str, float]:
    # The first group has the schedule's own values, since `build_optimizer` gives it no factors.
    first = run.engine.optimizer.param_groups[0]
    return {"lr": first["lr"], "weight_decay": first["weight_decay"], "batch": share.batch}
