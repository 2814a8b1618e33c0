"""What a rank does in `sidestream bench convergence`: one training from its first step to its last.

    step k    learning rate -> forward, backward -> clip -> AdamW     FP32 but for what travels
    losses    of every step, the mean over the ranks; of the held-out text at some steps

Initial weights depend on the seed alone, the batch of a step on the seed and its number. So wires
differ in nothing but in what they do to gradients and weights.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ..sharding import clip_grad_norm_, full_state_dict, fully_shard
from ..sharding.fully_shard import runtime_of
from ..training.data import MIB, Corpus, Share, draw_batch, held_out_batch, load_corpus
from ..training.launch.ranks import mean_over_ranks
from ..training.model import VOCAB_SIZE, Block, GPTConfig, build_model
from ..training.optimization import build_optimizer
from ..training.result import sha256_of
from ..training.schedule_options import ScheduleOptions, schedule_of
from .convergence_wires import WIRES

MAX_TEXT_BYTES = 8 * MIB
VALIDATION_ROWS = 256  # sequences a rank
CURVE_POINTS = 20
FINAL_STEPS, FINAL_EVERY = 100, 10
CLIP_NORM = 1.0
# Gathers once a step; bits are the same at each level.
ZERO = 2


@dataclass(frozen=True, slots=True)
class Size:
    """A model, how many sequences a rank reads in a step, and the highest learning rate."""

    model: GPTConfig
    rows: int
    learning_rate: float


# At 0.004 the loss of "small" falls lower, but rounding the gradients to bfloat16 moves the final
# one by 0.5 %, which hides what wires do; at 0.0015, by 0.00 %.
SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "tiny": Size(GPTConfig(num_layers=1, width=32, num_heads=2, context=16), 2, 0.004),
        "small": Size(GPTConfig(num_layers=2, width=96, num_heads=4, context=64), 4, 0.0015),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all runs that are compared have in common. `data`: a path, or None as `load_corpus` has
    it; `data_sha256`: of what was read there.
    """

    size: str
    steps: int
    ranks: int
    data: str | None
    data_sha256: str

    def described(self) -> dict[str, Any]:
        """All that a run's numbers depend on, but for its wire and its seed."""
        return {
            "size": self.size,
            **asdict(SIZES[self.size]),
            "steps": self.steps,
            "ranks": self.ranks,
            "data_sha256": self.data_sha256,
            "validation_rows": VALIDATION_ROWS,
            "final_steps": FINAL_STEPS,
            "clip_norm": CLIP_NORM,
            "zero": ZERO,
        }

    def load(self) -> Corpus:
        """The text.

        Raises:
            DataError: it cannot be read, or there is too little of it.
        """
        return load_text(self.data, self.size)


@dataclass(frozen=True, slots=True)
class Run:
    """One training. `attempt`: more than 0 where the same is done again, to compare bits."""

    seed: int
    attempt: int
    wire: str

    def __str__(self) -> str:
        return f"{self.wire}, seed {self.seed}" + (", again" if self.attempt else "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. Losses are means over the ranks in nats per byte, those of the steps in
    order, those of the held-out text by their steps. After one that is not finite, a run ends where
    the held-out text is next looked at.

    grad_bytes, weight_bytes: sent for one element, headers and padding included; None where nothing
    was sent, as one rank has nobody to send to.
    """

    losses: list[float]
    validation: dict[int, float]
    weights_sha256: str
    num_parameters: int
    grad_bytes: float | None
    weight_bytes: float | None
    seconds: float


def load_text(data: str | None, size: str) -> Corpus:
    """The text of a model of this size; see `load_corpus`."""
    return load_corpus(data, seq_len=SIZES[size].model.context, max_bytes=MAX_TEXT_BYTES)


def unigram_loss(corpus: Corpus) -> float:
    """Held-out loss, in nats a byte, of how often each byte comes in the training part (each seen
    once more than it is).
    """
    counts = torch.bincount(corpus.train.long(), minlength=VOCAB_SIZE).double() + 1.0
    return -(counts / counts.sum()).log()[corpus.held_out.long()].mean().item()


def is_evaluated(step: int, steps: int) -> bool:
    """Whether the held-out loss is taken after `step`: at 20 steps or so, and often at the end."""
    if step > steps - FINAL_STEPS and step % FINAL_EVERY == 0:
        return True
    # Not at every step, however few: an evaluation gathers for the step after it.
    return step == steps or step % max(2, steps // CURVE_POINTS) == 0


def train(rank: int, task: tuple[Settings, Run]) -> Outcome:
    """All steps of a run, on this rank of the process group; all ranks return the same, but for the
    time.

    Raises:
        RuntimeError: the text has changed since the settings were made.
    """
    settings, run = task
    corpus = settings.load()
    if corpus.sha256 != settings.data_sha256:
        raise RuntimeError(
            f"{corpus.source}: expected the text to stay as it was at the start, SHA-256 "
            f"{settings.data_sha256:.12}, got {corpus.sha256:.12}; start again"
        )
    training = _Training(settings, run, corpus, rank)
    start = time.perf_counter()
    for step in range(1, settings.steps + 1):
        training.step(step)
        if is_evaluated(step, settings.steps) and not training.evaluate(step):
            break
    return training.outcome(time.perf_counter() - start)


class _Training:
    """The parts of one run on one rank."""

    def __init__(self, settings: Settings, run: Run, corpus: Corpus, rank: int) -> None:
        self._settings, self._run, self._corpus = settings, run, corpus
        self._size = size = SIZES[settings.size]
        self._share = Share(size.rows * settings.ranks, 1, rank, settings.ranks)
        held_out = Share(VALIDATION_ROWS * settings.ranks, 1, rank, settings.ranks)
        self._held_out = held_out_batch(corpus, held_out, seq_len=size.model.context)
        wire = WIRES[run.wire]
        model = build_model(size.model, run.seed)
        if wire.nudged:
            model.bfloat16().float()
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._module, optimizer = fully_shard(
            model,
            build_optimizer(model.parameters(), size.learning_rate),
            fsdp_unit_modules=[Block],
            zero_dp_strategy=ZERO,
            mixed_precision_policy=wire.policy(),
        )
        assert optimizer is not None, "fully_shard returns the optimizer it was given"
        self._optimizer = optimizer
        self._schedule = schedule_of(ScheduleOptions(steps=settings.steps, lr=size.learning_rate))
        self._traffic = runtime_of(self._module).collectives.traffic
        self._sent: Counter[str] = Counter()  # in a step, the most of each kind
        self._new_losses: list[Tensor] = []
        self._losses: list[float] = []
        self._validation: dict[int, float] = {}

    def step(self, step: int) -> None:
        """Train one step, counted from 1."""
        size = self._size
        before = Counter(self._traffic.sent_bytes)
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.at(step).lr
        tokens = draw_batch(
            self._corpus,
            self._share,
            seed=self._run.seed,
            step=step,
            microbatch=0,
            seq_len=size.model.context,
        )
        loss = _loss(self._module, tokens)
        loss.backward()
        clip_grad_norm_(self._module, CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._new_losses.append(loss.detach())
        self._sent |= Counter(self._traffic.sent_bytes) - before

    def evaluate(self, step: int) -> bool:
        """Take the held-out loss, and bring the losses since the last time together; whether all of
        them are finite.
        """
        with torch.no_grad():
            self._new_losses.append(_loss(self._module, self._held_out))
        *new, held_out = mean_over_ranks(torch.stack(self._new_losses), "losses").tolist()
        self._new_losses.clear()
        self._losses += new
        self._validation[step] = held_out
        return all(map(math.isfinite, [*new, held_out]))

    def outcome(self, seconds: float) -> Outcome:
        """What came of it; every rank takes part."""
        return Outcome(
            losses=self._losses,
            validation=self._validation,
            weights_sha256=sha256_of(full_state_dict(self._module)),
            num_parameters=self._num_parameters,
            grad_bytes=self._bytes_an_element("exchange"),
            weight_bytes=self._bytes_an_element("gather"),
            seconds=seconds,
        )

    def _bytes_an_element(self, kind: str) -> float | None:
        """A rank sends its part of the elements, or gets it, from each of the others."""
        peers = dist.get_world_size() - 1
        if not self._sent[kind]:
            return None
        return self._sent[kind] * (peers + 1) / (peers * self._num_parameters)


def _loss(module: nn.Module, tokens: Tensor) -> Tensor:
    logits = module(tokens[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCAB_SIZE), tokens[:, 1:].reshape(-1))
