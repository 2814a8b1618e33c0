"""Packs the gradients of a unit's parameters into a flat buffer of the unit's layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..buffers import BufferPool, FlatBuffer, FlatLayout
from ..kernels import pack_

Gradients = list[Tensor | None]


LARGE_GAP_NUMEL = 1024
"""A gap of at least as many elements, such as the end of a small unit over many ranks, is filled
where it lies: reading zeros to copy would be another pass over it.
"""


class GradientPacker:
    """Takes gradients from parameters and packs them, `None`s and padding as zeros.

    Tensors go in ascending order of offset, zeros for small gaps between them included: `pack_`
    checks its arguments fastest so, and every element of the buffer is written.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, pool: BufferPool) -> None:
        """`dtype`: that of the zeros for the gaps, so best that of the buffers."""
        self._layout = layout
        self._pool = pool
        self._offsets = [layout.segments[index].start for index in layout.order]
        gaps = [gap for gap in layout.gaps() if gap[1] - gap[0] < LARGE_GAP_NUMEL]
        self._large_gaps = [gap for gap in layout.gaps() if gap[1] - gap[0] >= LARGE_GAP_NUMEL]
        zeros = torch.zeros(max((stop - start for start, stop in gaps), default=0), dtype=dtype)
        zeros = zeros.to(pool.device)
        self._covering_offsets = sorted([*self._offsets, *(start for start, _ in gaps)])
        self._gap_inserts = [
            (self._covering_offsets.index(start), zeros[: stop - start]) for start, stop in gaps
        ]
        self._slots_key = ("slots", id(layout))

    def take(self, params: Sequence[nn.Parameter]) -> Gradients:
        """Every parameter's gradient, in ascending order of offset, sparse ones (autograd makes no
        others that are not strided) as dense ones; the parameters lose theirs.
        """
        grads = [
            grad if (grad := params[index].grad) is None or not grad.is_sparse else grad.to_dense()
            for index in self._layout.order
        ]
        for param in params:
            param.grad = None
        return grads

    def pack(self, flat: Tensor, grads: Gradients, *, accumulate: bool = False) -> None:
        """Write, or add, what `take` returned to `flat` [layout.numel]."""
        present = [grad for grad in grads if grad is not None]
        if accumulate or len(present) < len(grads):
            if not accumulate:
                # What no gradient covers counts as zero, padding too: the optimizer sees all of it.
                flat.zero_()
            offsets = [
                offset
                for grad, offset in zip(grads, self._offsets, strict=True)
                if grad is not None
            ]
            pack_(flat, present, offsets, accumulate=accumulate)
            return
        for start, stop in self._large_gaps:
            flat[start:stop].zero_()
        for position, zeros in self._gap_inserts:
            present.insert(position, zeros)
        slots = self._pool.views(flat, self._slots_key, self._make_slots)
        pack_(flat, present, self._covering_offsets, slots=slots)

    def _make_slots(self, flat: Tensor) -> list[Tensor]:
        views = FlatBuffer(flat, self._layout).views()
        slots = [views[index] for index in self._layout.order]
        for position, zeros in self._gap_inserts:
            start = self._covering_offsets[position]
            slots.insert(position, flat[start : start + zeros.numel()])
        return slots
