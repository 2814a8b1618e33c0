"""Several messages of one vector: which elements of which tensors each of them has.

    vector    | tensor a        | tensor b | gap |       c      |
    messages  |    0    |    1    |    2    |    3    |

A message has `numel` elements, a multiple of what tensors begin at, and so does every slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Share(NamedTuple):
    """Tensors and slices of tensors in one message, their places there, their first indices."""

    tensors: list[torch.Tensor]
    offsets: list[int]
    first_indices: list[int]


def whole_or_flat(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], numel: int
) -> list[torch.Tensor]:
    """The tensors; 1-D those that lie in several messages, a copy where they are not contiguous."""
    return [
        tensor.reshape(-1) if offset % max(numel, 1) + tensor.numel() > numel else tensor
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def shares_of(
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    first_indices: Sequence[int],
    numel: int,
    num_messages: int,
) -> list[Share]:
    """What each message has of `whole_or_flat` tensors; empty ones are in none.

    Example: of messages of 256 elements, a tensor of 600 at 128 has 128 elements in the first,
    256 in the second and 216 in the third, where the last two begin at 0.
    """
    shares = [Share([], [], []) for _ in range(num_messages)]
    for tensor, offset, index in zip(tensors, offsets, first_indices, strict=True):
        at, end = offset, offset + tensor.numel()
        while at < end:
            number, place = divmod(at, numel)
            stop = min(end, at - place + numel)
            is_whole = stop - at == tensor.numel()
            share = shares[number]
            share.tensors.append(tensor if is_whole else tensor[at - offset : stop - offset])
            share.offsets.append(place)
            share.first_indices.append(index + at - offset)
            at = stop
    return shares
