"""A GPT trained on packed documents with what `sidestream.training` has beside the sharding:
schedules, a batch that grows, timers, joules, fault attribution, graphs, metrics, checkpoints.

python examples/training_support.py memory://run                            one process
torchrun --nproc-per-node 2 examples/training_support.py checkpoints/run    two ranks

It takes a path, or a URL such as s3://bucket/run. The second of two trainings resumes the first.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import sidestream as ss
from sidestream.training import schedules
from sidestream.training.graphs import FullStepGraph
from sidestream.training.measures import EnergyMonitor, JsonLinesWriter, SeveralWriters, Timers
from sidestream.training.model import Block, build_model, model_config
from sidestream.training.packing import PackedSeqParams, pack, pack_batch
from sidestream.training.rerun import RerunStateMachine, has_open_question

STEPS, SAVE_EVERY, CONTEXT, BINS, ROW = 30, 10, 64, 2, 128  # a row: a microbatch, of BINS bins
PARAMS = schedules.ParamSchedule(max_lr=3e-3, lr_warmup_steps=5, lr_decay_steps=STEPS,
    lr_decay_style="WSD", wsd_decay_steps=10, lr_wsd_decay_style="minus_sqrt",
    start_wd=0.1, end_wd=0.1)  # fmt: skip
BATCHES = schedules.BatchSchedule.parse("0:8 80:16")  # samples are bins
RANDOM = torch.Generator().manual_seed(0)
LENGTHS = torch.empty(400).log_normal_(3, 0.6, generator=RANDOM).long().clamp(2, CONTEXT).tolist()
DOCUMENTS = [torch.arange(37 * n, 37 * n + length) % 256 for n, length in enumerate(LENGTHS)]
PLAN = pack(LENGTHS, CONTEXT)
Row = dict[str, Tensor]


def rows(batches: schedules.MicrobatchCalculator, step: int, rank: int) -> Iterator[Row]:
    """A rank's microbatches of a step, all of the same shapes, so that one graph serves them."""
    ranks, consumed = batches.data_parallel_size, batches.consumed_before(step)
    batch_size = batches.at(consumed).running_global_batch_size
    bins = [(consumed + place) % len(PLAN.bins) for place in range(batch_size)]
    # The last token of a document predicts nothing. Gradients are averaged over the ranks.
    num_targets = sum(PLAN.bin_tokens[number] - len(PLAN.bins[number]) for number in bins)
    for first in range(rank * BINS, len(bins), ranks * BINS):
        batch = pack_batch(DOCUMENTS, PLAN, bins=bins[first : first + BINS])
        row = {"tokens": batch.tokens, "targets": batch.targets}
        ends = batch.params.cu_seqlens_q
        # Empty documents behind the others: a graph has one number of them.
        row["offsets"] = F.pad(ends, (0, ROW + 1 - len(ends)), value=ROW)
        yield row | {"weight": torch.tensor(ranks / num_targets)}


class Training:
    """A model with what trains it; `done` is the last step of the checkpoint at `path`, if any."""

    def __init__(self, path: str) -> None:
        self.path, self.timers = path, Timers()
        self.model = build_model(model_config("tiny", context=CONTEXT), seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        ss.fully_shard(self.model, self.optimizer, fsdp_unit_modules=[Block])
        launched = dist.is_initialized()  # under torchrun, by fully_shard
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if launched else (0, 1)
        self.batches = schedules.MicrobatchCalculator(
            schedule=BATCHES, micro_batch_size=BINS, data_parallel_size=self.ranks
        )
        self.graphed = FullStepGraph(self.forward_backward, [self.model])
        self.scheduler = schedules.OptimizerParamScheduler.of(self.optimizer, PARAMS)
        try:
            saved = ss.load_checkpoint(path, self.model, self.optimizer)
            self.scheduler.load_state_dict(saved["scheduler"])
        except FileNotFoundError:
            saved = {"step": 0}
        self.done = saved["step"]
        self.machine = RerunStateMachine(self.model, program="support", first_step=self.done + 1)
        # What a rank has saved is its own. A step that waits for other hardware needs all of it.
        if self.done and (saved["ranks"] == self.ranks or has_open_question(saved["rerun"])):
            self.machine.load_state_dict(saved["rerun"])

    def save(self, step: int) -> None:
        """Replace the checkpoint by one of behind `step`; the old one stays until it is whole."""
        extra = {"scheduler": self.scheduler.state_dict(), "rerun": self.machine.state_dict()}
        extra |= {"step": step, "ranks": self.ranks}
        ss.save_checkpoint(self.path, self.model, self.optimizer, extra)

    def forward_backward(self, microbatches: list[Row]) -> Tensor:
        """Return this rank's part of the mean over all targets of the step, times the ranks."""
        losses = []
        for left, row in zip(reversed(range(len(microbatches))), microbatches, strict=True):
            offsets, targets = row["offsets"], row["targets"].flatten()
            params = PackedSeqParams(cu_seqlens_q=offsets, max_seqlen_q=CONTEXT, total_tokens=ROW)
            with ss.no_sync(self.model) if left else nullcontext():
                logits = self.model(row["tokens"], params).flatten(0, 1)
                losses.append(row["weight"] * F.cross_entropy(logits, targets, reduction="sum"))
                losses[-1].backward()
        return torch.stack(losses).sum()

    def step(self, step: int) -> dict[str, float]:
        """Train a step, counted from 1, and return its figures."""
        machine, region = self.machine, self.timers.region
        with region("rows"):
            microbatches = list(rows(self.batches, step, self.rank))
        while machine.should_run_forward_backward():
            self.optimizer.zero_grad()
            with region("forward-backward"):
                loss = self.graphed(microbatches)
            # Outside of the graph, of which a replay runs no Python.
            machine.validate_result(loss, torch.isnan, "loss")
        decision = machine.should_checkpoint_and_exit()
        if decision.checkpoint:
            self.save(step - 1)
        if decision.exit:
            sys.exit(decision.code)
        norm = ss.clip_grad_norm_(self.model, 1.0)
        self.scheduler.step()
        with region("optimizer"):
            self.optimizer.step()
        if self.ranks > 1:
            dist.all_reduce(loss)
        lr = self.scheduler.get_lr({})
        return {"loss": loss.item() / self.ranks, "grad_norm": norm.item(), "lr": lr}


def train(path: str, last_step: int) -> None:
    """Train up to `last_step`, from the checkpoint at `path` if any; figures: metrics.jsonl."""
    training = Training(path)
    energy = EnergyMonitor(training.graphed.device, local_rank=training.rank)  # of one machine
    energy.setup()
    first = training.rank == 0
    writers = [JsonLinesWriter("metrics.jsonl", resumed_step=training.done)] if first else []
    with closing(SeveralWriters(writers)) as writer:
        for step in range(training.done + 1, last_step + 1):
            for name, value in training.step(step).items():
                writer.add_scalar(name, value, step)
            energy.keep_up()
            if step % SAVE_EVERY == 0:
                training.save(step)
    report, joules = training.timers.report(), energy.lap_over_ranks()  # of all ranks
    energy.shutdown()
    if first:
        print(f"{report}\nenergy of steps to {last_step}: {joules}")


if __name__ == "__main__":
    for last_step in (2 * STEPS // 3, STEPS):
        train(sys.argv[1] if len(sys.argv) > 1 else "checkpoints/support", last_step)
    if dist.is_initialized():
        dist.destroy_process_group()
