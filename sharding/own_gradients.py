"""Which gradients of this rank alone were NaN or infinite, among those that a unit's visible
gradients are made of: a maximum for each tensor, kept where the gradients are and read by nobody
until a sum is not finite.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..kernels.optim.norm_op import largest_magnitudes
from ..kernels.optim.norm_reference import INFINITY_BITS


class OwnGradients:
    """Of the tensors of one unit, in the order in which they lie in its flat buffer."""

    def __init__(self, order: Sequence[int], device: torch.device) -> None:
        """order: the tensors' indices, as they lie."""
        self._order = order
        self._largest = torch.zeros(len(order), dtype=torch.int32, device=device)

    def note(self, gradients: Sequence[Tensor | None], kept: Collection[int]) -> None:
        """`gradients` of one backward, as they lie, are packed or accumulated, on top of what is
        visible for the tensors with an index in `kept` alone. Runs in the current stream; no host
        waits. Reads the gradients once.
        """
        alone = [[] if gradient is None else [gradient] for gradient in gradients]
        found = largest_magnitudes(alone, self._largest.device)
        if not kept:
            self._largest.copy_(found)
            return
        self.forget(set(self._order).difference(kept))
        torch.maximum(self._largest, found, out=self._largest)

    def largest(self) -> Tensor:
        """The largest magnitude of each tensor, as they lie, as the bits of a float32 in an int32;
        a copy.
        """
        return self._largest.clone()

    def put_back(self, largest: Tensor) -> None:
        """The gradients are those again of which `largest()` was this."""
        self._largest.copy_(largest)

    def forget(self, indices: Collection[int]) -> None:
        """The gradients of the tensors with these indices are gone."""
        places = [place for place, index in enumerate(self._order) if index in indices]
        # In stretches: an index of places would travel to a GPU, which the host waits for.
        for _, numbered in groupby(enumerate(places), lambda one: one[1] - one[0]):
            stretch = [place for _, place in numbered]
            self._largest[stretch[0] : stretch[-1] + 1].zero_()

    def nonfinite(self) -> set[int]:
        """The indices of tensors with a NaN or an infinity. Waits for the device."""
        is_bad = (self._largest >= INFINITY_BITS).tolist()
        return {index for index, bad in zip(self._order, is_bad, strict=True) if bad}
