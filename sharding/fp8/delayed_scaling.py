"""Delayed scaling: a scale a tensor, from the largest magnitudes that it had in steps before.

    scales_for(amaxes)       in a step: notes them, and says what to multiply with
    update_scales(states)    after it: one maximum over all ranks, then the next scales

The formula and the order of the history are `kernels.update_fp8_scales_`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...kernels import update_fp8_scales_
from ...kernels.checks import check_choice, check_integer, check_like
from ...kernels.fp8.reference import ELEMENTS
from ..arguments import kind_of, require_member
from ..collectives import Pending
from .recipes import History

_MAGNITUDE = 2**31 - 1  # FP32 bits without the sign


class DelayedScaling(nn.Module):
    """The state of `num_tensors` tensors with elements "e4m3" or "e5m2": two buffers, so that it is
    saved, loaded, moved and broadcast with the module that it is a part of.

    amax_history: FP32 [num_tensors, length], [:, 0] being the step that runs. scales: FP32
    [num_tensors]; 0 while a tensor has no history, when `scales_for` takes the scale that its
    present amax would give: no step is cast with a scale that nothing was measured for. In `eval`
    nothing is noted: what is only looked at changes no training.

    Raises:
        TypeError, ValueError: arguments that are no such.
    """

    amax_history: Tensor
    scales: Tensor

    def __init__(
        self,
        history: History,
        num_tensors: int,
        *,
        element: str = "e4m3",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(history, History):
            raise TypeError(
                f"history: expected a History, got {kind_of(history)}; pass recipe.history"
            )
        check_integer("num_tensors", num_tensors, 0)
        check_choice("element", element, ELEMENTS)
        self.history, self.element = history, element
        shape = num_tensors, history.length
        self.register_buffer("amax_history", torch.empty(shape, dtype=torch.float32, device=device))
        self.register_buffer("scales", torch.empty(num_tensors, dtype=torch.float32, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget all history."""
        self.amax_history.zero_()
        self.scales.zero_()

    def scales_for(self, amaxes: Tensor) -> Tensor:
        """FP32 [num_tensors]: what each is multiplied by in this step; amaxes: FP32 [num_tensors],
        theirs, noted for the next ones in training. NaN where one is not finite, so that codes show
        it.

        Raises:
            TypeError, ValueError: amaxes that are no such tensor.
        """
        check_like("amaxes", amaxes, self.scales.shape, torch.float32, self.scales.device)
        present = torch.maximum(self.amax_history[:, 0], amaxes)
        if self.training:
            self.amax_history[:, 0] = present
        starting = torch.ones_like(amaxes)
        self._advance(present.view(-1, 1).clone(), starting)
        scales = torch.where(self.scales > 0, self.scales, starting)
        return torch.where(amaxes.isfinite(), scales, torch.nan)

    def _advance(self, history: Tensor, scales: Tensor) -> None:
        """The scales of the next step, and room for its amaxes."""
        margin, algorithm = self.history.margin, self.history.algorithm
        update_fp8_scales_(
            history, scales, element=self.element, margin=margin, algorithm=algorithm
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`module.bfloat16()` and the like move it, and leave its dtype."""

        def moved(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(moved, recurse)


def update_scales(
    states: DelayedScaling | nn.Module | Iterable[DelayedScaling],
    group: dist.ProcessGroup | None = None,
) -> None:
    """The next scales of all `states`, or of all in a module: once a step, on all ranks of `group`,
    which have them alike. One maximum over the ranks, however many tensors there are; none without
    a group.

    Raises:
        ValueError: a group without this rank.
        CommunicationError: it failed.
    """
    if isinstance(states, nn.Module):
        states = [one for one in states.modules() if isinstance(one, DelayedScaling)]
    every = list(states)
    newest = [one.amax_history[:, 0] for one in every]
    for one, largest in zip(every, max_over_ranks(newest, group), strict=True):
        one.amax_history[:, 0] = largest
        one._advance(one.amax_history, one.scales)


def max_over_ranks(amaxes: Sequence[Tensor], group: dist.ProcessGroup | None) -> Sequence[Tensor]:
    """FP32 of the shapes of `amaxes`, FP32 >= 0 or NaN: the largest of all ranks, NaN being larger
    than all. One collective, or none where there is nothing to compare.

    As integers their bits have the same order, and a NaN, which backends lose, is above infinity.
    """
    if group is None or require_member(group).size() == 1 or not any(one.numel() for one in amaxes):
        return amaxes
    flat = torch.cat([one.reshape(-1) for one in amaxes])
    bits = flat.view(torch.int32) & _MAGNITUDE
    work = dist.all_reduce(bits, dist.ReduceOp.MAX, group, async_op=True)
    Pending(work, "amaxes", group).wait()
    parts = bits.view(torch.float32).split([one.numel() for one in amaxes])
    return [part.view(one.shape) for part, one in zip(parts, amaxes, strict=True)]
