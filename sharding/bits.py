"""Tensors by their bits: compared as numbers, NaN would differ from itself and -0 equal 0."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(one: Tensor, other: Tensor) -> Tensor:
    """Where the bits of two tensors of one shape and dtype differ: bool [shape]."""
    integer = _INTEGERS[one.dtype.itemsize]
    return one.view(integer) != other.view(integer)


def with_changes(main: Tensor, written: Tensor, before: Tensor | None = None) -> Tensor:
    """`main` [n] with those elements of `written` [n] that are not as `before`, [n] of its dtype
    (None: the cast of `main`): the others keep the bits that a narrower `written` cannot hold.
    """
    if before is None:
        if written.dtype == main.dtype:
            return written
        before = main.to(written.dtype)
    return torch.where(differing(written, before), written.to(main.dtype), main)


def once_in_memory(tensor: Tensor) -> Tensor:
    """The view of `tensor`, detached, with each element of its memory once, so that it may be
    written: along what is expanded there is one. Steps along single elements, whatever they were,
    are 1, as seeing memory as bytes wants.
    """
    pairs = [*zip(tensor.shape, tensor.stride(), strict=True)]
    sizes = [min(size, 1) if step == 0 else size for size, step in pairs]
    steps = [step if size > 1 else 1 for size, (_, step) in zip(sizes, pairs, strict=True)]
    return tensor.detach().as_strided(sizes, steps)
