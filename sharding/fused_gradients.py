"""Where a kernel that computes a weight's gradient may add it by itself, in FP32, in place of
returning it to autograd.

    class FusedLinear(torch.autograd.Function):
        def backward(ctx, grad):
            with main_grad(weight) as total:        # total += grad.T @ input, in the kernel
                add_weight_gradient(total, grad, input)
            return grad @ weight, None
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from torch import Tensor

from .runtime import Runtime
from .unit import Unit

_KEY = "_sum_of_gradients"


def allow_fused_gradients(runtime: Runtime) -> None:
    """Let `main_grad` be called for the parameters that the modules of a model use."""
    for unit in runtime.units:
        for index, param in enumerate(unit.faces.full):
            vars(param)[_KEY] = weakref.ref(unit), index


@contextlib.contextmanager
def main_grad(param: Tensor) -> Iterator[Tensor]:
    """This rank's own sum of gradients of `param` [its shape, FP32], for a kernel to add to; at the
    end of the block the gradient is there, as if autograd had brought it.

    For the backward of a `torch.autograd.Function`, which returns None for `param`, a weight of a
    `DistributedDataParallel`. Takes memory for all of the bucket in FP32 until its exchange, as
    `no_sync` does. Used twice in one backward, a weight is exchanged once more at its end.

    Raises:
        ValueError: `param` is another tensor, such as one seen outside forward and backward.
        RuntimeError: a sum that waits was changed in place.
    """
    source: tuple[weakref.ref[Unit], int] | None = vars(param).get(_KEY)
    unit = None if source is None else source[0]()
    if source is None or unit is None:
        raise ValueError(
            "main_grad: expected a parameter that a module of a DistributedDataParallel model uses "
            f"in its forward, got a {type(param).__name__}; save the weight for backward as the "
            "forward sees it"
        )
    segment = unit.spec.layout.segments[source[1]]
    yield unit.gradients.open_sum()[segment.start : segment.stop].view(segment.shape)
    unit.reduction.watch.tell(param)
