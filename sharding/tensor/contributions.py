"""Values of a sharded parameter that a loss uses directly, as nodes of autograd's graph.

    p.full_tensor()   the whole value [shape]        its gradient [shape]
    p.to_local()      this rank's part [interval]    its gradient, zeros around it [shape]

Autograd never sees a sharded parameter: in the graph the unit's full parameter stands for it, of
which only the shape counts, since its memory may be freed. So what comes back is added to what the
unit's module got on this rank, and is this rank's contribution to the average over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Contribution(torch.autograd.Function):
    """Elements [start, start + n) of the parameter that `leaf` stands for."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        start: int,
        value: Callable[[], Tensor],
        begin_backward: Callable[[], None],
    ) -> Tensor:
        """`value()`, made in here: autograd takes it for new, so that it may be written to.

        `begin_backward` is called when the gradient is there, perhaps before any module's hook.
        """
        ctx.start, ctx.shape, ctx.begin_backward = start, leaf.shape, begin_backward
        return value()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the whole parameter; autograd brings it to the leaf's dtype."""
        ctx.begin_backward()
        flat = grads[0].reshape(-1)
        missing = ctx.shape.numel() - flat.numel()
        if missing:
            flat = nn.functional.pad(flat, (ctx.start, missing - ctx.start))
        return flat.view(ctx.shape), None, None, None
