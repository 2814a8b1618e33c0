"""Owns what the cases of `make gpu-check` share: what runs, what it must move, if results agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT_NUMEL = 128
OURS = "sidestream"


@dataclass(frozen=True)
class Case:
    """One row group of the table. `target`: the part of a copy's rate that ours is to reach."""

    name: str
    num_bytes: int
    candidates: dict[str, Callable[[], object]]
    agrees: Callable[[], bool]
    target: float | None = None


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all bytes are equal, on whatever devices."""
    return all(
        torch.equal(one.cpu().view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        for one, other in zip(found, expected, strict=True)
    )


def offsets_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where aligned tensors lie one after the other, and where the last one ends."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL
    return offsets, end
