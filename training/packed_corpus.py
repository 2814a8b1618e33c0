"""The packed rows that each (seed, step, microbatch, rank) of a run draws from a corpus.

A corpus is packed once, before the first step; a step draws bins from it. They are drawn for the
whole step at once and dealt out as `draw_batch` deals out sequences, so that neither the number of
ranks nor that of microbatches changes what a step learns from.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .data import Corpus, Share, mix_seed
from .errors import DataError
from .packing import Document, PackedBatch, PackingPlan, cut, lay_out, pack


@dataclass(frozen=True, eq=False, slots=True)
class PackedCorpus:
    """The training documents of a corpus, cut into pieces and packed into bins of one sequence.

    starts, lengths: int64 [pieces], where the inputs of a piece begin in `train`, and their number.
    """

    train: Tensor
    starts: Tensor
    lengths: Tensor
    plan: PackingPlan

    @property
    def described(self) -> str:
        """In a few words."""
        return (
            f"{self.starts.numel():,} pieces of documents in {len(self.plan.bins):,} rows of "
            f"{self.plan.budget} tokens, {100 * self.plan.waste:.2f} % of them empty"
        )

    def document(self, piece: int) -> Document:
        """The inputs of a piece and the bytes that they have to predict."""
        start, length = int(self.starts[piece]), int(self.lengths[piece])
        inputs = self.train[start : start + length]
        return Document(inputs, self.train[start + 1 : start + length + 1])


def pack_corpus(corpus: Corpus, *, seq_len: int) -> PackedCorpus:
    """Pack the training files of `corpus` into bins of `seq_len` inputs.

    A file of more than seq_len + 1 bytes is cut into pieces of seq_len inputs and a rest, each with
    its targets, so that every byte but the first of a file is predicted exactly once; a piece does
    not see what came before it in the file. Nothing is left out but files of one byte or none,
    which predict nothing. The file that the held-out part begins in ends there.

    Raises:
        DataError: no file has two bytes.
    """
    ends = corpus.document_ends
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    pieces = cut((ends - begins - 1).clamp(min=0), seq_len)
    if not pieces.sequence.numel():
        raise DataError(
            "expected a file of at least 2 bytes to pack, got none in "
            f"{corpus.source}; pass --data with longer files, or leave --pack out"
        )
    plan = pack(pieces.length.tolist(), seq_len)
    starts = begins[pieces.sequence] + pieces.start
    return PackedCorpus(corpus.train, starts, pieces.length, plan)


def draw_packed_batch(
    packed: PackedCorpus, share: Share, *, seed: int, step: int, microbatch: int
) -> PackedBatch:
    """Return this rank's row of one microbatch: its share of the step's `share.batch` bins, one
    behind another.

    `loss_weight` is world size / targets of the whole step: the losses of the microbatches, added
    up and then averaged over the ranks, are the mean over all targets of the step, and so are the
    gradients, however many of the targets each microbatch has.
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, step))
    drawn = torch.randint(len(packed.plan.bins), (share.batch,), generator=generator).tolist()
    step_targets = sum(packed.plan.bin_tokens[number] for number in drawn)
    bins = [
        [packed.document(piece) for piece in packed.plan.bins[number]]
        for number in drawn[share.rows(microbatch)]
    ]
    batch = lay_out(bins, packed.plan.budget, longest=packed.plan.budget)
    return replace(batch, loss_weight=share.world_size / step_targets)
