"""Ways in which four ranks hold a tensor, as intervals of its elements, and tensors held so."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.sharding.tensor.group_parts import Intervals
from sidestream.sharding.tensor.sharded_tensor import ShardedTensor

BLOCK = 128


def _slices(numel: int, count: int) -> Intervals:
    """`numel` elements in slices of whole blocks, as the slices of a flat buffer lie."""
    size = -(-numel // (count * BLOCK)) * BLOCK
    return tuple(
        (min(place * size, numel), min((place + 1) * size, numel)) for place in range(count)
    )


def _in_order(numel: int, order: tuple[int, ...]) -> Intervals:
    slices = _slices(numel, max(order) + 1)
    return tuple(slices[place] for place in order)


CUTS: dict[str, Callable[[int], Intervals]] = {
    "flat": lambda numel: _in_order(numel, (0, 1, 2, 3)),
    "whole": lambda numel: ((0, numel),) * 4,
    # Two replicas: the shard axis is the first one of the mesh, or the last.
    "replicas beside": lambda numel: _in_order(numel, (0, 0, 1, 1)),
    "replicas apart": lambda numel: _in_order(numel, (0, 1, 0, 1)),
    # The finest slices, cut by the second axis of the mesh before the first.
    "transposed": lambda numel: _in_order(numel, (0, 2, 1, 3)),
    "backwards": lambda numel: _in_order(numel, (3, 2, 1, 0)),
}


def sharded(
    full: Tensor, cut: str, name: str = "x", *, is_parameter: bool = False
) -> ShardedTensor:
    """This rank's part of `full`, of which four ranks hold what `cut` says."""
    intervals = CUTS[cut](full.numel())
    start, stop = intervals[dist.get_rank()]
    return ShardedTensor(
        full.detach().reshape(-1)[start:stop].clone(),
        full.shape,
        start,
        name=name,
        group=dist.group.WORLD,
        intervals=intervals,
        is_parameter=is_parameter,
    )


def values(*shape: int, seed: int = 0) -> Tensor:
    """Whole values with some zeros among them, the same on every rank."""
    full = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return full * (full.abs() > 0.3)
