"""One row of tokens from the documents of several bins, with what each place has to predict."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .params import PackedSeqParams
from .plan import PackingPlan

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
IGNORED_TARGET = -100
"""What `cross_entropy` leaves out: the place predicts nothing."""


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens and what each of them has to predict: 1-D integer tensors of one length, on the CPU.
    `IGNORED_TARGET`: nothing.
    """

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class PackedBatch:
    """A row of documents, and what is learned from it.

    tokens, targets: int64 [1, total_tokens]; a target of `IGNORED_TARGET` is none.
    num_targets: how many there are. loss_weight: what the sum of the losses is multiplied by;
    1 / num_targets makes their mean, 0 where there is no target.
    """

    tokens: Tensor
    targets: Tensor
    params: PackedSeqParams
    num_targets: int
    loss_weight: float

    @property
    def loss_mask(self) -> Tensor:
        """Which places predict something: bool [1, total_tokens]."""
        return self.targets != IGNORED_TARGET

    @property
    def position_ids(self) -> Tensor:
        """Place of each token in its document: int64 [1, total_tokens]."""
        return self.params.position_ids

    @property
    def seq_idx(self) -> Tensor:
        """Number of each token's document: int32 [1, total_tokens]."""
        assert self.params.seq_idx is not None, "made by __post_init__"
        return self.params.seq_idx

    def loss(self, logits: Tensor) -> Tensor:
        """Return `loss_weight` x the sum of the cross entropies of `logits` [1, total_tokens,
        vocabulary], in FP32.
        """
        total = F.cross_entropy(
            logits.float().flatten(0, 1),
            self.targets.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum",
        )
        return total * self.loss_weight

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedBatch":
        """Return the same on `device`."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            targets=self.targets.to(device, non_blocking=non_blocking),
            params=self.params.to(device, non_blocking),
        )

    def pin_memory(self) -> "PackedBatch":
        """Return the same in pinned memory, from which copies to a GPU need no wait."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            targets=self.targets.pin_memory(),
            params=self.params.pin_memory(),
        )


def pack_batch(
    sequences: Sequence[Tensor],
    plan: PackingPlan,
    *,
    bins: Sequence[int] | None = None,
    targets: Sequence[Tensor] | None = None,
    pad_token: int = 0,
) -> PackedBatch:
    """Lay `sequences`, 1-D integer tensors on the CPU, into one row of bins of `plan`, each filled
    up to its budget with `pad_token`.

    Every token has to predict the one after it; the last of a sequence predicts nothing. `targets`
    of the same lengths say otherwise, `IGNORED_TARGET` where nothing is to be learned. `bins`: the
    numbers of those that the row has, in its order; None: all. Its `loss_weight` is of this row:
    where a step has several, weigh each by ranks / targets of the step, which its ranks average.

        plan = pack([len(sequence) for sequence in sequences], budget=1024)
        batch = pack_batch(sequences, plan, bins=[7, 2])

    Raises:
        TypeError: sequences or targets are no 1-D integer tensors on the CPU.
        ValueError: the sequences are not those of the plan, or targets have other lengths.
        IndexError: the plan has no such bin.
    """
    num_planned = sum(map(len, plan.bins))
    if not num_planned == len(sequences) == len(sequences if targets is None else targets):
        raise ValueError(
            f"expected the {num_planned} sequences of the plan, and as many targets if any, got "
            f"{len(sequences)}{'' if targets is None else f' and {len(targets)}'}; pass those "
            "whose lengths were packed"
        )
    laid = []
    for number in range(len(plan.bins)) if bins is None else bins:
        laid.append([_document(sequences, targets, place) for place in _bin(plan, number)])
        found = sum(len(document.tokens) for document in laid[-1])
        if found != plan.bin_tokens[number]:
            raise ValueError(
                f"expected {plan.bin_tokens[number]} tokens in bin {number}, as the plan has it, "
                f"got {found}; pass the sequences whose lengths were packed"
            )
    longest = max((len(document.tokens) for bin_ in laid for document in bin_), default=0)
    return lay_out(laid, plan.budget, longest=max(longest, 1), pad_token=pad_token)


def _bin(plan: PackingPlan, number: int) -> tuple[int, ...]:
    if not 0 <= number < len(plan.bins):
        raise IndexError(
            f"bins: expected numbers from 0 to {len(plan.bins) - 1}, got {number}; the plan has "
            f"{len(plan.bins)} bins"
        )
    return plan.bins[number]


def _document(
    sequences: Sequence[Tensor], targets: Sequence[Tensor] | None, place: int
) -> Document:
    tokens = _row_of("sequences", sequences, place)
    target = _shifted(tokens) if targets is None else _row_of("targets", targets, place)
    if len(tokens) != len(target):
        raise ValueError(
            f"expected targets as long as their sequences, got {len(target)} for the {len(tokens)} "
            f"tokens of sequence {place}; pass one target for each token, {IGNORED_TARGET} for none"
        )
    return Document(tokens, target)


def _row_of(name: str, rows: Sequence[Any], place: int) -> Tensor:
    row = rows[place]
    if not isinstance(row, Tensor):
        found = type(row).__name__
    elif row.dim() != 1 or row.dtype not in INTEGERS or not row.is_cpu:
        found = f"{row.dtype} {list(row.shape)} on {row.device}"
    else:
        return row
    raise TypeError(
        f"expected {name} to be 1-D integer tensors on the CPU, got {found} as number {place}; "
        "pass the numbers of the tokens"
    )


def lay_out(
    bins: Sequence[Sequence[Document]], budget: int, *, longest: int, pad_token: int = 0
) -> PackedBatch:
    """Lay bins of documents, none of them above `longest` tokens, into one row; each bin is filled
    up to `budget` with documents of `pad_token`, which are not above `longest` either, so that a
    model of that context can read them.
    """
    laid: list[Document] = []
    for documents in bins:
        laid += documents
        room = budget - sum(len(document.tokens) for document in documents)
        while room:
            size = min(room, longest)
            laid.append(_padding(size, pad_token))
            room -= size
    tokens = _row([document.tokens for document in laid])
    targets = _row([document.targets for document in laid])
    lengths = [len(document.tokens) for document in laid]
    num_targets = int((targets != IGNORED_TARGET).sum())
    return PackedBatch(
        tokens,
        targets,
        PackedSeqParams.from_lengths(lengths, max_seqlen=longest),
        num_targets,
        1 / num_targets if num_targets else 0.0,
    )


def _row(parts: list[Tensor]) -> Tensor:
    # The parts may be of a narrower integer type.
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])[None]


def _shifted(sequence: Tensor) -> Tensor:
    ignored = torch.full((min(1, len(sequence)),), IGNORED_TARGET)
    return torch.cat([sequence[1:].long(), ignored])


def _padding(size: int, pad_token: int) -> Document:
    return Document(torch.full((size,), pad_token), torch.full((size,), IGNORED_TARGET))
