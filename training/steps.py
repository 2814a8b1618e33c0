"""One step of a run, and the loss on what is held out.

    step k:  learning rate -> accumulate x (forward, backward) -> clip -> AdamW -> figures

Step k draws its batch and its random numbers from (seed, k), so a resumed run needs the step, not
a generator's state.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import draw_batch, held_out_batch, mix_seed, sent_to
from .launch.ranks import mean_over_ranks
from .model import VOCAB_SIZE
from .optimization import learning_rate
from .recorder import Figures
from .run import Run


def train_step(run: Run, step: int) -> Figures:
    """Train step `step`, counted from 1; every rank calls this and gets the same figures: "loss",
    and "grad_norm" where gradients are clipped.

    Raises:
        NonFiniteGradientError: a gradient is NaN or infinite, and that ends the run.
    """
    options, engine = run.plan.options, run.engine
    torch.manual_seed(mix_seed(options.seed, step, run.place.rank))
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(step, total_steps=options.steps, peak=options.lr)
    loss = _forward_backward(run, _microbatches(run, step))
    norms = {"grad_norm": engine.clip(options.clip)} if options.clip > 0 else {}
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return Figures.of(loss=run.stopping.mean_over_ranks(loss, "loss"), **norms)


def held_out_loss(run: Run) -> float:
    """The mean loss over what is held out; every rank calls this and gets the same."""
    tokens = held_out_batch(run.plan.corpus, run.share, seq_len=run.plan.options.seq_len).to(
        run.device
    )
    run.engine.module.eval()
    with torch.no_grad():
        loss = _loss(run.engine.module, tokens)
    run.engine.module.train()
    return float(mean_over_ranks(loss, "held-out loss").item())


def _microbatches(run: Run, step: int) -> list[Tensor]:
    options = run.plan.options
    drawn = (
        draw_batch(
            run.plan.corpus,
            run.share,
            seed=options.seed,
            step=step,
            microbatch=microbatch,
            seq_len=options.seq_len,
        )
        for microbatch in range(options.accumulate)
    )
    return [sent_to(run.device, tokens) for tokens in drawn]


def _forward_backward(run: Run, microbatches: Sequence[Tensor]) -> Tensor:
    """The mean loss of this rank's microbatches, whose gradients are exchanged with the last."""
    total = torch.zeros((), device=run.device)
    for left, tokens in zip(reversed(range(len(microbatches))), microbatches, strict=True):
        with run.engine.no_sync() if left else nullcontext():
            loss = _loss(run.engine.module, tokens) / len(microbatches)
            loss.backward()
        total += loss.detach()
    return total


def _loss(module: nn.Module, tokens: Tensor) -> Tensor:
    logits = module(tokens[:, :-1])
    return F.cross_entropy(logits.float().reshape(-1, VOCAB_SIZE), tokens[:, 1:].reshape(-1))
