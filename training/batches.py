"""How a run draws the microbatches of a step: windows of the text, or rows of packed documents.

The losses of a step's microbatches, added up and averaged over the ranks, are the mean over all
bytes that the step predicts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import Corpus, Share, draw_batch, sent_to
from .model import VOCAB_SIZE
from .options import TrainOptions
from .packed_corpus import PackedCorpus, draw_packed_batch, pack_corpus
from .packing import PackedBatch


class Microbatch(Protocol):
    """Of one rank, on its device."""

    def loss(self, module: nn.Module) -> Tensor:
        """Its part of the step's loss; a forward of `module`."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Sequences of one length; see `draw_batch`. parts: how many microbatches the step has."""

    tokens: Tensor
    parts: int

    def loss(self, module: nn.Module) -> Tensor:
        """The mean over the sequences' predictions, over the number of parts."""
        return window_loss(module, self.tokens) / self.parts


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Documents one behind another; see `draw_packed_batch`."""

    batch: PackedBatch

    def loss(self, module: nn.Module) -> Tensor:
        """The weighted sum over the row's predictions."""
        return self.batch.loss(module(self.batch.tokens, self.batch.params))


class Draws(Protocol):
    """What a run's batches are drawn from."""

    @property
    def described(self) -> str:
        """In a few words; empty where there is nothing to say."""

    def draw(self, share: Share, step: int, microbatch: int, device: torch.device) -> Microbatch:
        """This rank's part of a microbatch, sent to `device`; follows from the numbers alone."""


@dataclass(frozen=True, slots=True)
class WindowDraws:
    """Windows at random places of a corpus."""

    corpus: Corpus
    seed: int
    seq_len: int
    described: str = ""

    def draw(self, share: Share, step: int, microbatch: int, device: torch.device) -> Windows:
        """Sequences of seq_len + 1 bytes."""
        tokens = draw_batch(
            self.corpus,
            share,
            seed=self.seed,
            step=step,
            microbatch=microbatch,
            seq_len=self.seq_len,
        )
        return Windows(sent_to(device, tokens), share.accumulate)


@dataclass(frozen=True, slots=True)
class PackedDraws:
    """Rows of a corpus that was packed."""

    packed: PackedCorpus
    seed: int

    @property
    def described(self) -> str:
        """How full the rows are."""
        return f"packed: {self.packed.described}"

    def draw(self, share: Share, step: int, microbatch: int, device: torch.device) -> PackedRow:
        """The documents of this rank's bins."""
        batch = draw_packed_batch(
            self.packed, share, seed=self.seed, step=step, microbatch=microbatch
        )
        if device.type == "cuda":
            batch = batch.pin_memory()
        return PackedRow(batch.to(device, non_blocking=True))


def draws_of(options: TrainOptions, corpus: Corpus) -> Draws:
    """What the batches of a run are drawn from.

    Raises:
        DataError: there is nothing to pack.
    """
    if options.pack:
        return PackedDraws(pack_corpus(corpus, seq_len=options.seq_len), options.seed)
    return WindowDraws(corpus, options.seed, options.seq_len)


def window_loss(module: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross entropy of predicting each byte of `tokens`, int64 [sequences, length], from
    those before it, in FP32.
    """
    logits = module(tokens[:, :-1])
    return F.cross_entropy(logits.float().reshape(-1, VOCAB_SIZE), tokens[:, 1:].reshape(-1))
