"""The collectives of tuned FSDP2: all-gather and reduce-scatter out of messages.

gloo's own reduce-scatter moves as many bytes as an all-reduce; these, from peer to peer, move what
they must. For gloo only: NCCL would have to be told of all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from .timeline import MESSAGE_RANGE


class _FreshBuffers:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A fresh buffer, as FSDP2's own collectives take."""
        return torch.empty(*size, dtype=dtype, device=device)


class MessageAllGather(_FreshBuffers):
    """FSDP2's all-gather out of point-to-point messages, straight into the parts of the output."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`input_tensor` of every rank into its part of `output_tensor`; done when it returns,
        whatever `async_op` says.
        """
        rank, parts = group.rank(), output_tensor.view(group.size(), -1)
        flat_input = input_tensor.view(-1)
        with record_function(f"{MESSAGE_RANGE}gather"):
            pending = _exchange(group, lambda peer: flat_input, lambda peer: parts[peer])
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(flat_input)
        for work in pending:
            work.wait()
        return None


class MessageReduceScatter(_FreshBuffers):
    """FSDP2's reduce-scatter out of point-to-point messages: a rank gets its part from each peer
    and adds in rank order.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """This rank's part of the sum (or mean) of all ranks' inputs; done when it returns,
        whatever `async_op` says.

        Raises ValueError for an operation other than SUM and AVG.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"the reduction must be SUM or AVG, got {op}; leave the gradient divide factor "
                "unset."
            )
        rank, world = group.rank(), group.size()
        parts = input_tensor.view(world, -1)
        arrived = torch.empty_like(parts)
        with record_function(f"{MESSAGE_RANGE}exchange"):
            pending = _exchange(group, lambda peer: parts[peer], lambda peer: arrived[peer])
        for work in pending:
            work.wait()
        total = output_tensor.view(-1)
        total.copy_(parts[rank] if rank == 0 else arrived[0])
        for peer in range(1, world):
            total.add_(parts[rank] if peer == rank else arrived[peer])
        if op == dist.ReduceOp.AVG:
            total.div_(world)
        return None


def _exchange(
    group: dist.ProcessGroup, outgoing: Callable[[int], Tensor], incoming: Callable[[int], Tensor]
) -> list[dist.Work]:
    rank, world = group.rank(), group.size()
    pending = []
    for distance in range(1, world):
        source, target = (rank - distance) % world, (rank + distance) % world
        pending.append(group.recv([incoming(source)], source, 0))
        pending.append(group.send([outgoing(target)], target, 0))
    return pending
